"""`nalora data`: what a data file contains, what would be trained on, and errors with file and line."""

from __future__ import annotations

import json

import pytest
import tiny

from nalora.cli import main
from nalora.cli.data import data


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["nalora", "data", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def file(tmp_path):
    rows = [{"question": f"{n} + 1 =", "answer": n + 1} for n in range(30)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return "sums.jsonl"


def test_it_shows_format_rows_and_measure(command, file):
    code, out, _ = command(file)
    assert code == 0
    assert "question/answer" in out
    assert "question: question, answer: answer" in out
    assert "number" in out
    train, test = (
        int(next(line for line in out.splitlines() if name in line).split()[-1])
        for name in ("training rows", "test rows")
    )
    assert train + test == 30
    assert "A: ⟦1⟧" in out or "A: ⟦2⟧" in out


def test_it_marks_the_trained_tokens_and_counts_long_rows(command, file, tmp_path):
    model = tiny.saved_llama(tmp_path / "model")
    code, out, _ = command(file, "--model", model, "--max-length", "17")
    assert code == 0
    # Letters are tokens here: `Q: 0 + 1 =`, a line break, `A: `, the answer and the end.
    assert "minimum 16" in out
    assert "rows of more than 17 tokens" in out
    assert "of 16 tokens" in out


def test_columns_are_chosen(command, tmp_path):
    (tmp_path / "a.csv").write_text("title,body\nx,y\nz,w\n")
    code, _, error = command("a.csv")
    assert code == 2
    assert "the columns title, body" in error
    code, out, _ = command("a.csv", "columns={prompt: title, completion: body}")
    assert code == 0
    assert "prompt: title, completion: body" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gsm8k"], "no data file"),
        (["sum.jsonl"], "did you mean sums.jsonl?"),
        (["sums.jsonl", "mesure=f1"], "did you mean measure?"),
        (["sums.jsonl", "--model", "./nothing"], "no such folder"),
    ],
)
def test_mistakes_are_one_sentence(command, file, arguments, message):
    code, _, error = command(*arguments)
    assert code == 2
    assert error.count("\n") == 1
    assert message in error


def test_its_help_has_an_example():
    assert "nalora data sums.jsonl --model" in data.__doc__
