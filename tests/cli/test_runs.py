"""`nalora train` and `nalora evaluate` as a user types them, on a small model and an offline task."""

from __future__ import annotations

import pytest
import tiny


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "run.yaml"
    model = tiny.saved_llama(tmp_path / "base")
    file.write_text(
        f"model: {model}\ntask: gym/chain_sum\ntrain_size: 20\ntest_size: 8\nsteps: 2\nbatch_size: 4\nlog_every: 1\n"
        f"device: cpu\noutput: {tmp_path / 'run'}\n"
    )
    return file


def test_train_then_evaluate(run, recipe, tmp_path):
    code, out, _ = run("train", recipe, "method=na-lora", "apply_to=update")
    assert code == 0, out
    assert "20 examples in 20 rows" in out
    assert "2 steps" in out
    code, out, _ = run("evaluate", tmp_path / "run")
    assert code == 0, out
    for part in ("base", "adapted", "accuracy", "loss of the targets", "95 % interval", "ran out of tokens"):
        assert part in out
    code, again, _ = run("evaluate", tmp_path / "run")
    assert [line for line in again.splitlines() if "accuracy" in line] == [
        line for line in out.splitlines() if "accuracy" in line
    ]


def test_a_finished_run_is_not_trained_again(run, recipe):
    assert run("train", recipe)[0] == 0
    code, _, err = run("train", recipe)
    assert code == 2
    assert "a finished run" in err
    assert "already finished" in run("train", recipe, "--resume")[1]


def test_mistakes_are_named_before_anything_is_loaded(run, recipe):
    code, _, err = run("train", recipe, "rnk=4", "learning_rate=fast", "model=nobody/nothing")
    assert code == 2
    assert "2 problems" in err
    assert "rnk: no such setting (did you mean rank?)" in err
    code, _, err = run("evaluate", recipe.parent / "base", "--task", "gsm9k")
    assert code == 2
    assert "did you mean 'gsm8k'?" in err


@pytest.mark.parametrize(("command", "parts"), [
    ("methods", ("lora", "na-lora", "full")),
    ("tasks", ("gsm8k", "gym/FAMILY", "mt-bench", "cars")),
    ("models", ("smollm2-135m", "FILE.gguf")),
])  # fmt: skip
def test_what_there_is_to_choose_from(run, command, parts):
    code, out, _ = run(command)
    assert code == 0
    assert all(part in out for part in parts)
