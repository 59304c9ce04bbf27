"""A run's file is understood as a whole, or every problem in it is named at once."""

from __future__ import annotations

import pytest

import nalora
from nalora.training.settings import check, read

GOOD = {"model": "smollm2-135m", "task": "gsm8k"}


def problems(given) -> str:
    with pytest.raises(nalora.NALoRAError) as error:
        check(given)
    return str(error.value)


def test_defaults_overrides_and_numbers_as_yaml_writes_them(tmp_path):
    file = tmp_path / "my-run.yaml"
    file.write_text("model: smollm2-135m\ntask: gsm8k\nmethod: na-lora\nlearning_rate: 1e-3\nkeep_ratio: 0.5\n")
    run = read(file, ["rank=16", "apply_to=update", "target_modules=[q_proj, v_proj]", "steps=7", "dtype="])
    assert run.settings.learning_rate == 1e-3
    assert (run.settings.rank, run.settings.steps, run.settings.dtype) == (16, 7, None)
    assert run.settings.target_modules == ["q_proj", "v_proj"]
    assert run.settings.output == "runs/my-run"
    assert run.method.nalora_config() == nalora.NALoRAConfig(keep_ratio=0.5, apply_to="update")
    assert check(run.to_dict()) == run


def test_every_problem_is_named_at_once():
    said = problems({
        "task": "gsm9k", "method": "na-lora", "learnin_rate": 1e-3, "rank": 0, "seed": "zero", "schedule": "cosin",
        "apply_to": "weights", "packing": "yes please", "batch_size": 32, "micro_batch_size": 5,
    })  # fmt: skip
    assert "problems: " in said
    for part in (
        "did you mean 'gsm8k'", "model: missing", "learnin_rate: no such setting (did you mean learning_rate?)",
        "rank: 0, expected 1 or more", "seed: 'zero', expected a whole number", "schedule: 'cosin', expected one of",
        "apply_to: 'weights', expected one of gradient, update", "packing: 'yes please', expected true or false",
        "batch_size: 32 is no multiple of micro_batch_size, 5",
    ):  # fmt: skip
        assert part in said, part


def test_settings_of_another_method_are_not_taken_in_silence():
    assert "apply_to: no such setting" in problems({**GOOD, "method": "lora", "apply_to": "update"})


def test_a_value_that_the_method_refuses_is_among_the_problems():
    assert "keep_ratio" in problems({**GOOD, "method": "na-lora", "keep_ratio": 3.0})


def test_a_task_s_own_settings_are_known():
    assert check({**GOOD, "train_set": "gsm8k"}).task_options == {"train_set": "gsm8k"}


@pytest.mark.parametrize(
    ("text", "said"),
    [("a: [", "expected YAML"), ("- a\n", "`key: value` lines"), (None, "no such file")],
)
def test_files_that_are_no_run(tmp_path, text, said):
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(nalora.NALoRAError, match=said):
        read(file)
    file.write_text("")
    with pytest.raises(nalora.NALoRAError, match="key=value"):
        read(file, ["rank"])
