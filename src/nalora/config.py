"""NA-LoRA's settings: the paper's hyperparameter table as frozen dataclasses."""

from __future__ import annotations

import dataclasses
import math
import numbers
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from nalora.errors import NALoRAError, require, unknown_name

Kernels = Literal["auto", "off", "fused"]
Importance = Literal["derivative", "utility"]
Regimes = Literal["paper", "derived"]
Space = Literal["gradient", "update"]
MaskChannels = Literal["learned", "shuffled", "frozen"]
Start = Literal["ones", "first"]

PROJECTIONS = ("gate", "up", "down")
# The arguments of the paper's code and the corresponding settings; t is the symmetric threshold τ_z.
PAPER_ARGUMENTS = {
    "gate_keep_ratio": "keep_ratio",
    "gate_beta": "sharpness",
    "gate_ema": "mask_ema",
    "t": "thresholds",
    "lambda_ov": "positive_penalty",
    "beta_s": "scale_ema",
    **{f"alpha_{projection}": f"{projection}.sensitivity" for projection in PROJECTIONS},
    **{f"smin_{projection}": f"{projection}.low" for projection in PROJECTIONS},
    **{f"smax_{projection}": f"{projection}.high" for projection in PROJECTIONS},
}


def _require(field: str, value: Any, holds: bool, expected: str) -> None:
    require(holds, f"NALoRAConfig.{field}", value, expected, f"set {field} to that")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
    return flat


@dataclass(frozen=True)
class ProjectionScale:
    """How the step scale of one FFN projection depends on the regime score a (eq. step_scale).

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
        mask_ema: η_m, the decay of the mask's moving average.
        positive_penalty: λ_pos, the weight of positive non-amplifying gates in the regime score.
        scale_ema: β_s, the decay of the step scales' moving average.
        gate: step scale of the gate projection.
        up: step scale of the up projection.
        down: step scale of the down projection.
        mask: whether the channel mask acts.
        scaling: whether the step scales act.
        importance: the score that ranks channels: ``"derivative"``, E|φ′(z)| as in the paper, or
            ``"utility"``, E|φ′(z)|·|u|, the whole factor in the paper's gate gradient.
        mask_channels: ``"learned"``, or a control experiment on the mask's choice of channels: ``"shuffled"`` permutes
            the channels' scores by a fixed random permutation, which keeps their histogram at every step;
            ``"frozen"`` keeps the mask of the first observation.
        mask_seed: the seed of the permutation of ``"shuffled"``.
        preserve_mean: divide the mask by its mean, so that it does not shrink the mean step.
        regimes: ``"paper"`` leaves the GELU family unscaled as the paper does; ``"derived"`` scales every
            activation whose κ has two characteristic points.
        thresholds: (low, high) in place of the activation's own characteristic points.
        apply_to: ``"gradient"`` as in the paper, or ``"update"``, which multiplies the optimizer's step.
        start: the initial moving averages: ``"ones"`` (plain LoRA) or ``"first"``, the first observation.
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
    importance: Importance = "derivative"
    mask_channels: MaskChannels = "learned"
    mask_seed: int = 0
    preserve_mean: bool = False
    regimes: Regimes = "paper"
    thresholds: tuple[float, float] | None = None
    apply_to: Space = "gradient"
    start: Start = "ones"

    def __post_init__(self) -> None:
        for field in ("keep_ratio", "sharpness", "mask_ema", "positive_penalty", "scale_ema"):
            _require(field, getattr(self, field), _is_number(getattr(self, field)), "a number")
        for field in PROJECTIONS:
            scale = getattr(self, field)
            _require(field, scale, isinstance(scale, ProjectionScale), "ProjectionScale(sensitivity, low, high)")
        _require("keep_ratio", self.keep_ratio, 0 < self.keep_ratio <= 1, "a number in (0, 1]")
        _require("sharpness", self.sharpness, 0 < self.sharpness < math.inf, "a positive number")
        _require("mask_ema", self.mask_ema, 0 <= self.mask_ema < 1, "a number in [0, 1)")
        _require("scale_ema", self.scale_ema, 0 <= self.scale_ema < 1, "a number in [0, 1)")
        _require("positive_penalty", self.positive_penalty, 0 <= self.positive_penalty < math.inf, "a number ≥ 0")
        for field, hint in typing.get_type_hints(type(self)).items():
            choices, value = typing.get_args(hint), getattr(self, field)
            if typing.get_origin(hint) is Literal:
                _require(field, value, value in choices, "one of " + ", ".join(map(repr, choices)))
            elif hint is bool:
                _require(field, value, isinstance(value, bool), "True or False")
        if self.thresholds is not None:
            pair = isinstance(self.thresholds, tuple | list) and len(self.thresholds) == 2
            _require("thresholds", self.thresholds, pair and all(map(_is_number, self.thresholds)), "(low, high)")
            low, high = self.thresholds
            _require("thresholds", self.thresholds, -math.inf < low <= high < math.inf, "finite low ≤ high")

    @classmethod
    def from_paper(cls, **arguments: Any) -> NALoRAConfig:
        """Build a configuration from the argument names of the paper's code.

        Accepts ``gate_keep_ratio``, ``gate_beta``, ``gate_ema``, ``t`` (the symmetric threshold τ_z),
        ``lambda_ov``, ``beta_s`` and ``alpha_*``, ``smin_*``, ``smax_*`` for gate, up and down.

        Raises:
            NALoRAError: an argument the paper's code does not have, or a value out of range.
        """
        for argument in arguments:
            if argument not in PAPER_ARGUMENTS:
                raise NALoRAError(
                    f"NALoRAConfig.from_paper({argument}=…)",
                    found="an argument the paper's code does not have",
                    expected="one of " + ", ".join(PAPER_ARGUMENTS),
                    fix="use that name, or pass nalora's own settings to NALoRAConfig",
                )
        return cls().changed(arguments)

    def changed(self, settings: Mapping[str, Any]) -> NALoRAConfig:
        """Return this configuration with other settings, named as in a run file.

        Args:
            settings: fields and arguments of the paper's code by name; `gate`, `up` and `down` may be mappings with
                some of their fields.

        Raises:
            NALoRAError: a value out of range, or a field together with the paper's argument for it.
        """
        names: dict[str, str] = {}
        fields: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            nested = isinstance(value, Mapping)
            for typed, part in [(f"{name}.{key}", value[key]) for key in value] if nested else [(name, value)]:
                setting = PAPER_ARGUMENTS.get(typed, typed)
                if setting in names:
                    raise NALoRAError(
                        f"{names[setting]} and {typed}",
                        found="two names of one setting, nalora's and the paper's",
                        expected="one of them",
                        fix=f"leave {typed} out",
                    )
                names[setting] = typed
                fields.setdefault(setting.partition(".")[0], {})[typed] = part
        config = self
        for field, values in fields.items():
            config = config._with(field, values)
        return config

    def _with(self, field: str, typed: Mapping[str, Any]) -> NALoRAConfig:
        """Return this configuration with one field changed; `typed` are its values by the names the user typed."""
        value: Any = next(iter(typed.values()))
        try:
            if field in PROJECTIONS:
                value = _changed_scale(getattr(self, field), typed)
            elif "t" in typed:
                _require("t", value, _is_number(value) and 0 <= value < math.inf, "a number ≥ 0")
                value = (-value, value)
            change: dict[str, Any] = {field: tuple(value) if isinstance(value, list) else value}
            return dataclasses.replace(self, **change)
        except NALoRAError as error:
            arguments = ", ".join(f"{name}=…" for name in typed)
            of_paper = not typed.keys().isdisjoint(PAPER_ARGUMENTS)
            raise NALoRAError(
                f"NALoRAConfig.from_paper({arguments})" if of_paper else f"NALoRAConfig.{', '.join(typed)}",
                found=", ".join(map(repr, typed.values())),
                expected=error.expected,
                fix=f"set {' and '.join(typed)} to that",
            ) from None

    def chosen(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults; those of a projection as ``gate.low``."""
        values, defaults = _flat(self.to_dict()), _flat(NALoRAConfig().to_dict())
        return {name: value for name, value in values.items() if value != defaults[name]}

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values for JSON."""
        return dataclasses.asdict(self)


class Settings(TypedDict, total=False):
    """The fields of NALoRAConfig as keyword arguments, for type checkers: they cannot be derived from the dataclass."""

    keep_ratio: float
    sharpness: float
    mask_ema: float
    positive_penalty: float
    scale_ema: float
    gate: ProjectionScale
    up: ProjectionScale
    down: ProjectionScale
    mask: bool
    scaling: bool
    importance: Importance
    mask_channels: MaskChannels
    mask_seed: int
    preserve_mean: bool
    regimes: Regimes
    thresholds: tuple[float, float] | None
    apply_to: Space
    start: Start


def config_of(call: str, config: NALoRAConfig | None, settings: Mapping[str, Any]) -> NALoRAConfig | None:
    """Return the configuration of a call that takes either a configuration or its fields as keyword arguments.

    Args:
        call: the name of the function, for errors.
        config: its configuration argument.
        settings: its other keyword arguments.

    Raises:
        NALoRAError: both, an unknown name, or a value out of range.
    """
    known = [field.name for field in dataclasses.fields(NALoRAConfig)]
    for name in settings:
        where = f"{call}({name}=…)"
        if name not in known:
            otherwise = "leave it out; NALoRAConfig.from_paper takes the names of the paper's code"
            raise unknown_name(where, "no such argument", name, ["config", "kernels", *known], otherwise)
        if config is not None:
            fix = f"dataclasses.replace(config, {name}=…), or only keywords"
            raise NALoRAError(where, found="a configuration as well", expected="one of the two", fix=fix)
    return NALoRAConfig(**settings) if settings else config


def types_in_files() -> dict[str, Any]:
    """Return the type of every setting in a YAML file, also under the argument names of the paper's code."""
    in_files = dict.fromkeys(PROJECTIONS, dict[str, float]) | {"thresholds": list[float] | None}
    return typing.get_type_hints(NALoRAConfig) | in_files | dict.fromkeys(PAPER_ARGUMENTS, float)


def _changed_scale(scale: ProjectionScale, typed: Mapping[str, Any]) -> ProjectionScale:
    """Return the step scale with other values, named like ``gate.low`` or ``smin_gate``."""
    parts = {PAPER_ARGUMENTS.get(name, name).partition(".")[2]: value for name, value in typed.items()}
    known = [field.name for field in dataclasses.fields(ProjectionScale)]
    _require("parts", list(parts), parts.keys() <= set(known), f"values of {', '.join(known)}")
    return dataclasses.replace(scale, **parts)
