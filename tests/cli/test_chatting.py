"""`nalora chat` with lines from a pipe, and as a person types it in a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
import time

import pytest
import tiny
import transformers

from nalora.cli.chatting import typed_lines
from nalora.evaluation.conversation import Conversation, Reply, prompt_form
from nalora.runs import targets
from nalora.tasks.example_rows import ExampleRows, checked_rows

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base without a chat template, and an adapter whose tokenizer has one, as its user's script saved it."""
    place = tmp_path_factory.mktemp("place")
    base = tiny.saved_llama(place / "base", layers=1, initializer_range=0.3)
    adapted = tiny.with_lora(transformers.AutoModelForCausalLM.from_pretrained(base), lora_b=0.5)
    adapted.save_pretrained(place / "adapter")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(place / "adapter")
    return place


@pytest.fixture
def chat(run, monkeypatch):
    def typed(*arguments, lines=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run("chat", *arguments, "--max-tokens", 6)

    return typed


def answers(name, *texts, base=False):
    target = targets.resolve(str(name))
    models = targets.load(target, with_base=base)
    loaded = models.base if base else models.trained
    form = prompt_form(target, loaded.processor, "causal", dialogue=True)
    talk = Conversation(loaded, form, max_new_tokens=6)
    return [talk.answer(text).text for text in texts]


def test_lines_of_a_pipe_are_turns_and_the_answers_are_the_output(chat, place):
    code, out, err = chat(place / "adapter", lines=["hello", "", "and now?"])
    assert code == 0
    assert out.splitlines() == answers(place / "adapter", "hello", "and now?")
    assert "greedy" in err
    assert "plain" not in err, "the template beside the adapter is used"
    _, out, err = chat(place / "base", lines=["hello"])
    assert out.splitlines() == answers(place / "base", "hello")
    assert "the tokenizer has no chat template" in err


def test_the_base_model_answers_first(chat, place):
    code, out, _ = chat(place / "adapter", "--base", lines=["hello"])
    assert code == 0
    (base,), (adapted,) = answers(place / "adapter", "hello", base=True), answers(place / "adapter", "hello")
    assert out.splitlines() == [f"[base] {base}", f"[adapted] {adapted}"]
    assert base != adapted
    code, _, err = chat(place / "base", "--base", lines=["hello"])
    assert code == 2
    assert "leave --base out" in err


def test_commands(chat, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("mine")
    lines = ["/save empty", "hello", "/save mine", "/save talk.jsonl", "/save no/where", "/savee x", "/reset", "hello",
             "/system Be brief.", "hello", "/save two.jsonl", "//slash", "/quit", "never"]  # fmt: skip
    code, out, err = chat(place / "adapter", lines=lines)
    assert code == 0
    printed = out.splitlines()
    assert len(printed) == 4
    assert printed[0] == printed[1] != printed[2]
    for note in ("Nothing to save yet", "mine exists already", "Saved to talk.jsonl", "cannot be written",
                 "did you mean /save?", "starts over", "The system message is set"):  # fmt: skip
        assert note in err
    assert (tmp_path / "mine").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "talk.jsonl", "two.jsonl"]
    saved = json.loads((tmp_path / "two.jsonl").read_text())
    assert [message["role"] for message in saved["messages"]] == ["system", *["user", "assistant"] * 2]
    (trained_on,) = ExampleRows(checked_rows("two.jsonl", "train", None, None, lambda *_: None), "train")
    assert trained_on.messages == tuple(saved["messages"])


def test_sampling_system_and_mistakes(chat, place):
    options = ["--temperature", "0.9", "--top-p", "0.9"]
    one, again, other = (chat(place / "adapter", *options, "--seed", seed, lines=["hello"])[1] for seed in (1, 1, 2))
    assert one == again != other
    spoken = chat(place / "adapter", "--system", "Be brief.", lines=["hello"])[1]
    assert spoken != chat(place / "adapter", lines=["hello"])[1]
    code, _, err = chat(place / "adapter", lines=[600 * "x", "hello"])
    assert code == 0
    assert "expected fewer than 512" in err
    for arguments, found in (
        ([place / "nothing"], "no such folder"), ([place], "name one inside it"),
        ([place / "adapter", "--model", place], "config.json"),
    ):  # fmt: skip
        code, _, err = chat(*arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert found in err


def test_control_characters_of_an_answer_do_not_reach_the_terminal(chat, place, monkeypatch):
    def answer(self, text, write):
        write("\x1b[2Ja\u202eb👩\u200d💻\n")
        return Reply("", 1, True, 0)

    monkeypatch.setattr(Conversation, "answer", answer)
    assert chat(place / "adapter", lines=["hello"])[1] == "�[2Ja�b👩\u200d💻\n\n"


def test_typed_lines_continue_after_a_backslash_and_ctrl_c_clears_them(monkeypatch, capsys):
    typed = iter(["one\\", "two", "lost\\", KeyboardInterrupt, "three", EOFError])

    def read(prompt):
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    assert list(typed_lines()) == ["one\ntwo", "three"]
    assert "Ctrl-D" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
def test_a_person_in_a_terminal_stops_an_answer_and_goes_on(place):
    """Ctrl-C ends the answer and not the session; Ctrl-D ends that."""
    master, terminal = pty.openpty()
    command = [sys.executable, "-m", "nalora", "chat", str(place / "adapter"), "--max-tokens", "400"]
    process = subprocess.Popen(
        [*command, "--temperature", "1"], stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        env={**os.environ, "TERM": "xterm"}, preexec_fn=_with_terminal,
    )  # fmt: skip
    os.close(terminal)
    seen = ""

    def until(text):
        nonlocal seen
        seen, end = "", time.monotonic() + 120
        while text not in seen:
            assert time.monotonic() < end, seen
            if select.select([master], [], [], 1)[0]:
                seen += os.read(master, 4096).decode(errors="replace")

    until("> ")
    os.write(master, b"hello\n")
    until("hello")
    time.sleep(0.3)
    os.write(master, b"\x03")
    until("> ")
    os.write(master, b"/help\n")
    until("/quit")
    os.write(master, b"\x04")
    assert process.wait(60) == 0


def _with_terminal():
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
