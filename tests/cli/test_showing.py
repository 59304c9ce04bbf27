"""`nalora show` as a user types it: filters, markup and control characters, a pipe and a pager."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest
from report.run_folders import write_evaluation, write_run

from nalora.evaluation.answers import asked
from nalora.tasks.own_data import OwnData

ODD = "[bold]markup[/] \x1b[31mred \u202e \ud800 \x07"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run = write_run(folder, name="lora", gates=False, diagnosis=False, adapter=False)
    for file in run.glob("evaluations/**/outputs.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows[0]["question"] = ODD
        rows[0]["outputs"] = [ODD]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_run(folder, name="nothing", evaluated=False, gates=False, diagnosis=False, adapter=False)
    return folder


def rows(run, *arguments):
    code, out, err = run("show", *arguments, "--json")
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def test_answers_are_next_to_each_other(run, folder):
    code, out, _ = run("show", folder / "lora", "--limit", 4)
    assert code == 0
    assert (
        "100 questions, base 4 of 100 (4%) right, adapted 31 of 100 (31%) right, 27 wrong → right, 0 right → wrong"
        in out
    )
    assert "shown: 4 of 100 questions" in out
    lines = out.splitlines()
    start = lines.index("What is 3 + 6?")
    assert [line.split() for line in lines[start + 1 : start + 4]] == [
        ["expected", "9"], ["base", "✗", "adapted", "✓"], ["10", "9"],
    ]  # fmt: skip


def test_markup_and_control_characters_are_shown_and_not_interpreted(run, folder):
    code, out, _ = run("show", folder / "lora", "--limit", 1)
    assert code == 0
    assert "[bold]markup[/] �[31mred � � �" in out
    assert not {"\x1b", "\x07", "\u202e"} & set(out)
    assert rows(run, folder / "lora", "--limit", 1)[0]["base"]["outputs"] == [ODD]


@pytest.fixture
def unequal(tmp_path):
    """A base model that answered 4 questions, and an adapter that answered the first 2 of them."""
    for model, right in (("base", (1, 1, 1, 0)), ("adapted", (1, 0))):
        place = tmp_path / "evaluations" / "mine" / f"{model}-0123456789"
        write_evaluation(place, sum(right), of=len(right))
        rows = [{"id": f"q{i}", "question": "?", "outputs": ["x"], "scores": {"exact": s}} for i, s in enumerate(right)]
        (place / "outputs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_share_is_of_the_answers_of_its_model(run, unequal):
    code, out, err = run("show", unequal)
    assert code == 0, err
    assert "4 questions, base 3 of 4 (75%) right, adapted 1 of 2 (50%) right, 0 wrong → right, 1 right → wrong" in out


def test_the_name_of_a_measure_is_not_interpreted_either(run, unequal):
    for file in unequal.glob("evaluations/**/outputs.jsonl"):
        file.write_text(file.read_text().replace('"exact": 1', r'"\u001b[31mred": 0.5'))
    code, out, err = run("show", unequal)
    assert code == 0, err
    assert "base ✗ �[31mred 0.5" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("digits", [400, 5000])
def test_a_score_too_large_for_a_float_is_none(run, unequal, digits):
    file = next(unequal.glob("evaluations/mine/adapted*/outputs.jsonl"))
    file.write_text(file.read_text().replace('"exact": 0', f'"exact": 1{"0" * digits}'))
    code, out, err = run("show", unequal)
    assert code == 0, err
    assert "base 3 of 4 (75%) right, adapted 1 of 1 (100%) right" in out


def test_rows_of_own_data_are_named_by_file_and_line(run, unequal, tmp_path):
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps({"question": f"{i}?", "answer": str(i)}) + "\n\n" for i in range(20)))
    examples = OwnData(str(data)).test_examples()
    for file in unequal.glob("evaluations/**/outputs.jsonl"):
        row = {**asked(examples[0]), "outputs": ["x"], "scores": {"exact": 1}}
        file.write_text(json.dumps(row) + "\n")
    line = 2 * int(examples[0].question[:-1]) + 1
    assert f"1  questions.jsonl:{line} " in run("show", unequal)[1]
    (shown,) = rows(run, unequal)
    assert (shown["id"], shown["source"]) == (examples[0].id, f"questions.jsonl:{line}")


def test_filters(run, folder):
    every = rows(run, folder / "lora")
    assert len(every) == 100
    right = {row["id"] for row in every if row["adapted"]["scores"]["accuracy"] == 1}
    base = {row["id"] for row in every if row["base"]["scores"]["accuracy"] == 1}
    assert {row["id"] for row in rows(run, folder / "lora", "--right")} == right
    assert {row["id"] for row in rows(run, folder / "lora", "--wrong")} == {row["id"] for row in every} - right
    assert {row["id"] for row in rows(run, folder / "lora", "--changed")} == right - base
    found = rows(run, folder / "lora", "--search", "IS 17 +")
    assert [row["question"] for row in found] == ["What is 17 + 34?"]
    assert rows(run, folder / "lora", "--search", "no such text") == []
    assert len(rows(run, folder / "lora", "--wrong", "--limit", 7)) == 7


def test_the_folder_of_an_evaluation_is_shown_too(run, folder):
    place = folder / "lora" / "evaluations" / "gym"
    assert len(rows(run, place)) == 100
    (one,) = rows(run, next(place.glob("*/base-*")), "--limit", 1)
    assert list(one) == ["id", "question", "expected", "base"]


@pytest.mark.parametrize(("arguments", "message"), [
    (("nothing",), "a run without answers.*start `nalora evaluate .*nothing`"),
    (("lor",), "no such folder.*did you mean .*lora?"),
    (("lora", "--wrong", "--right"), "expected one of them"),
    (("lora", "--task", "chain"), "expected one of gym/chain_sum"),
])  # fmt: skip
def test_mistakes_are_one_sentence(run, folder, arguments, message):
    import re

    code, _, err = run("show", folder / arguments[0], *arguments[1:])
    assert code == 2
    assert re.search(message, " ".join(err.split()))


def test_ratings_are_neither_right_nor_wrong_and_old_rows_have_no_question(run, tmp_path):
    place = tmp_path / "evaluations" / "mt-bench" / "adapted-0123456789"
    write_evaluation(place, 2, of=3)
    old = [{"id": f"q{i}", "outputs": ["x"], "tokens": 1, "finished": True} for i in range(3)]
    (place / "outputs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in old))
    scores = [{"id": f"q{i}", "scores": {"rating": 3.0 * i}} for i in range(3)]
    (place / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scores))
    code, out, _ = run("show", tmp_path)
    assert code == 0
    assert "question not recorded" in out
    assert "adapted rating 6" in out
    assert "whose scores are not from 0 to 1" in run("show", tmp_path, "--wrong")[2]
    assert "without --no-base" in run("show", tmp_path, "--changed")[2]


def on_a_terminal(folder, **environment) -> str:
    """Run the command on a pseudo-terminal and return what it shows."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "nalora", "show", str(folder / "lora"), "--limit", "3"]
    process = subprocess.Popen(command, stdout=theirs, stdin=theirs, env={**os.environ, **environment})
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # the other side was closed
        pass
    os.close(ours)
    assert process.wait() == 0
    return shown.decode()


def test_a_pager_gets_the_answers_on_a_terminal(folder, tmp_path):
    seen = tmp_path / "seen"
    pager = tmp_path / "pager"
    pager.write_text(f"#!/bin/sh\nhead -n 5 > '{seen}'\necho the pager ended\n")
    pager.chmod(0o755)
    assert "the pager ended" in on_a_terminal(folder, PAGER=str(pager))
    assert "gym/chain_sum: 100 questions" in seen.read_text()
    assert "What is 2 + 4?" in on_a_terminal(folder, PAGER="no-such-pager")
