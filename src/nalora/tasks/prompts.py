"""Prompt templates that several tasks share."""

from __future__ import annotations


def alpaca(instruction: str) -> str:
    """The Alpaca template for an instruction without further input; the answer follows its last line."""
    return (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{instruction}\n\n### Response:\n"
    )
