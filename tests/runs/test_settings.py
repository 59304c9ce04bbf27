"""A run's file is understood as a whole, or every problem in it is named at once."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import yaml

import nalora
from nalora import NALoRAConfig, ProjectionScale
from nalora.config import PAPER_ARGUMENTS
from nalora.runs.conversion import key_values
from nalora.runs.settings import check, chosen, read
from nalora.studies import study
from nalora.studies.store import key

GOOD = {"model": "smollm2-135m", "task": "gsm8k"}


def problems(given) -> str:
    with pytest.raises(nalora.NALoRAError) as error:
        check(given)
    return str(error.value)


def test_defaults_overrides_and_numbers_as_yaml_writes_them(tmp_path):
    file = tmp_path / "my-run.yaml"
    file.write_text("model: smollm2-135m\ntask: gsm8k\nmethod: na-lora\nlearning_rate: 1e-3\nkeep_ratio: 0.5\n")
    run = read(file, ["rank=16", "apply_to=update", "target_modules=[q_proj, v_proj]", "steps=7", "dtype=null"])
    assert run.settings.learning_rate == 1e-3
    assert (run.settings.rank, run.settings.steps, run.settings.dtype) == (16, 7, None)
    assert run.settings.target_modules == ["q_proj", "v_proj"]
    assert run.settings.output == "runs/my-run"
    assert run.method.config == nalora.NALoRAConfig(keep_ratio=0.5, apply_to="update")
    assert check(run.to_dict()) == run


def test_every_problem_is_named_at_once():
    message = problems({
        "task": "gsm9k", "method": "na-lora", "learnin_rate": 1e-3, "rank": 0, "seed": "zero", "schedule": "cosin",
        "apply_to": "weights", "packing": "yes please", "batch_size": 32, "micro_batch_size": 5,
    })  # fmt: skip
    assert "problems: " in message
    for part in (
        "did you mean gsm8k", "model: missing", "learnin_rate: no such setting (did you mean learning_rate?)",
        "rank: 0, expected 1 or more", "seed: 'zero', expected a whole number", "schedule: 'cosin', expected one of",
        "apply_to: 'weights', expected one of gradient, update", "packing: 'yes please', expected true or false",
        "batch_size: 32 is not a multiple of micro_batch_size, 5",
    ):  # fmt: skip
        assert part in message, part


def test_settings_of_another_method_are_not_taken_in_silence():
    assert "apply_to: a setting of na-lora, " in problems({**GOOD, "method": "lora", "apply_to": "update"})


def test_a_value_that_the_method_refuses_is_among_the_problems():
    assert "keep_ratio" in problems({**GOOD, "method": "na-lora", "keep_ratio": 3.0})


def test_a_task_s_own_settings_are_known():
    assert check({**GOOD, "train_set": "gsm8k"}).task_options == {"train_set": "gsm8k"}


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "expected YAML"), ("- a\n", "`key: value` lines"), (None, "no such file")],
)
def test_files_that_are_no_run(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(nalora.NALoRAError, match=message):
        read(file)
    file.write_text("")
    with pytest.raises(nalora.NALoRAError, match="key=value"):
        read(file, ["rank"])


def test_an_unknown_task_or_method_is_the_one_problem():
    """Its settings are not reported as unknown as well; a misspelt setting of the run still is."""
    of_the_family = {"settings": {"max_terms": 2}, "train_size": 300, "test_size": 100, "max_new_tokens": 8}
    for wrong in (
        {"task": "gsm9k", **of_the_family},
        {**GOOD, "method": "na-lora", "on": "adalora", "keep_ratio": 0.5},
        {**GOOD, "method": "na-laura", "keep_ratio": 0.5, "apply_to": "update"},
    ):
        message = problems({"model": "smollm2-135m", **wrong})
        assert "problems" not in message
        assert "no such setting" not in message
    assert "learnin_rate: no such setting (did you mean learning_rate?)" in problems({
        "model": "smollm2-135m", "task": "gsm9k", "learnin_rate": 1e-3,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"task": "gsm9k"}, "task 'gsm9k': no task of that name (did you mean gsm8k?)"),
        ({"method": "lorra"}, "method 'lorra': no method of that name (did you mean lora?)"),
        ({"rank": "many"}, "rank: 'many', expected a whole number"),
        ({"report_to": "wandbb"}, "report_to: wandbb: no logger of that name (did you mean wandb?)"),
        ({"rank": 10**12}, "rank: 1000000000000, expected a whole number of at most 2147483647"),
        ({"learning_rate": ".inf"}, "learning_rate: '.inf', expected a number"),
        ({"learning_rate": float("inf")}, "learning_rate: inf, expected a number"),
        ({"target_modules": []}, "target_modules: an empty list, expected names of layers (or all-linear)"),
        (
            {"target_modules": "q_proj, v_proj"},
            "target_modules: 'q_proj, v_proj', expected a list of names: [q_proj, v_proj]"
            " (on the command line 'target_modules=[q_proj,v_proj]')",
        ),
        ({"limit": "all"}, "limit: 'all', expected a whole number or nothing"),
        ({7: 1}, "7: expected the name of a setting"),
    ],
)
def test_a_single_problem_is_the_whole_message(wrong, message):
    """No sentence around it: what was found and the fix, for this problem alone."""
    assert problems({**GOOD, **wrong}) == f"run: {message}"


def test_an_unknown_family_names_the_nearest():
    pytest.importorskip("reasoning_gym")
    message = problems({**GOOD, "task": "gym/chain_sums", "train_size": 300})
    assert "run: gym/chain_sums: no family 'chain_sums'" in message
    assert "did you mean chain_sum" in message
    assert "did you mean gym/chain_sum?" in problems({**GOOD, "task": "chain_sum"})


def test_without_reasoning_gym_no_family_is_unknown(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    assert check({**GOOD, "task": "gym/chain_sums"}).settings.task == "gym/chain_sums"


@pytest.mark.parametrize("name", ["adamw_torch", "sgd", "muon", "paged_adamw_8bit"])
def test_optimizers_that_training_takes(name):
    assert check({**GOOD, "optimizer": name}).settings.optimizer == name


def test_an_unknown_optimizer_names_the_nearest():
    message = problems({**GOOD, "optimizer": "adamm"})
    assert "optimizer 'adamm': no optimizer of that name" in message
    assert "adamw_torch" in message


def test_a_run_of_another_machine_can_be_read_here():
    """Only training checks the device: a run trained on a GPU can be reported and evaluated anywhere."""
    assert check({**GOOD, "device": "cuda:7"}).settings.device == "cuda:7"


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_the_usual_optimizer_is_what_short_names_mean(name):
    given = {"model": "smollm2-135m", "task": "gym/chain_sum", "optimizer": name}
    assert "did you mean adamw_torch?" in problems(given)


def test_a_study_s_file_is_no_run_s(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text("arms: {lora: {method: lora}}\n")
    with pytest.raises(nalora.NALoRAError, match=r"found a study; .*Fix: nalora study"):
        read(file)
    file.write_text("model: smollm2-135m\ntask: gym/chain_sum\n")
    with pytest.raises(nalora.NALoRAError, match=r"found a run; .*Fix: nalora train"):
        study.read(file)


@pytest.mark.parametrize("key", ["max_lenght", "nosuch"])
def test_removing_a_setting_that_no_run_has_is_refused(tmp_path, key):
    """A slip in the name would leave the file's value in force without a word."""
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ntask: gsm8k\nmax_length: 64\n")
    with pytest.raises(nalora.NALoRAError, match=f"{key}=: found no such setting"):
        read(file, [f"{key}="])
    assert read(file, ["max_length=", "steps="]).settings.max_length == 1024


@pytest.mark.parametrize("arguments", [["steps=3", "steps=4"], ["steps=3", "rank=4", "steps=3"], ["steps=", "steps=4"]])
def test_a_setting_that_is_given_twice_is_refused(arguments):
    with pytest.raises(nalora.NALoRAError, match=f"{arguments[-1]}: found steps given twice"):
        key_values(arguments)


@pytest.mark.parametrize("pattern", ["all-linear", r".*\.(q|v)_proj", r"layers\.[0-9]{1,2}\..*_proj"])
def test_a_pattern_of_target_modules_is_no_list(pattern):
    assert check({**GOOD, "target_modules": pattern}).settings.target_modules == pattern


def test_a_setting_that_takes_other_values_is_not_suggested():
    given = {"model": "smollm2-135m", "task": "gym/chain_sum"}
    assert problems({**given, "setting": 3}) == "run: setting: no such setting"
    assert problems({**given, "seeting": {"max_terms": 3}}).endswith("(did you mean settings?)")
    assert problems({**given, "seeds": 3}).endswith("(did you mean seed?)")


def na_lora(*overrides, text=""):
    """The settings of an NA-LoRA run: lines of its file and command-line arguments."""
    return yaml.safe_load(text) | key_values(overrides) | {**GOOD, "method": "na-lora"}


FIELDS = """
thresholds: [-1.2, 1e0]
gate: {sensitivity: 0.5, low: 0.7, high: 1.6}
down: {high: 1.2}
"""


def test_files_and_the_command_line_set_thresholds_and_step_scales():
    run = check(na_lora("up={low: 0.75}", text=FIELDS))
    scales = {"gate": ProjectionScale(0.5, 0.7, 1.6), "up": ProjectionScale(0.3, 0.75, 1.4)}
    config = NALoRAConfig(thresholds=(-1.2, 1.0), **scales, down=ProjectionScale(0.2, 0.85, 1.2))
    assert run.method.config == config
    assert run.to_dict()["gate"] == {"sensitivity": 0.5, "low": 0.7, "high": 1.6}
    assert check(yaml.safe_load(yaml.safe_dump(run.to_dict()))) == run
    assert hash(run.method.config) == hash(config)


def test_a_run_takes_the_names_of_the_papers_code():
    given = {
        "gate_keep_ratio": 0.2, "gate_beta": 10.0, "gate_ema": 0.8, "t": 1.2, "lambda_ov": 0.5, "beta_s": 0.9,
        "alpha_gate": 0.3, "smin_gate": 0.7, "smax_gate": 1.2, "alpha_up": 0.1, "smin_up": 0.9, "smax_up": 1.1,
        "alpha_down": 0.1, "smin_down": 0.9, "smax_down": 1.1,
    }  # fmt: skip
    assert set(given) == set(PAPER_ARGUMENTS)
    run = check({**GOOD, "method": "na-lora-random", **given})
    assert run.method.config == dataclasses.replace(NALoRAConfig.from_paper(**given), mask_channels="shuffled")
    # What is written and what names a stored run does not depend on whose names the file used.
    assert not given.keys() & run.to_dict().keys()
    assert check(run.to_dict()) == run
    assert key(run) == key(check(run.to_dict()))
    # A part of a step scale may come by either name.
    mixed = check(na_lora("smin_gate=0.7", text="gate: {high: 1.2}")).method.config
    assert mixed.gate == ProjectionScale(0.4, 0.7, 1.2)


def test_a_study_varies_settings_of_the_control_by_either_name():
    described = study.parse({
        "settings": {"model": "m", "task": "gsm8k"}, "learning_rates": [1e-3],
        "arms": {"lora": {"method": "lora"}, "na-lora": {"method": "na-lora", "thresholds": [-1, 1]}},
    })  # fmt: skip
    assert described.run({}, described.arms[1], 1e-3, 0).method.config.thresholds == (-1.0, 1.0)
    arms = {"na-lora": {"method": "na-lora"}}
    for over in ({"smin_gate": [0.7, 0.6]}, {"gate": [{"low": 0.7}, {"low": 0.6}]}):
        varied = study.parse({
            "settings": {"model": "m", "task": "gsm8k"}, "learning_rates": [1e-3], "arms": arms, "over": over,
        })  # fmt: skip
        runs = [varied.run(cell, varied.arms[0], 1e-3, 0) for cell in varied.combinations()]
        assert [run.method.config.gate.low for run in runs] == [0.7, 0.6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["keep_ratio=0.2", "gate_keep_ratio=0.3"], "keep_ratio and gate_keep_ratio: two names of one setting"),
        (["t=1.0", "thresholds=[-1, 1]"], "t and thresholds: two names of one setting"),
        (["gate={low: 0.8}", "smin_gate=0.7"], "gate.low and smin_gate: two names of one setting"),
        (["gate={lwo: 0.8}"], "NALoRAConfig.gate.lwo: 0.8, expected values of sensitivity, low, high"),
        (["gate={low: much}"], "gate.low: 'much', expected a number"),
        (["gate=0.8"], "gate: 0.8, expected `key: value` pairs"),
        (["gate={low: 2}"], "NALoRAConfig.gate.low: 2.0, expected 0 < low ≤ high"),
        (["smin_gate=2"], "NALoRAConfig.from_paper(smin_gate=…): 2.0, expected 0 < low ≤ high"),
        (["thresholds=[1]"], "NALoRAConfig.thresholds: [1.0], expected (low, high)"),
        (["gate_keep_rato=0.2"], "gate_keep_rato: no such setting (did you mean gate_keep_ratio?)"),
    ],
)
def test_settings_of_the_control_that_no_run_can_have(arguments, message):
    assert problems(na_lora(*arguments, text="seed: 0")).startswith(f"run: {message}")


def test_a_key_leaves_out_step_scales_at_their_defaults():
    plain = key(check({**GOOD, "method": "na-lora"}))
    assert plain == key(check(na_lora("gate={low: 0.8}", "smax_up=1.4", text="thresholds: null")))
    assert plain != key(check(na_lora("gate={low: 0.7}", text="thresholds: null")))


def test_a_deleted_choice_of_kernels_is_read_as_the_one_that_replaced_it():
    old, new = (check(na_lora(f"kernels={name}", text="seed: 0")) for name in ("fused-activation", "fused"))
    assert old.method == new.method
    assert old.deleted == {"kernels": "fused-activation"}
    assert key(old) != key(new), "a run that was made before is found under its key"


OLD_FILE = "model: smollm2-135m\ntask: gsm8k\ntoo_long: cut\n"


def test_overlong_is_also_read_under_its_former_name_and_value(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(OLD_FILE)
    old, new = read(file), check({**GOOD, "overlong": "truncate", "output": "runs/run"})
    assert old == new
    assert (old.to_dict()["overlong"], "too_long" in old.to_dict()) == ("truncate", False)
    assert read(file, ["overlong=drop"]).settings.overlong == "drop"
    assert read(file, ["too_long=drop"]).settings.overlong == "drop"
    assert read(file, ["too_long="]).settings.overlong == "drop"
    assert check({**GOOD, "overlong": "cut"}).settings.overlong == "truncate"
    assert problems({**GOOD, "too_long": "cut", "overlong": "drop"}) == (
        "run: too_long and overlong: two names of one setting"
    )
    assert "overlong: 'cutt', expected one of drop, truncate" in problems({**GOOD, "too_long": "cutt"})


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ({}, "61cd7aac71b3dc6e"),
        ({"too_long": "cut"}, "b49626624340603e"),
        ({"overlong": "truncate", "rank": 4}, "34b935b5a2e90af3"),
    ],
)
def test_the_keys_of_stored_runs_do_not_change(options, stored):
    """These are the keys that version 0.1 computed from `too_long`."""
    assert key(check({**GOOD, **options})) == stored


def test_chosen_settings_differ_from_their_defaults(tmp_path):
    given = {"model": "m", "task": "gym/chain_sum", "method": "na-lora", "apply_to": "update", "rank": 8, "steps": 3,
             "train_size": 40}  # fmt: skip
    saved = yaml.safe_load(yaml.safe_dump(check(given).to_dict()))
    assert len(saved) > 40
    assert chosen(saved) == {key: value for key, value in given.items() if key != "rank"}
    assert chosen(yaml.safe_load(yaml.safe_dump(check({**given, "on": "lora+"}).to_dict())))["on"] == "lora+"
    code = tmp_path / "mine.py"
    code.write_text("raise RuntimeError('code of a run must not run to show its settings')")
    assert chosen({**saved, "method": str(code)}).keys() > {"method", "keep_ratio"}
    assert chosen({**saved, "on": f"{code}:x"})["keep_ratio"]


def test_a_mistake_on_the_command_line_is_not_the_file_s(tmp_path):
    file = tmp_path / "mine.yaml"
    for typed, found in (("stesp=3", "stesp: no such setting"), ("task=gsm9k", "task 'gsm9k': no task of that name")):
        with pytest.raises(nalora.NALoRAError, match=f"^on the command line: {found}"):
            read("laptop", [typed])
    file.write_text("model: smollm2-135m\ntask: gsm8k\nrnk: 2\n")
    with pytest.raises(nalora.NALoRAError, match=r"mine\.yaml: 2 problems"):
        read(file, ["stesp=3"])


def test_settings_of_the_task_that_another_one_replaces_are_named(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "a", "answer": "b"}\n')
    (notice,) = read("laptop", [f"task={file}", "max_new_tokens=8"]).notices
    assert notice == "settings of the recipe's task not used: test_share: 0.2"
    assert read("laptop").notices == read("laptop", ["rank=2"]).notices == ()
