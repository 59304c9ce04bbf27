"""Counts in messages: "1 step", "2 steps"."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural unless it is 1; thousands are separated by commas.

    Args:
        number: how many.
        noun: in the singular, with a regular plural.
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
