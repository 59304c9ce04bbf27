"""Statistics of the gate pre-activations z: sums of fixed size, computed in one pass."""

from nalora.kernels.statistics.engines import Accumulate, Engine, choose
from nalora.kernels.statistics.reference import accumulate
from nalora.kernels.statistics.sums import Sums

__all__ = ["Accumulate", "Engine", "Sums", "accumulate", "choose"]
