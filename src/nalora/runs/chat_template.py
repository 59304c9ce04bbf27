"""Questions and answers inside a tokenizer's chat template, token for token as `apply_chat_template` writes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from nalora.errors import NALoRAError

_ROLES = ("user", "assistant")
_PROBE = ("question", "answer")


class ChatTemplate:
    """A tokenizer's chat template, and how it ends an assistant's turn.

    The template writes BOS, headers and ends of turns itself, so nothing is added when its text is tokenised.

    Args:
        tokenizer: with a chat template.

    Raises:
        NALoRAError: no chat template, one that cannot be filled in, or one whose generation prompt is not how an
            assistant's turn begins: what was trained would then never be what is generated from.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise _refusal("a tokenizer without a chat template", "an instruction-tuned model")
        full, prompt = self._text(_PROBE, prompt=False), self._text(_PROBE[:1], prompt=True)
        _check_beginning(full, prompt)
        self._after = full[full.rindex(_PROBE[1]) + len(_PROBE[1]) :] if _PROBE[1] in full else ""

    def prompt(self, turns: Sequence[str]) -> list[int]:
        """The tokens before an answer: a conversation that ends with a user's turn, and the generation prompt."""
        return self._tokens(self._text(turns, prompt=True))

    def row(self, question: str, answer: str) -> tuple[list[int], int]:
        """The tokens of a question with its answer, and how many of them come before the answer.

        Tokens that end within the prompt's text come before it. One that holds the prompt's end and the answer's
        beginning, such as several line breaks, belongs to the answer.
        """
        full, prompt = self._text((question, answer), prompt=False), self._text((question,), prompt=True)
        _check_beginning(full, prompt)
        if self.tokenizer.is_fast:
            encoded = self.tokenizer(full, add_special_tokens=False, return_offsets_mapping=True)
            ids = list(encoded.input_ids)
            before = next((i for i, (_, end) in enumerate(encoded.offset_mapping) if end > len(prompt)), len(ids))
        else:  # written in Python, without places in the text
            ids = self._tokens(full)
            before = _shared(ids, self._tokens(prompt))
        if not self._after.strip():
            # The template writes no end of turn: the end of the sequence is the only one that a model could learn.
            ids.append(self.tokenizer.eos_token_id)
        return ids, before

    @property
    def end_tokens(self) -> list[int]:
        """The special token that ends an assistant's turn, at which generation stops; none where it is plain text."""
        special = {*self.tokenizer.all_special_ids}
        special |= {id for id, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return [token for token in self._tokens(self._after) if token in special][:1]

    @property
    def end_texts(self) -> list[str]:
        """The text that ends an assistant's turn where no special token does."""
        return [self._after.strip()] if self._after.strip() and not self.end_tokens else []

    def _text(self, turns: Sequence[str], *, prompt: bool) -> str:
        messages = [{"role": _ROLES[i % 2], "content": turn} for i, turn in enumerate(turns)]
        try:
            text: str = self.tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        except Exception as error:  # a template is a program of somebody else
            reason = " ".join(str(error).split())[:200]
            raise _refusal(
                f"a chat template that fails on a user's and an assistant's turn ({type(error).__name__}: {reason})",
                "one that can be filled in",
            ) from error
        return text

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)


def _check_beginning(full: str, prompt: str) -> None:
    if not full.startswith(prompt):
        same = _shared(full, prompt)
        raise _refusal(
            f"a template whose generation prompt goes on with {prompt[same:][:40]!r} where an assistant's turn has"
            f" {full[same:][:40]!r}",
            "a generation prompt that is the beginning of an assistant's turn",
        )


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The length of the beginning that both share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _refusal(found: str, expected: str) -> NALoRAError:
    return NALoRAError(
        "prompt_style: chat",
        found=found,
        expected=expected,
        fix="set prompt_style: plain, or give the tokenizer another chat_template",
    )
