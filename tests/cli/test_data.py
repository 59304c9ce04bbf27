"""`nalora data`: what a data file contains, what would be trained on, and errors with file and line."""

from __future__ import annotations

import json
import re

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
    assert number(out, "training rows") + number(out, "test rows") == 30
    assert "A: ⟦1⟧" in out or "A: ⟦2⟧" in out


def test_it_marks_the_trained_tokens_and_counts_long_rows(command, file, tmp_path):
    model = tiny.saved_llama(tmp_path / "model")
    code, out, _ = command(file, "--model", model, "--max-length", "17")
    assert code == 0
    # Letters are tokens here: `Q: 0 + 1 =`, a line break, `A: `, the answer and the end.
    assert "minimum 16" in out
    # Rows with two digits have 17 tokens, or 18 if the answer has two as well: from the tenth on.
    left_out = next(line for line in out.splitlines() if "more than 17 tokens" in line)
    assert re.search(r"sums\.jsonl:1\d \(18\), sums\.jsonl:1\d \(18\)", left_out)
    assert "2 of 16 tokens" in out
    assert int(left_out.split()[4]) + number(out, "training rows") + number(out, "test rows") == 30


def number(out, name):
    return int(next(line for line in out.splitlines() if name in line).split()[-1])


def test_it_shows_input_and_target_of_an_encoder_decoder(command, file, tmp_path):
    code, out, _ = command(file, "--model", tiny.saved_t5(tmp_path / "model"))
    assert code == 0
    assert "input: Q: 0 + 1 =" in out
    assert "target: ⟦1</s>⟧" in out
    assert "tokens of the input" in out
    assert "tokens of the target" in out
    assert "2 of 16 tokens" in out


def test_it_lists_rows_that_are_in_the_test_set(command, file, tmp_path):
    (tmp_path / "test.jsonl").write_text('{"question": "2 + 1 =", "answer": 3}')
    code, out, _ = command(file, "test=test.jsonl")
    assert code == 0
    left_out = next(line for line in out.splitlines() if "the question is in the test set" in line)
    assert left_out.split()[-2:] == ["1", "sums.jsonl:3"]


def test_a_conversation_is_shown_as_its_template_writes_it(command, tmp_path):
    model = tiny.saved_llama(tmp_path / "model", layers=1)
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(
        template + "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    turns = [("user", "Hi"), ("assistant", "Hello \x1b[2J"), ("user", "Bye"), ("assistant", "Ciao")]
    chats = [{"messages": [{"role": r, "content": f"{t}{n}"} for r, t in turns]} for n in range(9)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, chats)))
    code, out, _ = command("chat.jsonl", "--model", model)
    assert code == 0
    assert "[user]Hi0;[assistant]⟦Hello " in out
    assert ";⟧[user]Bye0;[assistant]⟦Ciao0;⟧" in out
    assert "\x1b" not in out
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    code, _, error = command("chat.jsonl", "--model", model)
    assert code == 2
    assert error.count("\n") == 1


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
