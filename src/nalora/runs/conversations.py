"""Conversations of several turns inside a chat template: which of their tokens are trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nalora.errors import NALoRAError
from nalora.runs.chat_template import ChatTemplate

Message = Mapping[str, str]


def conversation_row(template: ChatTemplate, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Return the tokens that `apply_chat_template` gives for a conversation, and which of them are trained on.

    Trained on are the assistant's answers, each with its end of turn. A token that contains the end of a prompt and the
    beginning of an answer belongs to the answer.

    Raises:
        NALoRAError: a template that cannot be filled in, or that changes answers so that they cannot be found.
    """
    full = template.text(messages, prompt=False)
    spans = [_span(template, messages, i, full) for i, m in enumerate(messages) if m["role"] == "assistant"]
    ids, ends = template.tokens_with_ends(full)
    trained, start = [False] * len(ids), 0
    for number, end in enumerate(ends):
        trained[number] = any(first < end and start < last for first, last in spans)
        start = end
    if not template.ends_turns:
        ids.append(template.tokenizer.eos_token_id)
        trained.append(True)
    return ids, trained


def _span(template: ChatTemplate, messages: Sequence[Message], index: int, full: str) -> tuple[int, int]:
    """Return where an answer with its end of turn begins and ends in the text of the whole conversation."""
    before = template.text(messages[:index], prompt=True)
    after = template.text(messages[: index + 1], prompt=False)
    if not full.startswith(before):
        raise NALoRAError(
            "prompt_style: chat",
            found=f"a chat template that writes turn {index + 1} differently when the conversation continues",
            expected="a template that keeps earlier turns",
            fix="train on conversations of one question and answer, or give the tokenizer another chat_template",
        )
    if full.startswith(after):
        return len(before), len(after)
    # Some templates write the last answer differently, with an empty block of thoughts: look for the answer itself.
    content = messages[index]["content"].strip()
    start = full.find(content, len(before))
    between = full[len(before) : start].strip() if start >= 0 else "?"
    if between:
        raise NALoRAError(
            "prompt_style: chat",
            found=f"a chat template that changes the text of turn {index + 1}",
            expected="the answer as it is in the data",
            fix="remove thoughts from earlier answers, or give the tokenizer another chat_template",
        )
    end = start + len(content)
    return len(before), end + (len(template.turn_end) if full.startswith(template.turn_end, end) else 0)
