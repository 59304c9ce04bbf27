"""`nalora generate`: the answers of single prompts, in any batches, continued after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny

from nalora.evaluation.conversation import Conversation, prompt_form
from nalora.runs import targets


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.saved_llama(tmp_path_factory.mktemp("base"), layers=1, initializer_range=0.3)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"question": "What is " + number * "1 + " + "1?", "answer": str(number)} for number in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_file_s_answers_are_those_of_its_prompts_one_by_one(run, base, file, tmp_path):
    out = tmp_path / "new" / "out.jsonl"
    arguments = ["generate", base, file, "--output", out, "--max-tokens", 6]
    code, printed, err = run(*arguments, "--batch-tokens", 150)
    assert (code, printed) == (0, "")
    assert "12 answers" in err
    rows = rows_of(out)
    assert [(row["row"], row["expected"]) for row in rows] == [(number, str(number)) for number in range(12)]
    target = targets.resolve(base)
    loaded = targets.load(target).trained
    form = prompt_form(target, loaded.processor, "causal")
    for row in rows:
        alone = Conversation(loaded, form, max_new_tokens=6).answer(f"Q: {row['prompt']}\nA: ")
        assert (row["output"], row["tokens"], row["finished"]) == alone[:3]
    content = out.read_bytes()
    _, _, err = run(*arguments)
    assert "0 answers, 12 were there already" in err
    assert out.read_bytes() == content


def test_a_cut_file_is_continued_to_the_same_file_even_with_sampling(run, base, file, tmp_path):
    arguments = ["--max-tokens", 6, "--temperature", 1, "--batch-tokens", 150]
    outs = [tmp_path / name for name in ("whole.jsonl", "cut.jsonl")]
    for out in outs:
        assert run("generate", base, file, "--output", out, *arguments)[0] == 0
    whole = outs[0].read_bytes()
    lines = whole.splitlines(keepends=True)
    outs[1].write_bytes(b"".join(lines[3:9]) + lines[1][:20])
    assert "6 answers, 6 were there already" in run("generate", base, file, "--output", outs[1], *arguments)[2]
    assert outs[1].read_bytes() == whole
    for other in (["--seed", 1], ["--max-tokens", 5]):
        code, _, err = run("generate", base, file, "--output", outs[1], *arguments, *other)
        assert code == 2
        assert "answers of another model, file or setting" in err
    file.write_text(file.read_text().replace("What", "Who"))
    assert run("generate", base, file, "--output", outs[1], *arguments)[0] == 2
    assert outs[1].read_bytes() == whole


def test_a_file_cut_in_its_first_row_is_continued(run, base, file, tmp_path):
    out = tmp_path / "out.jsonl"
    assert run("generate", base, file, "--output", out, "--max-tokens", 6)[0] == 0
    whole = out.read_bytes()
    out.write_bytes(whole[:60])
    assert run("generate", base, file, "--output", out, "--max-tokens", 5)[0] == 2
    assert out.read_bytes() == whole[:60]
    code, _, err = run("generate", base, file, "--output", out, "--max-tokens", 6)
    assert code == 0, err
    assert out.read_bytes() == whole


def test_one_prompt_is_printed(run, base):
    code, out, err = run("generate", base, "--prompt", "Once upon", "--max-tokens", 5)
    target = targets.resolve(base)
    loaded = targets.load(target).trained
    form = prompt_form(target, loaded.processor, "causal")
    assert (code, out) == (0, Conversation(loaded, form, max_new_tokens=5).answer("Once upon").text + "\n")
    assert "no chat template" in err


def test_mistakes_are_named_before_the_model_is_loaded(run, base, file, tmp_path, monkeypatch):
    monkeypatch.setattr("nalora.models.loading.load", lambda *_, **__: pytest.fail("loaded"))
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"a": 1}\n')
    (tmp_path / "bad.jsonl").write_text('{"question": ""}\n')
    out = ["--output", tmp_path / "out.jsonl"]
    for arguments, found in (
        ([base], "neither FILE nor --prompt"), ([base, file, "--prompt", "a"], "both FILE and --prompt"),
        ([base, file], "no --output"), ([base, "--prompt", "a", *out], "--output with --prompt"),
        ([base, file, "--output", mine], "a file that this command did not write"),
        ([base, tmp_path / "none.jsonl", *out], "no such file"), ([tmp_path / "no", file, *out], "no such folder"),
        ([base, tmp_path / "bad.jsonl", *out], "bad.jsonl:1: 'question' is empty"),
    ):  # fmt: skip
        code, _, err = run("generate", *arguments)
        assert (code, err.count("\n")) == (2, 1), err
        assert found in err
    assert mine.read_text() == '{"a": 1}\n'
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_kill_loses_at_most_a_batch(run, base, file, tmp_path, how):
    file.write_text("".join(f'{{"prompt": "{number} {"x" * (number % 30)}"}}\n' for number in range(400)))
    outs = [tmp_path / name for name in ("whole.jsonl", "killed.jsonl")]
    arguments = ["--max-tokens", "40", "--batch-tokens", "300"]
    command = [sys.executable, "-m", "nalora", "generate", base, str(file), "--output"]
    process = subprocess.Popen([*command, str(outs[1]), *arguments], stderr=subprocess.PIPE, text=True)
    while not outs[1].exists() or outs[1].read_bytes().count(b"\n") < 10:
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, how)
    err = process.communicate(timeout=60)[1]
    done = outs[1].read_bytes().count(b"\n")
    assert 10 <= done < 400
    assert process.returncode == (130 if how == signal.SIGINT else -9)
    assert ("the same command continues" in err) == (how == signal.SIGINT)
    assert f"{done} were there already" in run("generate", base, file, "--output", outs[1], *arguments)[2]
    assert run("generate", base, file, "--output", outs[0], *arguments)[0] == 0
    assert outs[0].read_bytes() == outs[1].read_bytes()
