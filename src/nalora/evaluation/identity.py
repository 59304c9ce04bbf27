"""The questions of an evaluation, and the key of its results, which depends on the weights and on the questions.

Names of models and data folders are not enough: the files under these names can be edited or replaced.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nalora.models.file_digest import digest_of_file
from nalora.models.loading import NAMED, Loaded, ModelSpec, local_source
from nalora.tasks import Example, Task

# The files of a model or an adapter: weights, configuration, tokenizer, chat template and code.
_MODEL_FILES = frozenset({".safetensors", ".bin", ".json", ".jinja", ".model", ".txt", ".py"})


@dataclass(frozen=True)
class Questions:
    """All questions of an evaluation, and how prompts are made of them.

    Args:
        task: scores the answers.
        examples: all questions, even if only the first are evaluated: the others may follow later.
        style: of the prompts: ``plain``, or ``chat`` for the tokenizer's chat template.
        options: settings of the task; some change generation or scoring and not the questions.
        data_dir: the folder of the task's files.
        own: for a run, whether it was trained on this task with the same options, data and style.
    """

    task: Task
    examples: Sequence[Example]
    style: str = "plain"
    options: Mapping[str, Any] = field(default_factory=dict)
    data_dir: str | None = None
    own: bool | None = None

    def described(self) -> dict[str, Any]:
        """Return the part of a summary by which two summaries can be compared.

        Their results are comparable if `questions` (the content of all questions, their order and their targets),
        `options`, `style` and `max_new_tokens` are equal, and the number of evaluated questions.
        """
        return {
            "questions": digest_of_examples(self.task, self.examples)[:16],
            # The path of a judge's answers changes none of them.
            "options": {name: value for name, value in self.options.items() if name != "judgements"},
            "style": self.style,
            "max_new_tokens": self.task.max_new_tokens,
            # Distinguishes data sets in labels; the rest of the path differs between machines.
            "data": Path(self.data_dir).name if self.data_dir else None,
            **({} if self.own is None else {"own": self.own}),
        }


def identity(loaded: Loaded, questions: Questions, trained: Path | None = None) -> str:
    """Return ten digits that change with everything that answers, scores or losses depend on.

    `trained` is the folder of the adapter, or of the fully fine-tuned model.
    """
    task, examples = questions.task, questions.examples
    # Chat prompts are made of other texts than plain ones; plain evaluations keep the keys of earlier versions.
    chat = {"chat": [[example.question, example.further_questions] for example in examples]}
    return key_of({
        **(chat if questions.style == "chat" else {}), **identity_of_model(loaded, trained),
        "task": [task.name, questions.options], "style": questions.style,
        "examples": digest_of_examples(task, examples),
    })  # fmt: skip


def identity_of_model(loaded: Loaded, trained: Path | None = None) -> dict[str, Any]:
    """Return what changes with the weights and the tokenizer of a model with its adapter, see `identity`."""
    spec, folders = loaded.spec, (local_source(loaded.spec), trained)
    # The name of a model on the hub without a revision means the newest commit, which transformers records.
    commit = getattr(getattr(loaded.model, "config", None), "_commit_hash", None)
    return {
        "model": _name(spec), "revision": spec.revision or commit, "dtype": str(next(loaded.model.parameters()).dtype),
        "quantise": spec.quantise, "weights": [path and _digest_of_model(path) for path in folders],
    }  # fmt: skip


def key_of(setup: Mapping[str, Any]) -> str:
    """Return ten digits that change with the values of a setup."""
    return _digest(setup)[:10]


def _name(spec: ModelSpec) -> str:
    """Return a name that does not depend on the working folder: the last part of a path."""
    return spec.name if spec.name in NAMED or local_source(spec) is None else Path(spec.name).name


def _digest_of_model(path: Path) -> str:
    if path.is_file():
        return digest_of_file(path)
    files = sorted(file for file in path.iterdir() if file.suffix in _MODEL_FILES and file.is_file())
    return _digest({file.name: digest_of_file(file) for file in files})


def digest_of_examples(task: Task, examples: Sequence[Example]) -> str:
    """Return a digest of the examples' content, including the image files that they name."""
    return _digest(task.content(examples))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
