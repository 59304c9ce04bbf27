"""Which weights were asked what, as a short name: outputs and losses kept under it are of nothing else.

Names of models and data folders are not enough: what lies under them can be edited or replaced.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nalora.models.file_digest import digest_of_file
from nalora.models.loading import NAMED, Loaded, ModelSpec, local_source
from nalora.tasks import Example, Task

# What a model or an adapter is made of besides its weights: its shape, its tokenizer, its template, its own code.
_PARTS_OF_A_MODEL = frozenset({".safetensors", ".bin", ".json", ".jinja", ".model", ".txt", ".py"})


def identity(
    loaded: Loaded,
    task: Task,
    examples: Sequence[Example],
    *,
    style: str,
    options: Mapping[str, Any],
    trained: Path | None = None,
) -> str:
    """Ten digits that change with anything that answers, scores or losses depend on.

    Args:
        loaded: the model, adapted or not.
        task: what is asked.
        examples: all of them, also where only the first are asked: the others may follow later.
        style: of the prompts.
        options: settings of the task; some change how it writes or scores and not what it asks.
        trained: the folder of the adapter, or of the model that was trained as a whole.
    """
    spec = loaded.spec
    source = local_source(spec)
    # A hub's name without a revision means what is newest there; transformers notes which commit that was.
    commit = getattr(getattr(loaded.model, "config", None), "_commit_hash", None)
    # Chat style asks for other texts than plain style, which keeps the names that it always had.
    chat = {"chat": [[each.question, each.further_questions] for each in examples]} if style == "chat" else {}
    return _digest({
        **chat,
        "model": _name(spec), "revision": spec.revision or commit, "dtype": str(next(loaded.model.parameters()).dtype),
        "quantise": spec.quantise, "weights": [each and digest_of_model(each) for each in (source, trained)],
        "task": [task.name, options], "style": style, "examples": digest_of_examples(task, examples),
    })[:10]  # fmt: skip


def what_was_evaluated(
    task: Task,
    examples: Sequence[Example],
    *,
    style: str,
    options: Mapping[str, Any],
    data_dir: str | None,
    own: bool | None = None,
) -> dict[str, Any]:
    """What a summary's numbers are of, for whoever puts two summaries next to each other.

    Two summaries are alike where `questions` (the content of all questions, their order and their right answers),
    `options`, `style` and `max_new_tokens` are, and as many of the questions were asked.

    Args:
        task: what is asked.
        examples: all questions, also where only the first are asked.
        style: of the prompts.
        options: settings of the task.
        data_dir: the folder of the task's files; its name alone is kept, to tell data sets apart in a label.
        own: of a run: whether this is its own task with the options, data and style that it was trained with.
    """
    return {
        "questions": digest_of_examples(task, examples)[:16],
        # Where a judge's answers are kept changes none of them.
        "options": {name: value for name, value in options.items() if name != "judgements"},
        "style": style,
        "max_new_tokens": task.max_new_tokens,
        "data": Path(data_dir).name if data_dir else None,
        **({} if own is None else {"own": own}),
    }


def _name(spec: ModelSpec) -> str:
    """Of a folder or a file its own name alone: from which folder it is seen does not make it another model."""
    return spec.name if spec.name in NAMED or local_source(spec) is None else Path(spec.name).name


def digest_of_model(path: Path) -> str:
    """By content: of a file, or of all files in a folder that a model or an adapter is made of."""
    if path.is_file():
        return digest_of_file(path)
    files = sorted(file for file in path.iterdir() if file.suffix in _PARTS_OF_A_MODEL and file.is_file())
    return _digest({file.name: digest_of_file(file) for file in files})


def digest_of_examples(task: Task, examples: Sequence[Example]) -> str:
    """By content, with the files of pictures, which examples only name."""
    return _digest(task.content(examples))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
