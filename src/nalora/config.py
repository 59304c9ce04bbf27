"""What NA-LoRA is told to do: the paper's hyperparameter table as frozen dataclasses."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import numbers
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from nalora.errors import NALoRAError

_PAPER_PROJECTION_ARGUMENTS = {"alpha": "sensitivity", "smin": "low", "smax": "high"}
_PAPER_ARGUMENTS = {
    "gate_keep_ratio": "keep_ratio",
    "gate_beta": "sharpness",
    "gate_ema": "mask_ema",
    "lambda_ov": "positive_penalty",
    "beta_s": "scale_ema",
}


def _require(field: str, value: Any, holds: bool, expected: str) -> None:
    if not holds:
        raise NALoRAError(
            f"NALoRAConfig.{field}",
            found=repr(value),
            expected=expected,
            fix=f"set {field} to that",
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


@contextlib.contextmanager
def _in_the_papers_words(typed: dict[str, Any]) -> Iterator[None]:
    """What is refused is called as the user typed it, not by the field that it stands for."""
    try:
        yield
    except NALoRAError as error:
        raise NALoRAError(
            f"NALoRAConfig.from_paper({', '.join(f'{name}=…' for name in typed)})",
            found=", ".join(repr(value) for value in typed.values()),
            expected=error.expected,
            fix=f"set {' and '.join(typed)} to that",
        ) from None


def _one_of(field: str, value: str, choices: tuple[str, ...]) -> None:
    _require(field, value, value in choices, "one of " + ", ".join(map(repr, choices)))


@dataclass(frozen=True)
class ProjectionScale:
    """How one FFN projection's step scale answers to the regime score a (eq. step_scale).

    Args:
        sensitivity: α, the slope of the scale in 2a − 1.
        low: s_min, the smallest scale.
        high: s_max, the largest scale.
    """

    sensitivity: float
    low: float
    high: float

    def __post_init__(self) -> None:
        for field in ("sensitivity", "low", "high"):
            _require(field, getattr(self, field), _is_number(getattr(self, field)), "a number")
        _require("sensitivity", self.sensitivity, math.isfinite(self.sensitivity), "a finite number")
        _require("low, high", (self.low, self.high), 0 < self.low <= self.high < math.inf, "0 < low ≤ high")


@dataclass(frozen=True)
class NALoRAConfig:
    """The settings of NA-LoRA; the defaults are the paper's table of Llama hyperparameters.

    Args:
        keep_ratio: ρ_keep, the share of gate channels above the mask's threshold; 1 means a mask of ones.
        sharpness: β of the soft mask.
        mask_ema: η_m, how much of the mask the next step keeps.
        positive_penalty: λ_pos, the weight of positive non-amplifying gates in the regime score.
        scale_ema: β_s, how much of a step scale the next step keeps.
        gate: step scale of the gate projection.
        up: step scale of the up projection.
        down: step scale of the down projection.
        mask: whether the channel mask acts.
        scaling: whether the step scales act.
        importance: what a channel is ranked by: ``"derivative"``, E|φ′(z)| as in the paper, or
            ``"utility"``, E|φ′(z)|·|u|, the whole factor that stands in the paper's gate gradient.
        mask_channels: ``"learned"``, or a control for what the mask's choice of channels is worth: ``"shuffled"`` gives
            every channel another one's value by a fixed random exchange, the same histogram at every step;
            ``"frozen"`` keeps the first observation's mask.
        mask_seed: which exchange ``"shuffled"`` draws.
        preserve_mean: divide the mask by its mean, so that it moves capacity without shrinking the step.
        regimes: ``"paper"`` leaves the GELU family unscaled as the paper does; ``"derived"`` scales every
            activation whose κ has two characteristic points.
        thresholds: (low, high) in place of the activation's own characteristic points.
        apply_to: ``"gradient"``, the paper's letter, or ``"update"``, which multiplies the optimizer's step.
        start: ``"ones"`` starts as plain LoRA, ``"first"`` at the first observation.
    """

    keep_ratio: float = 0.30
    sharpness: float = 20.0
    mask_ema: float = 0.90
    positive_penalty: float = 1.0
    scale_ema: float = 0.95
    gate: ProjectionScale = ProjectionScale(0.40, 0.80, 1.50)
    up: ProjectionScale = ProjectionScale(0.30, 0.80, 1.40)
    down: ProjectionScale = ProjectionScale(0.20, 0.85, 1.30)
    mask: bool = True
    scaling: bool = True
    importance: Literal["derivative", "utility"] = "derivative"
    mask_channels: Literal["learned", "shuffled", "frozen"] = "learned"
    mask_seed: int = 0
    preserve_mean: bool = False
    regimes: Literal["paper", "derived"] = "paper"
    thresholds: tuple[float, float] | None = None
    apply_to: Literal["gradient", "update"] = "gradient"
    start: Literal["ones", "first"] = "ones"

    def __post_init__(self) -> None:
        for field in ("keep_ratio", "sharpness", "mask_ema", "positive_penalty", "scale_ema"):
            _require(field, getattr(self, field), _is_number(getattr(self, field)), "a number")
        for field in ("gate", "up", "down"):
            given = getattr(self, field)
            _require(field, given, isinstance(given, ProjectionScale), "ProjectionScale(sensitivity, low, high)")
        _require("keep_ratio", self.keep_ratio, 0 < self.keep_ratio <= 1, "a number in (0, 1]")
        _require("sharpness", self.sharpness, 0 < self.sharpness < math.inf, "a positive number")
        _require("mask_ema", self.mask_ema, 0 <= self.mask_ema < 1, "a number in [0, 1)")
        _require("scale_ema", self.scale_ema, 0 <= self.scale_ema < 1, "a number in [0, 1)")
        _require("positive_penalty", self.positive_penalty, 0 <= self.positive_penalty < math.inf, "a number ≥ 0")
        _one_of("importance", self.importance, ("derivative", "utility"))
        _one_of("mask_channels", self.mask_channels, ("learned", "shuffled", "frozen"))
        _one_of("regimes", self.regimes, ("paper", "derived"))
        _one_of("apply_to", self.apply_to, ("gradient", "update"))
        _one_of("start", self.start, ("ones", "first"))
        if self.thresholds is not None:
            pair = isinstance(self.thresholds, tuple | list) and len(self.thresholds) == 2
            _require("thresholds", self.thresholds, pair and all(map(_is_number, self.thresholds)), "(low, high)")
            low, high = self.thresholds
            _require("thresholds", self.thresholds, -math.inf < low <= high < math.inf, "finite low ≤ high")

    @classmethod
    def from_paper(cls, **arguments: Any) -> NALoRAConfig:
        """Build a configuration from the argument names of the paper's code.

        Understood are ``gate_keep_ratio``, ``gate_beta``, ``gate_ema``, ``t`` (the symmetric threshold τ_z),
        ``lambda_ov``, ``beta_s`` and ``alpha_*``, ``smin_*``, ``smax_*`` for gate, up and down.

        Raises:
            NALoRAError: an argument the paper's code does not have, or a value out of range.
        """
        settings: dict[str, Any] = {}
        projections: dict[str, dict[str, Any]] = {}
        for argument, value in arguments.items():
            prefix, _, projection = argument.partition("_")
            if argument in _PAPER_ARGUMENTS:
                with _in_the_papers_words({argument: value}):
                    cls(**{_PAPER_ARGUMENTS[argument]: value})
                settings[_PAPER_ARGUMENTS[argument]] = value
            elif argument == "t":
                with _in_the_papers_words({argument: value}):
                    _require(argument, value, _is_number(value) and 0 <= value < math.inf, "a number ≥ 0")
                settings["thresholds"] = (-value, value)
            elif prefix in _PAPER_PROJECTION_ARGUMENTS and projection in ("gate", "up", "down"):
                projections.setdefault(projection, {})[argument] = value
            else:
                known = [*_PAPER_ARGUMENTS, "t", *(f"{p}_gate/up/down" for p in _PAPER_PROJECTION_ARGUMENTS)]
                raise NALoRAError(
                    f"NALoRAConfig.from_paper({argument}=…)",
                    found="an argument the paper's code does not have",
                    expected="one of " + ", ".join(known),
                    fix="use that name, or pass nalora's own settings to NALoRAConfig",
                )
        for projection, typed in projections.items():
            default: ProjectionScale = getattr(cls, projection)
            changes = {_PAPER_PROJECTION_ARGUMENTS[each.partition("_")[0]]: value for each, value in typed.items()}
            with _in_the_papers_words(typed):
                settings[projection] = dataclasses.replace(default, **changes)
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values that JSON keeps."""
        return dataclasses.asdict(self)
