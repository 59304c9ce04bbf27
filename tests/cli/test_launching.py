"""`nalora launch` as it is typed: settings are checked before the program starts; nothing attached is no success."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nalora
from nalora import NALoRAError
from nalora.cli import launching

MARK = "import pathlib, sys; pathlib.Path('started').touch(); sys.exit(int(sys.argv[1]))"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("NALORA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(Path(nalora.__file__).parents[1]))
    return tmp_path


@pytest.mark.parametrize(
    ("code", "expected", "message"),
    [
        (0, launching.NOT_ATTACHED, "nothing was attached: the command imported no transformers.Trainer"),
        (5, 5, "nothing was attached: the command ended with exit code 5"),
    ],
)
def test_nothing_attached_is_reported_and_no_success(run, place, code, expected, message):
    left, _, err = run("launch", "apply_to=update", "--", sys.executable, "-c", MARK, code)
    assert (left, (place / "started").exists()) == (expected, True)
    assert err.startswith(f"nalora: {message}")


LOSE = """
import json, os, pathlib, shutil, sys
report = pathlib.Path(json.loads(os.environ["NALORA_LAUNCH"])["report"])
DEED
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 5])
@pytest.mark.parametrize(
    ("deed", "message"),
    [
        ("report.open('a').write('{\"event\": \"atta')", "a line cannot be read"),
        ("report.open('ab').write(b'\\xff\\n[1]\\n{}\\n')", "a line cannot be read"),
        ("report.unlink()", "the file cannot be read (No such file or directory)"),
        ("shutil.rmtree(report.parent)", "the file cannot be read (No such file or directory)"),
    ],
    ids=["incomplete line", "other lines", "deleted file", "deleted folder"],
)
def test_the_exit_code_survives_a_damaged_report(run, place, deed, message, code):
    left, _, err = run("launch", "--", sys.executable, "-c", LOSE.replace("DEED", deed), code)
    assert left == code
    assert err == f"nalora: it is not known whether NA-LoRA was attached: in its report {message}\n"


def test_an_incomplete_line_does_not_hide_that_it_was_attached(run, place):
    deed = """report.open('a').write('{"event": "attached", "detail": "Trainer"}\\n{"ev')"""
    assert run("launch", "--", sys.executable, "-c", LOSE.replace("DEED", deed), 0) == (0, "", "")


def test_an_incomplete_line_does_not_hide_a_refusal(run, place):
    """A program that goes on after it did not train with NA-LoRA is no success."""
    deed = """report.open('a').write('{"event": "refused", "detail": ""}\\n{"ev')"""
    assert run("launch", "--", sys.executable, "-c", LOSE.replace("DEED", deed), 0) == (launching.NOT_ATTACHED, "", "")


@pytest.mark.parametrize("flag", ["-I", "-E"])
def test_a_python_that_ignores_the_environment_is_reported(run, place, flag):
    code, _, err = run("launch", "--", sys.executable, flag, "-c", "")
    assert code == launching.NOT_ATTACHED
    assert "no Python that reads PYTHONPATH" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["aply_to=update"],
            "aply_to: found no such setting; expected a field of NALoRAConfig, or kernels. Fix: did you mean apply_to?",
        ),
        (
            ["apply_to=updates"],
            "nalora: apply_to: found 'updates'; expected one of gradient, update. Fix: did you mean update?",
        ),
        (["keep_ratio=2"], "nalora: keep_ratio: found 2.0; expected a number in (0, 1]. Fix: set keep_ratio to that"),
        (["keep_ratio=2", "mask=3"], "mask: found 3; expected true or false. Fix: set it to that"),
        (["t=1", "thresholds=[-1,1]"], "two names of one setting"),
        (["gate={slope: 1}"], "values of sensitivity, low, high"),
        (["kernels=fast"], "kernels: found 'fast'; expected one of auto, off, fused. Fix: set it to that"),
        (["mask=true", "mask=false"], "mask given twice"),
        (["mask=true", "--config"], "an option after a setting"),
        (["--config", "none.yaml"], "none.yaml: found no such file"),
    ],
)
def test_wrong_settings_are_refused_before_the_program_starts(run, place, words, message):
    code, _, err = run("launch", *words, "--", sys.executable, "-c", MARK, 0)
    assert (code, (place / "started").exists()) == (2, False)
    assert message in err
    assert err.count("\n") == 1


def test_wrong_variables_and_files_are_named(run, place, monkeypatch):
    monkeypatch.setenv("NALORA_KEEP_RATOI", "0.5")
    (place / "nalora.yaml").write_text("mask: maybe\nsharpnes: 3\n")
    code, _, err = run("launch", "--config", "nalora.yaml", "--", "python")
    assert code == 2
    for problem in (
        "NALORA_KEEP_RATOI: no such setting (did you mean keep_ratio?)",
        "nalora.yaml: mask: 'maybe', expected true or false",
        "nalora.yaml: sharpnes: no such setting (did you mean sharpness?)",
    ):
        assert problem in err


def test_a_word_replaces_a_variable_and_a_variable_the_file(place):
    file = place / "nalora.yaml"
    file.write_text("apply_to: update\nkeep_ratio: 0.1\nsharpness: 1e1\nmask: false\ngate: {low: 0.7}\n")
    variables = {
        "NALORA_KEEP_RATIO": "0.2",
        "NALORA_SHARPNESS": "5",
        "NALORA_CACHE": "x",
        "NALORA_MASK_EMA": "",
        "A": "b",
    }
    chosen = launching.chosen_settings(file, variables, ["sharpness=7", "kernels=off", "mask="])
    assert chosen == {
        "apply_to": "update", "keep_ratio": 0.2, "sharpness": 7.0, "gate": {"low": 0.7}, "kernels": "off",
    }  # fmt: skip


def test_variables_that_nalora_reads_itself_are_no_settings():
    files = Path(nalora.__file__).parent.rglob("*.py")
    read = {name for file in files for name in re.findall(r'"(NALORA_[A-Z_]+)"', file.read_text(encoding="utf-8"))}
    assert "NALORA_CACHE" in read
    assert launching.chosen_settings(None, dict.fromkeys(read, "x"), []) == {}


@pytest.mark.parametrize(
    ("words", "settings", "command"),
    [
        (["python", "train.py", "a=b", "--lr", "1"], [], ["python", "train.py", "a=b", "--lr", "1"]),
        (["a=b", "--", "python", "--", "c"], ["a=b"], ["python", "--", "c"]),
        (["a=b", "c={d: e}", "python"], ["a=b", "c={d: e}"], ["python"]),
    ],
)
def test_settings_precede_the_command(words, settings, command):
    assert launching.split(words) == (settings, command)


@pytest.mark.parametrize("words", [[], ["--"], ["a=b"], ["a=b", "--"]])
def test_a_command_is_needed(run, place, words):
    code, _, err = run("launch", *words)
    fix = "Fix: nalora launch apply_to=update -- python train.py\n"
    assert (code, err) == (2, f"nalora launch: found no command; expected a training command after --. {fix}")


def test_a_value_out_of_range_is_named_by_where_it_was_given(place):
    (place / "nalora.yaml").write_text("gate: {low: 9}\n")
    with pytest.raises(NALoRAError, match=r"^nalora\.yaml: gate\.low: found 9"):
        launching.chosen_settings(Path("nalora.yaml"), {}, [])
    with pytest.raises(NALoRAError, match=r"^NALORA_KEEP_RATIO: found 2"):
        launching.chosen_settings(None, {"NALORA_KEEP_RATIO": "2"}, [])


def test_the_launcher_does_not_load_torch():
    """It would take 300 MB next to the training, and its threads would receive signals."""
    code = (
        "import sys; from nalora.cli import launching; launching.chosen_settings(None, {}, ['mask=true'])\n"
        "sys.exit(bool({'torch', 'numpy', 'transformers'} & sys.modules.keys()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(nalora.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


def test_a_launch_inside_a_launch_is_refused(run, place, monkeypatch):
    monkeypatch.setenv("NALORA_LAUNCH", "{}")
    code, _, err = run("launch", "--", "python")
    assert code == 2
    assert "another `nalora launch`" in err
