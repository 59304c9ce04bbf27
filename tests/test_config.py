"""The settings: the paper's table by default, checked when built."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from nalora import NALoRAConfig, NALoRAError, ProjectionScale
from nalora.config import Settings, config_of


def test_defaults_are_the_papers_table():
    config = NALoRAConfig()
    assert (config.keep_ratio, config.sharpness, config.mask_ema) == (0.30, 20.0, 0.90)
    assert (config.positive_penalty, config.scale_ema) == (1.0, 0.95)
    assert dataclasses.astuple(config.gate) == (0.40, 0.80, 1.50)
    assert dataclasses.astuple(config.up) == (0.30, 0.80, 1.40)
    assert dataclasses.astuple(config.down) == (0.20, 0.85, 1.30)


def test_from_paper_takes_the_arguments_of_the_papers_code():
    config = NALoRAConfig.from_paper(
        gate_keep_ratio=0.2, gate_beta=10.0, gate_ema=0.8, t=1.27846, lambda_ov=0.5, beta_s=0.9,
        alpha_gate=0.3, smin_gate=0.7, smax_up=1.2, alpha_down=0.1,
    )  # fmt: skip
    assert config == NALoRAConfig(
        keep_ratio=0.2,
        sharpness=10.0,
        mask_ema=0.8,
        thresholds=(-1.27846, 1.27846),
        positive_penalty=0.5,
        scale_ema=0.9,
        gate=ProjectionScale(0.3, 0.7, 1.5),
        up=ProjectionScale(0.3, 0.8, 1.2),
        down=ProjectionScale(0.1, 0.85, 1.3),
    )
    with pytest.raises(NALoRAError, match="gate_keep_ratios.*does not have"):
        NALoRAConfig.from_paper(gate_keep_ratios=0.2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_ratio": 0.0},
        {"keep_ratio": 1.01},
        {"keep_ratio": float("nan")},
        {"sharpness": 0.0},
        {"mask_ema": 1.0},
        {"mask_ema": -0.1},
        {"scale_ema": 1.0},
        {"positive_penalty": -1.0},
        {"importance": "gradient"},
        {"regimes": "none"},
        {"apply_to": "weights"},
        {"start": "zeros"},
        {"thresholds": (1.0, -1.0)},
        {"thresholds": (1.0,)},
        {"thresholds": (float("-inf"), 1.0)},
    ],
)
def test_values_out_of_range_name_field_value_and_range(wrong):
    (field, value), *_ = wrong.items()
    with pytest.raises(NALoRAError) as refusal:
        NALoRAConfig(**wrong)
    assert refusal.value.where == f"NALoRAConfig.{field}"
    assert repr(value) in str(refusal.value)
    assert refusal.value.expected
    assert refusal.value.fix


@pytest.mark.parametrize("wrong", [(0.4, 0.0, 1.5), (0.4, 1.6, 1.5), (float("inf"), 0.8, 1.5)])
def test_projection_scales_are_checked(wrong):
    with pytest.raises(NALoRAError):
        ProjectionScale(*wrong)


def test_configurations_are_frozen_and_comparable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        NALoRAConfig().keep_ratio = 0.5
    assert hash(NALoRAConfig()) == hash(NALoRAConfig())


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_ratio": "0.3"},
        {"sharpness": None},
        {"mask_ema": [0.9]},
        {"positive_penalty": True},
        {"gate": {"low": 0.8}},
        {"thresholds": 1.0},
        {"thresholds": ("a", "b")},
    ],
)
def test_values_of_another_type_are_refused_like_those_out_of_range(wrong):
    ((field, value),) = wrong.items()
    with pytest.raises(NALoRAError) as refusal:
        NALoRAConfig(**wrong)
    assert refusal.value.where == f"NALoRAConfig.{field}"
    assert refusal.value.found == repr(value)
    with pytest.raises(NALoRAError):
        ProjectionScale("0.4", 0.8, 1.5)


@pytest.mark.parametrize(
    "wrong", [{"t": -1}, {"t": "1"}, {"gate_keep_ratio": 2}, {"beta_s": None}, {"smin_up": 1.6, "smax_up": 1.5}]
)
def test_from_paper_names_the_argument_that_was_typed(wrong):
    with pytest.raises(NALoRAError) as refusal:
        NALoRAConfig.from_paper(alpha_gate=0.3, **wrong)
    assert refusal.value.where == f"NALoRAConfig.from_paper({', '.join(f'{name}=…' for name in wrong)})"
    assert refusal.value.found == ", ".join(map(repr, wrong.values()))


# ---- settings as keyword arguments -----------------------------------------------------------------------------------


def test_keywords_are_typed_as_the_fields():
    assert typing.get_type_hints(Settings) == typing.get_type_hints(NALoRAConfig)


def test_keywords_are_fields_of_the_configuration():
    assert config_of("attach", None, {}) is None
    config = NALoRAConfig(apply_to="update")
    assert config_of("attach", config, {}) is config
    settings = {"apply_to": "update", "gate": ProjectionScale(0.1, 0.9, 1.1), "thresholds": (-1.0, 1.0)}
    assert config_of("attach", None, settings) == NALoRAConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"aply_to": "update"}, r"attach\(aply_to=…\): found no such argument.*did you mean apply_to\?"),
        ({"kernel": "off"}, "did you mean kernels"),
        ({"t": 1.0}, "from_paper"),
        ({"apply_to": "updates"}, "apply_to: found 'updates'; expected one of 'gradient', 'update'"),
        ({"mask": "no"}, "mask: found 'no'; expected True or False"),
    ],
)
def test_wrong_keywords_are_refused_with_a_suggestion(settings, message):
    with pytest.raises(NALoRAError, match=message):
        config_of("attach", None, settings)


def test_a_configuration_and_keywords_are_refused_together():
    with pytest.raises(NALoRAError, match=r"found a configuration as well.*replace\(config, mask=…\)"):
        config_of("attach", NALoRAConfig(), {"mask": False})


def test_the_chosen_settings_are_those_that_differ_from_the_defaults():
    assert NALoRAConfig().chosen() == {}
    config = NALoRAConfig().changed({"keep_ratio": 0.2, "mask": True, "gate": {"low": 0.7, "high": 1.5}, "t": 1.0})
    assert config.chosen() == {"keep_ratio": 0.2, "gate.low": 0.7, "thresholds": (-1.0, 1.0)}
