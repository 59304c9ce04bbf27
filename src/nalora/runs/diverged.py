"""What a run is refused with that diverged: the error, and what to try against it."""

from __future__ import annotations

from pathlib import Path

from nalora.errors import NALoRAError
from nalora.runs.settings import RunSettings


class Diverged(NALoRAError):  # noqa: N818 - the name that studies and users know it by
    """Loss or gradients of a run were not finite any more.

    Args:
        where: the run's folder.
        step: the first optimizer step whose loss or gradient norm was not finite.
        advice: what to try.
        checkpoint: the last one whose numbers are finite, None where there is none.
    """

    def __init__(self, where: str, step: int, advice: str, checkpoint: Path | None = None) -> None:
        self.step = step
        last = f"; the last good checkpoint is {checkpoint}" if checkpoint else ""
        super().__init__(
            where,
            found=f"a run that diverged: loss or gradients are not finite from step {step} on{last}",
            expected="finite numbers to the end",
            fix=advice,
        )


def advice(settings: RunSettings, dtype: str | None = None) -> str:
    """What to try against a divergence, by what the run has not tried yet."""
    steps = [f"lower learning_rate (it was {settings.learning_rate:g})"]
    steps.append("raise warmup" if settings.warmup else "set warmup: 0.03")
    steps.append(
        f"lower max_norm ({settings.max_norm:g})" if settings.max_norm else "clip gradients with max_norm: 1.0"
    )
    used = settings.dtype or dtype
    if used == "float16":
        steps.append("use dtype: bfloat16 or float32")
    elif used == "bfloat16":
        steps.append("use dtype: float32")
    else:
        steps.append("keep dtype: float32")
    return f"start another run, with another output=: {', '.join(steps)}"
