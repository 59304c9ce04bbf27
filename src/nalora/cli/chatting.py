"""`nalora chat`: talk to a run, an adapter or a model in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from nalora.cli.screen import (
    BaseModel,
    Device,
    MaxTokens,
    Seed,
    Style,
    Target,
    Temperature,
    TopP,
    Trust,
    hush_libraries,
    literal,
    printable,
)
from nalora.errors import NALoRAError, counted, did_you_mean, reason
from nalora.files import atomic, expanded

if TYPE_CHECKING:
    from nalora.evaluation.conversation import Conversation

_COMMANDS = {
    "/reset": "start over; the system message stays",
    "/system TEXT": "set the system message; without TEXT remove it",
    "/save FILE": "save the conversation as a line of JSON that `task: FILE.jsonl` can train on",
    "/help": "list the commands",
    "/quit": "end (Ctrl-D too); Ctrl-C stops an answer",
}
_PROMPT = "> "


def chat(
    target: Target,
    model: BaseModel = None,
    base: Annotated[bool, typer.Option("--base", help="Show the base model's answer before the adapter's.")] = False,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    max_tokens: MaxTokens = 512,
    style: Style = None,
    device: Device = None,
    trust: Trust = False,
) -> None:
    """Talk to a run, an adapter or a model. Lines from a pipe are one turn each.

    nalora chat runs/laptop --base

    echo "What is 12 + 30?" | nalora chat my-adapter --model Qwen/Qwen3-0.6B
    """
    hush_libraries()
    notes = Console(stderr=True)
    with notes.status(literal(f"loading {target}")):
        from nalora.evaluation.conversation import Conversation, prompt_form
        from nalora.evaluation.generation import Sampling
        from nalora.runs import targets

        named = targets.resolve(target, model=model, device=device, trust=trust)
        if base and named.trained is None:
            found, fix = "--base and a model without an adapter", "leave --base out"
            raise NALoRAError(target, found=found, expected="a run or an adapter to compare with its base", fix=fix)
        models = targets.load(named, with_base=base)
        form = prompt_form(named, models.trained.processor, models.trained.spec.kind, style, dialogue=True)
        sampling = Sampling(temperature, top_p, seed)
        labels = {"": models.trained} if models.base is None else {"base": models.base, "adapted": models.trained}
        conversations = {
            label: Conversation(loaded, form, sampling, max_tokens, system) for label, loaded in labels.items()
        }
    base_name = Path(named.spec.name).name if Path(named.spec.name).is_absolute() else named.spec.name
    on = f" on {base_name}" if named.trained else ""
    chosen = f"temperature {temperature:g}" if temperature else "greedy answers (--temperature 0.7 samples)"
    note(f"{target}{on}: {chosen}, at most {counted(max_tokens, 'token')}. /help lists commands, Ctrl-D ends.", notes)
    if form.notice:
        note(form.notice, notes)
    session = Session(conversations, notes)
    for line in typed_lines() if sys.stdin.isatty() else piped_lines(sys.stdin):
        if not session.takes(line):
            return


def note(text: str, notes: Console) -> None:
    """Print a line about the conversation to stderr, so that a pipe gets answers only."""
    notes.print(literal(text, "dim"), soft_wrap=not notes.is_terminal)


def typed_lines() -> Iterator[str]:
    """Yield what the user types, until Ctrl-D; a backslash at the end of a line continues it in the next one."""
    with contextlib.suppress(ImportError):  # Windows has none
        import readline  # line editing and history in `input`

        readline.parse_and_bind("set enable-bracketed-paste on")  # a paste of several lines is one message
    parts: list[str] = []
    while True:
        try:
            line = input("… " if parts else _PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit ends)")
            parts = []
            continue
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        yield "\n".join([*parts, line])
        parts = []


def piped_lines(file: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a pipe or a file."""
    yield from (line.rstrip("\r\n") for line in file)


class Session:
    """Answers lines, each by every model, and carries out commands."""

    def __init__(self, conversations: dict[str, Conversation], notes: Console) -> None:
        self.conversations, self._notes = conversations, notes

    def takes(self, line: str) -> bool:
        """Answer a line or carry out a command; return False if the conversation is over."""
        if not line.strip():
            return True
        if line.startswith("/") and not line.startswith("//"):
            return self._command(*line.strip().partition(" ")[::2])
        # A message that begins with a slash is typed with two.
        self._answer(line[1:] if line.startswith("//") else line)
        return True

    def _answer(self, text: str) -> None:
        for label, conversation in self.conversations.items():
            if label:
                print(f"[{label}] ", end="", flush=True)
            try:
                reply = conversation.answer(text, lambda part: print(printable(part), end="", flush=True))
            except NALoRAError as error:
                if label:
                    print()
                self._note(str(error))
                return
            print(flush=True)
            if reply.dropped:
                self._note(f"({counted(reply.dropped, 'earlier turn')} did not fit into the model's context, left out)")
            if not reply.tokens:
                return
            if not reply.finished:
                self._note(f"(cut after {counted(reply.tokens, 'token')}: --max-tokens)")

    def _command(self, name: str, argument: str) -> bool:
        argument = argument.strip()
        conversations = self.conversations.values()
        if name in ("/quit", "/exit"):
            return False
        if name == "/reset":
            for conversation in conversations:
                conversation.turns = []
            self._note("The conversation starts over.")
        elif name == "/system":
            for conversation in conversations:
                conversation.system = argument
            self._note("The system message is set." if argument else "There is no system message any more.")
        elif name == "/save":
            self._save(argument)
        elif name == "/help":
            for command, meaning in _COMMANDS.items():
                self._note(f"{command:14} {meaning}")
        else:
            near = did_you_mean(name, [command.partition(" ")[0] for command in _COMMANDS], "/help lists the commands")
            self._note(f"{name}: no such command ({near})")
        return True

    def _save(self, name: str) -> None:
        """Write the conversation to a new file, a line for each model; an existing file is never written over."""
        talks = {label: talk for label, talk in self.conversations.items() if talk.turns}
        if not name or not talks:
            self._note("Nothing to save yet." if name else "/save needs the name of a new file.")
            return
        rows = [{"messages": talk.messages, **({"model": label} if label else {})} for label, talk in talks.items()]
        text = "".join(atomic.json_text(row) + "\n" for row in rows)
        try:
            with expanded(name).open("x", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except FileExistsError:
            self._note(f"{name} exists already and is left as it is: give another name.")
        except (OSError, ValueError) as error:
            self._note(f"{name} cannot be written ({reason(error)}).")
        else:
            self._note(f"Saved to {name}.")

    def _note(self, text: str) -> None:
        note(text, self._notes)
