"""A conversation with a model: its prompts, as in training where that is known, and answers as they are generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nalora import tasks
from nalora.errors import NALoRAError
from nalora.evaluation.generation import AnswerGenerator, Sampling
from nalora.models.loading import Kind, Loaded
from nalora.models.positions import trained_positions
from nalora.runs.chat_template import Message
from nalora.runs.encoding import Encoder
from nalora.runs.settings import Run
from nalora.runs.targets import Target

# The share of a model's positions that earlier turns leave for the answer, if the answer may be that long.
_ANSWER_SHARE = 4
_BETWEEN_TURNS = "\n\n"


@dataclass(frozen=True)
class PromptForm:
    """How messages become a prompt.

    Args:
        encoder: makes the tokens.
        before: in plain text, what precedes a user's message.
        after: what follows it.
        stops: texts that end an answer.
        notice: one sentence for the user if no chat template is used.
    """

    encoder: Encoder
    before: str = ""
    after: str = ""
    stops: tuple[str, ...] = ()
    notice: str = ""

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation that ends with a user's message."""
        if self.encoder.is_chat:
            return self.encoder.prompt(messages)
        return self.encoder.prompt([{"role": "user", "content": "".join(map(self._text, messages))}])

    def plain(self, question: str) -> str:
        """Return the plain text of a question."""
        return f"{self.before}{question}{self.after}"

    def _text(self, message: Message) -> str:
        if message["role"] == "user":
            return self.plain(message["content"])
        return f"{message['content'].strip()}{_BETWEEN_TURNS}"


def prompt_form(
    target: Target, processor: Any, kind: Kind, style: str | None = None, *, dialogue: bool = False
) -> PromptForm:
    """Return the form of prompts for a target: by default that of the run's training, else the chat template.

    Without either, a message is the prompt as it is, or with `dialogue` a turn of a written dialogue.

    Raises:
        NALoRAError: chat style with a tokenizer that has no usable chat template, or a model of images.
    """
    if kind == "clip":
        found, fix = "a model of images", "give a model that generates text"
        raise NALoRAError(target.name, found=found, expected="one that answers in text", fix=fix)
    run = target.run.run if target.run else None
    style = style or (run.settings.prompt_style if run else "auto")
    encoder = Encoder(processor, kind, style, strict=False)
    if encoder.is_chat:
        return PromptForm(encoder)
    if run and style == run.settings.prompt_style and (trained := _trained_form(run, encoder)):
        return trained
    reason = "the style is plain" if style == "plain" else "the tokenizer has no chat template"
    if not dialogue:
        return PromptForm(encoder, notice=f"Prompts are plain text: {reason}.")
    notice = f"Prompts are plain text (User: … Assistant: …): {reason}."
    return PromptForm(encoder, "User: ", "\n\nAssistant: ", ("\nUser:",), notice)


def _trained_form(run: Run, encoder: Encoder) -> PromptForm | None:
    """Return the plain text around the questions of the run's task; None if its files are not here, or it has none."""
    settings = run.settings
    try:
        task = tasks.get(settings.task, data_dir=settings.data_dir, **run.task_options)
        examples = task.test_examples()
    except NALoRAError:
        return None
    for example in examples[:100]:
        turns = [message for message in example.messages if message["role"] != "system"]
        if example.question and example.prompt.count(example.question) == 1 and len(turns) <= 2:
            before, after = example.prompt.split(example.question)
            stops = (*task.stop, *([f"\n{before.strip()}"] if before.strip() else ()))
            shown = f"{before}…{after}".replace("\n", "\\n")
            return PromptForm(encoder, before, after, stops, f"Prompts are those of the run's training: {shown}")
    return None


class Reply(NamedTuple):
    """An answer: its text, number of tokens, whether it ended by itself, and the number of turns that were left out."""

    text: str
    tokens: int
    finished: bool
    dropped: int


class Conversation:
    """The turns of a user and one model.

    Args:
        loaded: the model.
        form: of its prompts.
        sampling: how tokens are chosen. The seed counts up by one with every turn.
        max_new_tokens: the longest answer.
        system: the system message, if any.
    """

    def __init__(
        self,
        loaded: Loaded,
        form: PromptForm,
        sampling: Sampling | None = None,
        max_new_tokens: int = 512,
        system: str = "",
    ) -> None:
        self.form, self.sampling, self.system = form, sampling or Sampling(), system
        self.turns: list[Message] = []
        self._limit = trained_positions(loaded.model)
        self._generator = AnswerGenerator(
            loaded.model, form.encoder, max_new_tokens=max_new_tokens, stop=form.stops, sampling=self.sampling
        )
        self._max_new_tokens = max_new_tokens

    @property
    def messages(self) -> list[Message]:
        """The system message and all turns."""
        return self._with_system(self.turns)

    def _with_system(self, turns: Sequence[Message]) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *turns]

    def answer(self, text: str, write: Callable[[str], None] = lambda part: None) -> Reply:
        """Add the user's message and the model's answer, whose parts `write` gets as they are generated.

        Ctrl-C ends the answer, which is kept as it is; before its first token, nothing is added.

        Raises:
            NALoRAError: the message alone does not fit, or the chat template refuses it; nothing is added.
        """
        turns: list[Message] = [*self.turns, {"role": "user", "content": text}]
        # The cache of earlier turns is not reused: a prompt that is read in parts is rounded differently, which changed
        # 5 of 20 greedy answers of SmolLM2-135M in bfloat16 (none in float32).
        prompt, dropped = self._prompt(turns)
        stream = _Stream(self._generator, write)
        torch.manual_seed(self.sampling.seed + len(self.turns) // 2)
        try:
            ((output, tokens, finished),) = self._generator.generate([prompt], stream)
            stream.finish(output)
        except KeyboardInterrupt:
            output, tokens, finished = stream.text, len(stream.tokens), True
        if tokens:
            self.turns = [*turns, {"role": "assistant", "content": output}]
        return Reply(output, tokens, finished, dropped)

    def _prompt(self, turns: Sequence[Message]) -> tuple[list[int], int]:
        """Return the prompt without the oldest turns that do not fit, and the number of these turns."""
        prompt = self.form.tokens(self._with_system(turns))
        if self._limit is None or self.form.encoder.kind != "causal":
            return prompt, 0
        room = self._limit - min(self._max_new_tokens, self._limit // _ANSWER_SHARE)
        first = 0
        while len(prompt) > room and first + 1 < len(turns):
            first += 2
            prompt = self.form.tokens(self._with_system(turns[first:]))
        if len(prompt) >= self._limit:
            raise NALoRAError(
                "the message",
                found=f"{len(prompt):,} tokens, with the system message if there is one",
                expected=f"fewer than {self._limit:,}, for which the model was built",
                fix="send a shorter text",
            )
        self._generator.max_new_tokens = min(self._max_new_tokens, self._limit - len(prompt))
        return prompt, first // 2


class _Stream:
    """Writes an answer part by part; `generate` calls `put` with the prompt, and then with every token."""

    def __init__(self, generator: AnswerGenerator, write: Callable[[str], None]) -> None:
        self._generator, self._write = generator, write
        self.tokens: list[int] = []
        self.text = ""
        self._started = False

    def put(self, tokens: torch.Tensor) -> None:
        """Write what is certain: no unfinished character, and no beginning of a text that ends the answer."""
        if not self._started:
            self._started = True
            return
        self.tokens += tokens.flatten().tolist()
        text = self._generator.read(self.tokens)[0]
        stops = self._generator.stop
        held = max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        certain = text[: len(text) - held]
        if not certain.endswith("�"):
            self.finish(certain)

    def end(self) -> None:
        """Do nothing: `finish` is called with the whole answer."""

    def finish(self, text: str) -> None:
        """Write the part of the answer that was not written yet."""
        if text.startswith(self.text) and len(text) > len(self.text):
            part, self.text = text[len(self.text) :], text
            self._write(part)
