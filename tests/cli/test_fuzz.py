"""Whatever is typed or written into a file, a command ends with one sentence and leaves nothing behind, or it works."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import tiny
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nalora import methods, tasks
from nalora.runs.settings import RunSettings

SETTINGS = [
    *(field.name for field in dataclasses.fields(RunSettings)), *tasks.option_types("gym/chain_sum"),
    *tasks.option_types("gsm8k"), *methods.get("na-lora").options({}), "arms", "rnak", "", "é", "x" * 300,
]  # fmt: skip
TEXTS = [
    "", " ", ".", "~", "~0", "/proc/self/mem", "no/such/file", "file.txt", "file.txt/below", "x" * 300,
    "é" * 200, "😀", "\u202e", "\x7f", "a\tb", "[bold]x[/bold]", "null", "1e400", "-1", "0x10", "0", "lora", "na-lora",
    "cpu:9", "cuda:7", "gsm8k", "gym/", "gym/chain_sum", "t5", "adamw_torch", "wandb", "no.py", "file.txt.py",
    "float16", "4bit",
]  # fmt: skip
# Never a path that leads out of the test's own folder.
TEXT = st.text(st.characters(exclude_characters="/."))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-2, 3) | st.floats() | st.sampled_from(TEXTS) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TEXTS), inner, max_size=3),
    max_leaves=5,
)
fuzzed = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], database=None
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working directory but for one file of somebody's."""
    (tmp_path / "file.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(run, place, *arguments, works: bool = False) -> str:
    """The command's error: one sentence, with no file changed; empty if the command may work and does."""
    before = contents(place)
    code, _, err = run(*arguments)
    if works and code == 0:
        return ""
    assert code == 2, (code, err)
    assert err.startswith(("nalora: ", f"nalora {arguments[0]}: "))
    assert err.count("\n") == 1
    assert err.rstrip("\n").isprintable()
    assert len(err) < 4_000
    assert contents(place) == before
    return err


def contents(place) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


def text_of(values: dict, form: str) -> bytes:
    """The content of a file with these values, possibly damaged."""
    text = yaml.safe_dump(values, allow_unicode=True)
    spoilt = {"twice": text + "model: again\nmodel: again\n", "cut": text[: len(text) // 2], "nul": text + 'a: "\\0"\n'}
    return b"\xff" + text.encode() if form == "latin" else spoilt.get(form, text).encode("utf-8", "replace")


FORMS = st.sampled_from(["whole"] * 5 + ["twice", "cut", "nul", "latin"])
GOOD = {"task": "gym/chain_sum", "train_size": 4, "test_size": 2, "steps": 1, "device": "cpu"}


@given(st.dictionaries(st.sampled_from(SETTINGS) | st.text(max_size=3), VALUES, max_size=3), FORMS)
@settings(fuzzed, max_examples=80)
def test_train(run, place, values, form):
    """The model is not there, so that nothing is ever trained."""
    (place / "run.yaml").write_bytes(text_of(GOOD | values | {"model": "./no/such/model"}, form))
    refused(run, place, "train", "run.yaml")


@given(
    st.sampled_from(SETTINGS),
    VALUES.map(lambda value: json.dumps(value)) | st.sampled_from(TEXTS) | st.text("[]{}&*: a,"),
)
@settings(fuzzed, max_examples=80)
def test_train_with_a_setting_on_the_command_line(run, place, key, value):
    (place / "run.yaml").write_bytes(text_of(GOOD, "whole"))
    argument = f"{key}={value}".replace("\0", "")
    if not argument.startswith("-"):
        refused(run, place, "train", "run.yaml", argument, "model=./no/such/model")


@given(st.sampled_from(TEXTS) | TEXT)
@settings(fuzzed, max_examples=40)
@pytest.mark.parametrize("command", ["train", "study", "evaluate", "inspect", "report", "diagnose", "recipes"])
def test_any_name_of_a_file(run, place, command, name):
    name = name.replace("\0", "").lstrip("-")
    known = command == "recipes" or name.strip() in ("", ".")  # the list of all, and the folder itself
    refused(run, place, command, name, works=known)


PARTS = [
    "name",
    "settings",
    "arms",
    "over",
    "controls",
    "learning_rates",
    "seeds",
    "validation_size",
    "generate",
    "test_limit",
]
STUDY = {"settings": GOOD | {"model": "m"}, "arms": {"lora": {}}, "learning_rates": [1e-3]}


@given(st.dictionaries(st.sampled_from(PARTS), VALUES, min_size=1, max_size=3), FORMS)
@settings(fuzzed, max_examples=60)
def test_study(run, place, values, form):
    (place / "study.yaml").write_bytes(text_of(STUDY | values, form))
    refused(run, place, "study", "study.yaml", "--dry-run", works=True)


@pytest.fixture
def model(place, capsys):
    folder = tiny.saved_llama(place / "model", layers=1)
    capsys.readouterr()  # what saving it printed
    return folder


@given(st.dictionaries(st.sampled_from([
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "hidden_act",
    "model_type", "architectures", "quantization_config", "rope_scaling", "torch_dtype", "head_dim", "pad_token_id",
]), VALUES, min_size=1, max_size=2))  # fmt: skip
@settings(fuzzed, max_examples=60)
def test_inspect_a_config_with_bad_values(run, model, place, values):
    file = Path(model) / "config.json"
    config = json.loads(file.read_text()) | values
    (place / "bad").mkdir(exist_ok=True)
    (place / "bad" / "config.json").write_text(json.dumps(config, default=str))
    refused(run, place, "inspect", "bad", works=True)


@given(st.dictionaries(st.sampled_from(SETTINGS), VALUES, min_size=1, max_size=3), FORMS)
@settings(fuzzed, max_examples=60)
@pytest.mark.parametrize("command", ["evaluate", "diagnose"])
def test_a_run_whose_settings_are_damaged(run, place, command, values, form):
    (place / "old").mkdir(exist_ok=True)
    (place / "old" / "result.json").write_text("{}")
    (place / "old" / "adapter").mkdir(exist_ok=True)
    (place / "old" / "run.yaml").write_bytes(text_of(GOOD | values | {"model": "./no/such/model"}, form))
    refused(run, place, command, "old")


@given(st.sampled_from(["run.yaml", "result.json", "environment.json", "metrics.jsonl"]), VALUES, FORMS)
@settings(fuzzed, max_examples=15)
def test_report_of_a_damaged_run(run, place, name, value, form):
    shutil.rmtree(place / "old", ignore_errors=True)
    (place / "old").mkdir()
    (place / "old" / "run.yaml").write_text(yaml.safe_dump(GOOD))
    (place / "old" / name).write_bytes(text_of(value, form))
    refused(run, place, "report", "old", works=True)


@given(st.sampled_from([*tasks.option_types("gym/chain_sum"), "rnak"]), VALUES.map(json.dumps) | st.sampled_from(TEXTS))
@settings(fuzzed, max_examples=40)
def test_evaluate_with_options(run, place, key, value):
    argument = f"{key}={value}".replace("\0", "")
    refused(run, place, "evaluate", "./no/such/model", "--task", "gym/chain_sum", "--option", argument)
