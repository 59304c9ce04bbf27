"""Prompt templates that several tasks share."""

from __future__ import annotations


def alpaca(instruction: str) -> str:
    """The Alpaca template without an input."""
    return (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        f"\n\n### Instruction:\n{instruction}\n\n### Response:\n"
    )
