"""Questions and answers in a tokenizer's chat template, token for token as `apply_chat_template` writes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from nalora.errors import NALoRAError

_QUESTION, _ANSWER = "question", "answer"


class ChatTemplate:
    """A tokenizer's chat template, and the text with which it ends an assistant's turn.

    The template writes BOS, headers and ends of turns itself, so its text is tokenised without special tokens.

    Raises:
        NALoRAError: no chat template, one that cannot be filled in, or one whose generation prompt is not the beginning
            of an assistant's turn: generation would then start from tokens that were never trained on.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise _refusal("a tokenizer without a chat template", "an instruction-tuned model")
        full, _ = self._texts(_QUESTION, _ANSWER)
        self._end = full[full.rindex(_ANSWER) + len(_ANSWER) :] if _ANSWER in full else ""

    def prompt(self, turns: Sequence[str]) -> list[int]:
        """Return the tokens of a conversation that ends with a user's turn, and of the generation prompt."""
        return self._tokens(self._text(turns, prompt=True))

    def row(self, question: str, answer: str) -> tuple[list[int], int]:
        """Return the tokens of a question with its answer, and the number of prompt tokens.

        A token that spans the end of the prompt and the beginning of the answer, such as several line breaks, belongs
        to the answer.
        """
        full, prompt = self._texts(question, answer)
        if self.tokenizer.is_fast:
            encoded = self.tokenizer(full, add_special_tokens=False, return_offsets_mapping=True)
            ids = list(encoded.input_ids)
            before = next((i for i, (_, end) in enumerate(encoded.offset_mapping) if end > len(prompt)), len(ids))
        else:  # tokenizers written in Python have no offsets
            ids = self._tokens(full)
            before = _shared(ids, self._tokens(prompt))
        if not self._end.strip():
            # The template writes no end of turn: EOS is the only end that a model can be trained to write.
            ids.append(self.tokenizer.eos_token_id)
        return ids, before

    @property
    def end_tokens(self) -> list[int]:
        """The special token that ends an assistant's turn, at which generation stops; empty if it is plain text."""
        special = {*self.tokenizer.all_special_ids}
        special |= {id for id, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return [token for token in self._tokens(self._end) if token in special][:1]

    @property
    def end_texts(self) -> list[str]:
        """The text that ends an assistant's turn if no special token does."""
        return [self._end.strip()] if self._end.strip() and not self.end_tokens else []

    def _texts(self, question: str, answer: str) -> tuple[str, str]:
        """Return the text of both turns and that of the prompt, which must be its beginning."""
        full, prompt = self._text((question, answer), prompt=False), self._text((question,), prompt=True)
        if not full.startswith(prompt):
            same = _shared(full, prompt)
            raise _refusal(
                f"a template whose generation prompt continues with {prompt[same:][:40]!r} where an assistant's turn"
                f" has {full[same:][:40]!r}",
                "a generation prompt that is the beginning of an assistant's turn",
            )
        return full, prompt

    def _text(self, turns: Sequence[str], *, prompt: bool) -> str:
        messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        try:
            text: str = self.tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        except Exception as error:  # the template is third-party code
            reason = " ".join(str(error).split())[:200]
            raise _refusal(
                f"a chat template that fails on a user's and an assistant's turn ({type(error).__name__}: {reason})",
                "one that can be filled in",
            ) from error
        return text

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _refusal(found: str, expected: str) -> NALoRAError:
    fix = "set prompt_style: plain, or give the tokenizer another chat_template"
    return NALoRAError("prompt_style: chat", found=found, expected=expected, fix=fix)
