"""What a run will need after its training, asked for before it."""

from __future__ import annotations

from nalora import tasks
from nalora.runs.settings import Run

# A setting that may be left open on purpose, as null: the run is trained, and evaluated where there is a judge.
_JUDGE = "judge_model"


def refuse_unready(run: Run) -> None:
    """Refuse a run whose evaluation could not start, where that can be seen without loading anything.

    Raises:
        NALoRAError: the task's answers are rated by a judge, and none is named.
    """
    name = run.settings.task
    left_open = _JUDGE in run.task_options and run.task_options[_JUDGE] is None
    if _JUDGE in tasks.option_types(name) and not left_open:
        tasks.get(name, data_dir=run.settings.data_dir, **run.task_options).refuse_unready()
