"""Questions and answers in a tokenizer's chat template, token for token as `apply_chat_template` writes them."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from nalora.errors import NALoRAError

Message = Mapping[str, str]
_FIX = "set prompt_style: plain, or give the tokenizer another chat_template"


class ChatTemplate:
    """A tokenizer's chat template, and the text with which it ends an assistant's turn.

    The template writes BOS, headers and ends of turns itself, so its text is tokenised without special tokens.

    Raises:
        NALoRAError: no chat template, one that cannot be filled in, or one whose generation prompt is not the beginning
            of an assistant's turn: generation would then start from tokens that were never trained on. Without
            `strict` this is allowed: templates that open a thought are one, and nothing is trained.
    """

    def __init__(self, tokenizer: Any, *, strict: bool = True) -> None:
        self.tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise _refusal("a tokenizer without a chat template", "an instruction-tuned model")
        probe = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        full = self._text(probe)
        self._end = full[full.rindex("answer") + len("answer") :] if "answer" in full else ""
        if strict:
            self._answer(probe, 1, full)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation that ends with a user's turn, and of the generation prompt."""
        return self._tokens(self._text(messages, prompt=True))

    def row(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Return the tokens of a conversation, and which are trained on: the answers, each with its end of turn.

        A token that spans the end of a prompt and the beginning of an answer, such as several line breaks, belongs
        to the answer.
        """
        full = self._text(messages)
        answers = [self._answer(messages, i, full) for i, m in enumerate(messages) if m["role"] == "assistant"]
        if self.tokenizer.is_fast:
            encoded = self.tokenizer(full, add_special_tokens=False, return_offsets_mapping=True)
            ids, ends = list(encoded.input_ids), [end for _, end in encoded.offset_mapping]
            spans = [(bisect_right(ends, start), bisect_right(ends, end)) for start, end in answers]
        else:  # tokenizers written in Python have no offsets
            ids = self._tokens(full)
            spans = [(_shared(ids, self._tokens(full[:s])), _shared(ids, self._tokens(full[:e]))) for s, e in answers]
        trained = [False] * len(ids)
        for first, last in spans:
            trained[first:last] = [True] * (last - first)
        if not self._end.strip():
            # The template writes no end of turn: EOS is the only end that a model can be trained to write.
            ids.append(self.tokenizer.eos_token_id)
            trained.append(True)
        return ids, trained

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

    def _answer(self, messages: Sequence[Message], index: int, full: str) -> tuple[int, int]:
        """Return where an answer with its end of turn begins and ends in the text of the whole conversation."""
        prompt = self._text(messages[:index], prompt=True)
        if not full.startswith(prompt):
            same = _shared(full, prompt)
            raise _refusal(
                f"a template whose generation prompt continues with {prompt[same:][:40]!r} where an assistant's turn"
                f" has {full[same:][:40]!r}",
                "a generation prompt that is the beginning of an assistant's turn",
            )
        if index == len(messages) - 1:
            return len(prompt), len(full)
        # Templates may write an earlier answer differently from the last one, for example without its thoughts.
        written = messages[index]["content"]
        content = written if written in full[len(prompt) :] else written.strip()
        start = full.find(content, len(prompt))
        if start < 0 or full[len(prompt) : start].strip():
            raise _refusal(
                f"a template that changes the text of turn {index + 1} when the conversation continues",
                "one that keeps earlier answers",
                "remove thoughts from all answers but the last, or make each answer the last one of a row of its own",
            )
        end = start + len(content)
        return len(prompt), end + (len(self._end) if full.startswith(self._end, end) else 0)

    def _text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=prompt, tokenize=False)
        except Exception as error:  # the template is third-party code
            raise self._refused(messages, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
        return text

    def _refused(self, messages: Sequence[Message], reason: str) -> NALoRAError:
        """Return the error for a conversation that the template does not accept."""
        roles = [message["role"] for message in messages]
        if roles[0] == "system" and len(roles) > 1:
            with contextlib.suppress(NALoRAError):
                self._text(messages[1:])
                return _refusal(
                    f"a system message, which the model's chat template does not accept ({reason})",
                    "conversations without one",
                    "move its text into the first user message, or set prompt_style: plain",
                )
        turns = [role for role in roles if role != "system"]
        alternating = all(role == ("user", "assistant")[index % 2] for index, role in enumerate(turns))
        return _refusal(
            f"a chat template that fails on the turns {', '.join(roles)} ({reason})",
            "one that can be filled in" if alternating else "turns that it accepts",
            _FIX if alternating else "join messages of the same role, user first, or set prompt_style: plain",
        )

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _refusal(found: str, expected: str, fix: str = _FIX) -> NALoRAError:
    return NALoRAError("prompt_style: chat", found=found, expected=expected, fix=fix)
