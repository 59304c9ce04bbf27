"""A run's folder: everything needed to read, repeat and resume the run.

run.yaml          every setting with its value
environment.json  versions, hardware, the command
metrics.jsonl     a row for every logged step
gates.jsonl       under NA-LoRA the same for every FFN block
snapshots/        the adapter at chosen steps, for `nalora diagnose`
checkpoints/      to resume from; incomplete ones are ignored
start/            what a method needs from its start when the run is resumed
adapter/          the ordinary PEFT adapter (model/ after full fine-tuning)
evaluations/      outputs, scores and summaries by task
diagnosis.json    how the gates moved between snapshots
result.json       the result; only written when the run is finished
.nalora.json      nalora's marker: nalora may write to this folder
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nalora.distributed.processes import is_first_process
from nalora.errors import NALoRAError, shortened
from nalora.files import atomic, yaml_reader
from nalora.files.atomic import read_json
from nalora.runs import checkpoints, contents, data_record, marker
from nalora.runs.provenance import environment
from nalora.runs.settings import check
from nalora.runs.trust import consequences

# The ending of the folder with evaluations on the examples that were held out of the training set.
HELD_OUT = "-validation"
# The beginning of the names under which metrics.jsonl has the movement of gates (`gate_movement_steps`).
MOVEMENT = "movement/"
# The entry of environment.json with the content of the run's data files.
_DATA = "data"
# Settings that do not change the result: where it is written, and what is reported during the run.
INDIFFERENT = ("output", "report_to", "log_every", "save_every", "save_minutes", "snapshot_every", "device")
# Nor does the micro-batch size, except for rounding and dropout, as another number of processes, nor whether layers are
# fused, except for rounding. They are part of the key of a study's run all the same, because the keys of stored runs
# must not change.
_INDIFFERENT_ON_RESUME = (*INDIFFERENT, "micro_batch_size", "fused_adapters")


class RunFolder:
    """The paths in a run's folder; `open` decides whether a run may start there."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.settings = self.path / "run.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.gates = self.path / "gates.jsonl"
        self.snapshots = self.path / "snapshots"
        self.checkpoints = self.path / "checkpoints"
        self.adapter = self.path / "adapter"
        self.model = self.path / "model"
        self.evaluations = self.path / "evaluations"
        self.diagnosis = self.path / "diagnosis.json"
        self.result = self.path / "result.json"

    def refuse(self, settings: dict[str, Any], *, resume: bool) -> None:
        """Raise NALoRAError if this run may not start or be resumed in the folder; nothing is changed.

        That is so if the folder is not nalora's, if another run is in it, or if the run to resume is missing or was
        started with other settings.
        """
        marker.refuse_foreign(self.path, "run", option="output=", known=contents.is_run_of_0_1)
        if self.path.is_dir():
            contents.refuse_wrong_types(self.path)
        if problem := self._problem(settings, resume):
            found, expected, fix = problem
            raise NALoRAError(str(self.path), found=found, expected=expected, fix=fix)

    def _problem(self, settings: dict[str, Any], resume: bool) -> tuple[str, str, str] | None:
        """Return what is found, what is expected and the fix; None if the run may start or be resumed."""
        new = "a new folder for this run"
        if resume and not self.settings.is_file():
            return "no run", "one to resume", "leave --resume out to start it"
        before, now = (self.data_record(), data_record.record_of(settings)) if resume else ({}, {})
        if edited := data_record.changes(before, now):
            found = f"a run that was started on other data: {', '.join(edited)}"
            fix = f"restore it and run `{self.resume_command()}`, or give another output= to train on the new data"
            return found, "the data it was started on", fix
        if resume and (changed := self._changed(settings, data_record.equal_in_content(before, now))):
            found = f"a run started with other settings: {'; '.join(changed)}"
            fix = f"`{self.resume_command()}` continues it with those; or give another output="
            if self.result.is_file():  # as a run that stop_after ended
                found, fix = f"a finished {found[2:]}", "leave --resume out and give another output="
            return found, "the settings it was started with", fix
        if resume:
            return None
        if self.result.is_file() and self.settings.is_file():
            return "a finished run", new, "give another output="
        if self.settings.is_file():
            return "an unfinished run", new, f"continue it with `{self.resume_command()}`, or give another output="
        if self.path.is_dir() and any(self.path.iterdir()) and not contents.is_barely_started(self.path):
            fix = "give another output=, or remove this folder yourself"
            return "files of a run whose run.yaml is missing", new, fix
        return None

    def resume_command(self) -> str:
        """Return the command that continues the run with its own settings."""
        return self.command("train", "--resume")

    def command(self, name: str, *options: str) -> str:
        """Return a command about the run, with --trust if its settings name code."""
        settings = yaml_reader.read(self.settings, "a run's settings", "give another output=")
        trust = ["--trust"] if consequences(settings, self.path) else []
        return shlex.join(["nalora", name, str(self.path), *options, *trust])

    def mark(self) -> marker.Made:
        """Create the folder and its marker if they are missing; call `refuse` first."""
        # Version 0.1 kept the start files of a method among the run's own files.
        return marker.mark(self.path, "run", **({"start": "."} if self.settings.is_file() else {}))

    def open(
        self, settings: dict[str, Any], *, resume: bool, notify: Callable[[str], None] = lambda line: None
    ) -> Path | None:
        """Prepare the folder in the first process; return the checkpoint to resume from, None for a new start.

        `notify` gets a line for each damaged checkpoint. Raises NALoRAError as `refuse` does.
        """
        self.refuse(settings, resume=resume)
        self.mark()
        if not resume:
            data = data_record.record_of(settings)
            write_json(self.path / "environment.json", {**environment(self.path), **({_DATA: data} if data else {})})
            self.write_settings(settings)
            return None
        if not self.result.is_file():
            self.write_settings(settings)
            checkpoints.remove_unfinished(self.checkpoints)
        return self.latest_checkpoint(notify=notify)

    @property
    def start(self) -> Path:
        """The folder for what a method needs from its start when the run is resumed."""
        return self.path if (marker.read(self.path) or {}).get("start") == "." else self.path / "start"

    def write_settings(self, settings: dict[str, Any]) -> None:
        """Write run.yaml."""
        import yaml

        atomic.write(self.settings, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))

    def data_record(self) -> data_record.Record:
        """Return the content of the data that the run was started on; empty if nothing is recorded."""
        recorded = (read_json(self.path / "environment.json") or {}).get(_DATA)
        return recorded if isinstance(recorded, dict) else {}

    def _changed(self, settings: dict[str, Any], moved: set[str]) -> list[str]:
        """Return the settings in which this run differs from the one in the folder, with both values.

        The settings in `moved` may name other files, which are equal in content.
        """
        options = yaml_reader.read(self.settings, "a run's settings", "give another output=")
        options |= {name: settings[name] for name in moved}
        # The folder may be somebody else's and name other code, which must not run even to be compared.
        if code := [name for name in consequences(options, self.path) if options[name] != settings.get(name)]:
            return code
        before, now = (check(values, str(self.settings)).to_dict() for values in (options, settings))
        names = {*before, *now}.difference(_INDIFFERENT_ON_RESUME)
        differing = sorted(name for name in names if before.get(name) != now.get(name))
        return [f"{name} {_shown(before, name)}, now {_shown(now, name)}" for name in differing]

    def latest_checkpoint(
        self, before: float = math.inf, notify: Callable[[str], None] = lambda line: None
    ) -> Path | None:
        """Return the last undamaged checkpoint below step `before`; `notify` gets a line for each damaged one."""
        return checkpoints.latest(self.checkpoints, before, notify)

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint after that step, as transformers names it."""
        return self.checkpoints / f"checkpoint-{step}"

    @property
    def trained(self) -> Path:
        """The folder that a finished run saved: the whole model after full fine-tuning, otherwise the adapter."""
        return self.model if self.model.is_dir() else self.adapter

    def snapshot(self, step: int) -> Path:
        """Return the folder of the snapshot after that step; the names sort by step."""
        return self.snapshots / f"step-{step:08d}"

    def snapshot_steps(self) -> list[int]:
        """Return the steps that have a snapshot; partial ones have other names."""
        names = (entry.name for entry in self.snapshots.glob("step-*") if entry.is_dir())
        return sorted(int(name[5:]) for name in names if contents.is_snapshot(name))

    def remove_after(self, step: int) -> None:
        """Remove the rows and snapshots of steps that will be repeated, and partial snapshots."""
        if not is_first_process():
            return
        for file in (self.metrics, self.gates):
            if file.is_file():
                rows = [row for row in read_jsonl(file) if row.get("step", 0) <= step]
                atomic.write(file, "".join(atomic.json_text(row) + "\n" for row in rows))
        partial = [path for path in self.snapshots.glob(".step-*") if contents.is_snapshot(path.name)]
        later = [self.snapshot(number) for number in self.snapshot_steps() if number > step]
        for path in (*later, *partial):
            shutil.rmtree(path)

    def finish(self, result: dict[str, Any]) -> None:
        """Write result.json."""
        write_json(self.result, result)


def _shown(settings: dict[str, Any], name: str) -> str:
    return shortened(settings[name], 40) if name in settings else "not set"


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    atomic.write(path, atomic.json_text(value, indent=2) + "\n")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file whose last line may be incomplete."""
    rows: list[dict[str, Any]] = []
    if path.is_file():
        # Not splitlines: answers may contain characters that it takes for line ends.
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                row = json.loads(line)
            except ValueError:
                break
            if not isinstance(row, dict):
                break
            rows.append(row)
    return rows
