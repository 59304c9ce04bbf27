"""Measures for answers to your own data: exact match, F1, contains, regular expression, number, multiple choice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from nalora.tasks.answers import robust, same_number

Measure = Callable[[str, str], float]
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
# At the ends of words only: C++ is not C#, and + is not -.
_PUNCTUATION = ".,;:!?\"'`()[]{}"
# "B", "(b)", "B.", "Answer: B", "the answer is B" at the beginning or the end of an answer.
_LETTER = re.compile(r"^\s*\(?([A-Za-z])\)?(?=[\s.,:;)]|$)|(?:answer(?:\s+is)?|option)\s*:?\s*\(?([A-Za-z])\b", re.I)


def normalised(text: str) -> str:
    """Lower-case the text and remove articles, repeated spaces and punctuation around words, similar to SQuAD.

    A text without anything else is returned as it is.
    """
    words = (word.strip(_PUNCTUATION) for word in _ARTICLES.sub(" ", text.casefold()).split())
    return " ".join(filter(None, words)) or " ".join(text.split())


def exact_match(output: str, expected: str) -> float:
    """1 if both texts are equal after normalisation."""
    return float(normalised(output) == normalised(expected))


def f1(output: str, expected: str) -> float:
    """The harmonic mean of precision and recall over the words of the normalised texts."""
    written, wanted = normalised(output).split(), normalised(expected).split()
    if not written or not wanted:
        return float(written == wanted)
    shared = sum((Counter(written) & Counter(wanted)).values())
    return 2 * shared / (len(written) + len(wanted))


def contains(output: str, expected: str) -> float:
    """1 if the normalised output contains the normalised expected answer as whole words."""
    return float(f" {normalised(expected)} " in f" {normalised(output)} ")


def number(output: str, expected: str) -> float:
    """1 if both texts end in the same number, as `nalora.tasks.answers` reads it for GSM8K."""
    return float(same_number(robust(output), robust(expected)))


def choice(output: str, expected: str) -> float:
    """1 if both texts choose the same letter of a multiple-choice question; texts without a letter are compared."""
    letters = [_letter(output), _letter(expected)]
    return float(letters[0] == letters[1]) if all(letters) else exact_match(output, expected)


def _letter(text: str) -> str | None:
    matches = list(_LETTER.finditer(text))
    return (matches[-1][1] or matches[-1][2]).upper() if matches else None


def matching(pattern: str) -> Measure:
    """Return a measure that compares what a regular expression extracts from both texts: its first group, or all of it.

    Where the expected answer has no match, the output only has to match.
    """
    compiled = re.compile(pattern, re.MULTILINE)

    def extract(text: str) -> str | None:
        matches = list(compiled.finditer(text))
        return (matches[-1][1] if compiled.groups else matches[-1][0]) if matches else None

    def measure(output: str, expected: str) -> float:
        written, wanted = extract(output), extract(expected)
        return float(written is not None and (wanted is None or normalised(written) == normalised(wanted)))

    return measure


MEASURES: dict[str, Measure] = {
    "exact_match": exact_match,
    "f1": f1,
    "contains": contains,
    "number": number,
    "choice": choice,
}
# The names of measures in sentences and on axes, where that of the setting does not say what is counted.
_TITLES = {
    "exact_match": "exact match", "f1": "F1", "contains": "answer contained", "number": "right number",
    "choice": "right choice", "regex": "pattern match",
}  # fmt: skip


def title_of(measure: str) -> str:
    """Return the name of a measure for readers; files and settings keep the other one."""
    return _TITLES.get(measure, measure)


def suitable(expected: Sequence[str]) -> tuple[str, ...]:
    """Choose measures by the expected answers: numbers, single letters, short texts or long ones."""
    if all(re.fullmatch(r"\s*\(?[A-Ea-e]\)?[.)]?\s*", text) for text in expected):
        return ("choice",)
    if all("####" in text or re.fullmatch(r"\s*[-+$€£]?[\d.,/ %]*\d[\d.,/ %]*\s*", text) for text in expected):
        return ("number",)
    words = sorted(len(text.split()) for text in expected)
    return ("exact_match", "f1") if words[len(words) // 2] <= 10 else ("f1",)
