"""What a task is: examples to train on, test questions, and a way to score the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from nalora.errors import NALoRAError
from nalora.tasks.overlap import not_asked, question_key
from nalora.tasks.validation import hold_out

if TYPE_CHECKING:
    from nalora.models.loading import Loaded

# Text tasks are written by decoders ("causal") or encoder-decoders ("seq2seq"); "clip" tasks choose a class of images.
ModelKind = Literal["causal", "seq2seq", "clip"]


@dataclass(frozen=True)
class Example:
    """One thing to learn, or to be asked.

    Args:
        id: names it in files of outputs; stable over runs and machines.
        prompt: what the model reads, complete: templates are already filled in.
        target: what it should write, without an end-of-sequence token; empty where nobody knows.
        follow_ups: further turns of a conversation, given after the answers to the earlier ones.
        question: the prompt without the scaffold that plain text needs, such as ``Q: …`` and ``A: ``: the user's turn
            in a chat template. Empty where the prompt has no scaffold.
        further_questions: the follow-ups without their scaffold, likewise.
        facts: what scoring needs besides: the number, the unit tests, the label.
    """

    id: str
    prompt: str
    target: str = ""
    follow_ups: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    question: str = ""
    further_questions: tuple[str, ...] = ()


# One example's marks by the name of the measure, each from 0 to 1 unless the measure says otherwise.
Scores = dict[str, float]


class Answer(NamedTuple):
    """A model's answer to an example: one output for each turn, and how many tokens that took."""

    example: Example
    outputs: list[str]
    tokens: int
    finished: bool


class TrainingInputs(NamedTuple):
    """What a model is trained on: rows, what makes a batch of them, and of texts how they were encoded."""

    rows: Sequence[Any]
    collator: Any
    encoded: Any = None


class Task:
    """A task, made by name with `nalora.tasks.get`.

    A subclass sets the fields, implements `train_examples`, `test_examples` and `score`, and overrides `summarise`
    only for measures that are no mean over examples. The parameters of its `__init__` are settings of a run.

    Args:
        data_dir: a folder with the data set's files, in place of the hub.
    """

    name: str
    # What it is, for the list of tasks.
    title: str
    # The measure that decides, then the others; `score` gives all of them.
    measures: tuple[str, ...] = ("accuracy",)
    models: tuple[ModelKind, ...] = ("causal",)
    max_new_tokens: int = 256
    # Writing stops where one of these texts appears; it is cut off.
    stop: tuple[str, ...] = ()
    # How many examples `training_set` left out because they are test questions; None before, and where no test set is
    # there to compare with. Then `not_compared` says why.
    also_asked: int | None = None
    not_compared: str | None = None
    # How many examples may be scored at the same time: more than one where scoring waits for others.
    scoring_threads: int = 1
    # What the setting ``target_modules: all-linear`` stands for in its models.
    linear_layers: str = "all-linear"

    def __init__(self, data_dir: str | Path | None = None) -> None:
        self.data_dir = data_dir

    def train_examples(self) -> Sequence[Example]:
        """The training data as it is, in a fixed order; some of it may be in the test set too, see `training_set`."""
        raise NotImplementedError

    def test_examples(self) -> Sequence[Example]:
        """What is asked, in a fixed order; never seen in training."""
        raise NotImplementedError

    def training_set(self) -> Sequence[Example]:
        """What is trained on: `train_examples` without the questions of the test set, in their order.

        Where the test set is not there, as in a folder with training files alone, nothing can be left out.

        Raises:
            NALoRAError: the training data is not there, or all of it is in the test set.
        """
        examples = self.train_examples()
        try:
            asked = {key for each in self.test_examples() for key in self.keys_of_question(each)}
        except NALoRAError as error:
            self.also_asked, self.not_compared = None, error.found
            return examples
        kept = not_asked(self.name, [self.key_of_training(each) for each in examples], asked)
        self.also_asked, self.not_compared = kept.dropped, None
        return [examples[place] for place in kept.places] if kept.dropped else examples

    def key_of_training(self, example: Example) -> str:
        """By what a training example is recognised as a test question."""
        return question_key(example.question or example.prompt)

    def keys_of_question(self, example: Example) -> tuple[str, ...]:
        """The keys of training examples that would be this test question; several where it has several forms."""
        return (self.key_of_training(example),)

    def score(self, example: Example, outputs: Sequence[str]) -> Scores:
        """The marks of what was written: one output, and one more for each follow-up."""
        raise NotImplementedError

    def summarise(self, examples: Sequence[Example], scores: Sequence[Scores]) -> dict[str, float]:
        """The measures over all examples: their means."""
        return {name: sum(each[name] for each in scores) / len(scores) for name in self.measures}

    def chance(self, examples: Sequence[Example]) -> dict[str, float]:
        """What an answer that knows nothing scores, by the name of that answer (majority class); often nothing."""
        return {}

    def notice(self) -> str:
        """What a user should know before training on it; often nothing."""
        return ""

    def prepare_scoring(self) -> None:
        """Refuse now, before hours of writing, what would make scoring fail afterwards.

        Raises:
            NALoRAError: a sandbox, a key or a server that scoring needs is not there.
        """

    def refuse_unready(self) -> None:
        """Refuse before training what can be seen then to be missing for scoring, without a network.

        Raises:
            NALoRAError: a judge that is not named, a file that is not there.
        """

    def refuse_what_was_learnt(self, trained: Task) -> None:
        """Refuse to evaluate a run on its own task with files or options that hold what it was trained on.

        Args:
            trained: the task with the files and options that the run was trained with.

        Raises:
            NALoRAError: test questions that are among its training examples.
        """
        questions = self.test_examples()
        try:
            left_out = {self.key_of_training(each) for each in trained.test_examples()}
            if all(self.key_of_training(each) in left_out for each in questions):
                return  # the run's own test set or a part of it, which its training left out
            learnt = {trained.key_of_training(each) for each in trained.training_set()}
        except NALoRAError:  # what it was trained on is not here any more
            return
        shared = sum(not learnt.isdisjoint(self.keys_of_question(each)) for each in questions)
        if shared:
            raise NALoRAError(
                self.name,
                found=f"{shared:,} of {len(questions):,} test questions among the run's training examples",
                expected="only questions that it was not trained on",
                fix="leave the options and data_dir out, or train a run with the same",
            )

    # The modality. Here it is text; a task of anything else, such as pictures, overrides what follows.

    def prepare_model(self, loaded: Loaded) -> Loaded:
        """The model as the task trains and evaluates it.

        Raises:
            NALoRAError: a model of another kind.
        """
        return loaded

    def training_inputs(
        self,
        loaded: Loaded,
        validation_size: int,
        limit: int | None,
        encode: Callable[[Sequence[Example]], TrainingInputs],
    ) -> TrainingInputs:
        """The training set without what is held out, as at most `limit` rows; `encode` makes rows of tokens."""
        return encode(hold_out(self.training_set(), validation_size)[0])

    def answers(
        self, loaded: Loaded, examples: Sequence[Example], generate: Callable[[], Iterator[list[Answer]]]
    ) -> Iterator[list[Answer]]:
        """The model's answers to these examples, a batch at a time, in any order; `generate` writes them as text."""
        return generate()

    def losses(
        self,
        loaded: Loaded,
        examples: Sequence[Example],
        text_losses: Callable[[Sequence[Example]], list[tuple[float, int]]],
    ) -> list[tuple[float, int]]:
        """(−log p of the target, the number of tokens it is the sum over) of each example."""
        return text_losses(examples)

    def content(self, examples: Sequence[Example]) -> list[Any]:
        """All that these examples consist of, as JSON can write it: other content is another evaluation."""
        return [[each.id, each.prompt, each.target, each.follow_ups, dict(each.facts)] for each in examples]
