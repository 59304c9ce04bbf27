"""What a task is: examples to learn from, questions to ask, and a way to score what was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# Text tasks are written by decoders ("causal") or encoder-decoders ("seq2seq"); "clip" tasks choose a class of images.
ModelKind = Literal["causal", "seq2seq", "clip"]


@dataclass(frozen=True)
class Example:
    """One thing to learn, or to be asked.

    Args:
        id: names it in files of outputs; stable over runs and machines.
        prompt: what the model reads, complete: templates are already filled in.
        target: what it should write, without an end-of-sequence token; empty where nobody knows.
        follow_ups: further turns of a conversation, asked after the answers to the earlier ones.
        facts: what scoring needs besides: the number, the unit tests, the label.
    """

    id: str
    prompt: str
    target: str = ""
    follow_ups: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


# One example's marks by the name of the measure, each from 0 to 1 unless the measure says otherwise.
Scores = dict[str, float]


class Task:
    """A family member, made by name with `nalora.tasks.get`.

    A subclass sets the fields, gives `train_examples`, `test_examples` and `score`, and overrides `summarise`
    only for measures that are no mean over examples.
    """

    name: str
    title: str
    # The measure that decides, then the others; `score` gives all of them.
    measures: tuple[str, ...] = ("accuracy",)
    models: tuple[ModelKind, ...] = ("causal",)
    max_new_tokens: int = 256
    # Writing stops where one of these texts appears; it is cut off.
    stop: tuple[str, ...] = ()
    # How many examples `train_examples` left out because the test set asks them.
    also_asked: int = 0
    # How many examples may be scored at the same time: more than one where scoring waits for others.
    scoring_threads: int = 1

    def train_examples(self) -> Sequence[Example]:
        """What is learnt from, in a fixed order."""
        raise NotImplementedError

    def test_examples(self) -> Sequence[Example]:
        """What is asked, in a fixed order; never seen in training."""
        raise NotImplementedError

    def score(self, example: Example, outputs: Sequence[str]) -> Scores:
        """The marks of what was written: one output, and one more for each follow-up."""
        raise NotImplementedError

    def summarise(self, examples: Sequence[Example], scores: Sequence[Scores]) -> dict[str, float]:
        """The measures over all examples: their means."""
        return {name: sum(each[name] for each in scores) / len(scores) for name in self.measures}

    def chance(self, examples: Sequence[Example]) -> dict[str, float]:
        """What an answer that knows nothing scores, by the name of that answer (majority class); often nothing."""
        return {}

    def prepare_scoring(self) -> None:
        """Refuse now, before hours of writing, what would make scoring fail afterwards.

        Raises:
            NALoRAError: a sandbox, a key or a server that scoring needs is not there.
        """

    def refuse_what_was_learnt(self, trained: Task) -> None:
        """Refuse to ask a run about its own task with options under which it may have learnt what is asked.

        Args:
            trained: the task with the options that the run was trained with.

        Raises:
            NALoRAError: questions that its training did not leave out; most tasks have no options that lead to any.
        """
