"""One pass over the gate pre-activations z, reduced on the spot to sums that do not grow."""

from nalora.statistics.reference import accumulate
from nalora.statistics.sums import Sums

__all__ = ["Sums", "accumulate"]
