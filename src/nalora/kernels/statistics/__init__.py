"""One pass over the gate pre-activations z, reduced on the spot to sums that do not grow."""

from nalora.kernels.statistics.engines import Accumulate, Engine, choose
from nalora.kernels.statistics.reference import accumulate
from nalora.kernels.statistics.sums import Sums

__all__ = ["Accumulate", "Engine", "Sums", "accumulate", "choose"]
