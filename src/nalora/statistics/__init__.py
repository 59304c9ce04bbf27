"""One pass over the gate pre-activations z, reduced on the spot to sums that do not grow."""

from nalora.statistics.engines import Accumulate, Engine, choose
from nalora.statistics.reference import accumulate
from nalora.statistics.sums import Sums

__all__ = ["Accumulate", "Engine", "Sums", "accumulate", "choose"]
