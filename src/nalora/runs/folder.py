"""A run's folder: everything needed to read, repeat and resume it.

run.yaml          every setting with its value
environment.json  versions, hardware, the command
metrics.jsonl     a row for every logged step
gates.jsonl       under NA-LoRA the same for every FFN block
snapshots/        what the run would have saved at chosen steps, to be compared
checkpoints/      to resume from; each one whole or not counted
start/            what a method needs of its start when the run is resumed
adapter/          the ordinary PEFT adapter (model/ after full fine-tuning)
evaluations/      outputs, scores and summaries by task
diagnosis.json    how the gates moved between snapshots
result.json       what it came to; there only when the run is finished
.nalora.json      nalora's marker: this folder may be written to
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from nalora.distributed.processes import is_first_process
from nalora.errors import NALoRAError
from nalora.files import atomic, yaml_reader
from nalora.runs import checkpoints, contents, marker
from nalora.runs.paths import WORKING_DIRECTORY, working_directory
from nalora.runs.provenance import commit
from nalora.runs.settings import check
from nalora.runs.trust import consequences

_PACKAGES = ("nalora", "torch", "transformers", "peft", "accelerate", "triton", "bitsandbytes", "liger-kernel")
# How the folder of a task's evaluations ends where a run was asked what it held out of its training set.
HELD_OUT = "-validation"
# Settings that change nothing of what comes out: where it is kept, what is told on the way.
INDIFFERENT = ("output", "report_to", "log_every", "save_every", "save_minutes", "snapshot_every", "device")
# Nor does a pass's size, but for rounding and dropout's draws, as another number of processes. It is part of the key of
# a study's run all the same: the keys of runs that were made before must not change.
_INDIFFERENT_ON_THE_WAY = (*INDIFFERENT, "micro_batch_size")


class RunFolder:
    """Knows where things are; `open` decides whether a run may start there."""

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
        """Refuse a folder in which this run may not start or go on. Nothing is touched.

        Raises:
            NALoRAError: the folder is not nalora's; another run is there, or the one to resume is not, or was begun
                with other settings.
        """
        marker.refuse_foreign(self.path, "run", option="output=", known=contents.is_run_of_0_1)
        if self.path.is_dir():
            contents.refuse_odd_entries(self.path)
        if resume:
            if not self.settings.is_file():
                raise NALoRAError(
                    str(self.path), found="no run", expected="one to resume", fix="leave --resume out to start it"
                )
            if changed := self._changed(settings):
                raise NALoRAError(
                    str(self.path),
                    found=f"a run begun with other settings: {', '.join(changed)}",
                    expected="the settings it was begun with",
                    fix="give those, or another output=",
                )
        elif self.settings.is_file():
            finished = self.result.is_file()
            raise NALoRAError(
                str(self.path),
                found="a finished run" if finished else "an unfinished run",
                expected="a folder of its own",
                fix="give another output=" if finished else "add --resume, or give another output=",
            )
        elif self.path.is_dir() and any(self.path.iterdir()) and not contents.left_of_a_start(self.path):
            raise NALoRAError(
                str(self.path),
                found="files of a run whose run.yaml is missing",
                expected="a folder of its own for a new run",
                fix="give another output=, or remove this folder yourself",
            )

    def mark(self) -> marker.Made:
        """Make the folder and put nalora's marker into it, if it has none; call `refuse` first."""
        # Version 0.1 kept what a method needs of its start among the run's own files.
        return marker.mark(self.path, "run", **({"start": "."} if self.settings.is_file() else {}))

    def open(
        self, settings: dict[str, Any], *, resume: bool, say: Callable[[str], None] = lambda line: None
    ) -> Path | None:
        """Make the folder ready; the checkpoint to resume from, None for a start from the beginning.

        Of several processes only the first one calls it. `say` receives a line for each damaged checkpoint.

        Raises:
            NALoRAError: as `refuse`.
        """
        self.refuse(settings, resume=resume)
        self.mark()
        if not resume:
            write_json(
                self.path / "environment.json", environment() | {WORKING_DIRECTORY: working_directory(self.path)}
            )
            self.write_settings(settings)
            return None
        if not self.result.is_file():
            self.write_settings(settings)
            checkpoints.remove_unfinished(self.checkpoints)
        return self.latest_checkpoint(say=say)

    @property
    def start(self) -> Path:
        """Where a method keeps what a resumed run must find again of its start."""
        return self.path if (marker.read(self.path) or {}).get("start") == "." else self.path / "start"

    def write_settings(self, settings: dict[str, Any]) -> None:
        """Write what the run is told."""
        import yaml

        atomic.write(self.settings, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))

    def _changed(self, settings: dict[str, Any]) -> list[str]:
        """The settings that make another run than the one begun here; one that did not exist then had its default."""
        begun = yaml_reader.read(self.settings, "a run's settings", "give another output=")
        # Another's folder may name other code: not even to compare it is that run.
        if code := [name for name in consequences(begun, self.path) if begun[name] != settings.get(name)]:
            return code
        before, now = (check(each, str(self.settings)).to_dict() for each in (begun, settings))
        names = {*before, *now}.difference(_INDIFFERENT_ON_THE_WAY)
        return sorted(name for name in names if before.get(name) != now.get(name))

    def latest_checkpoint(
        self, before: float = math.inf, say: Callable[[str], None] = lambda line: None
    ) -> Path | None:
        """The last whole checkpoint, of a step before that; `say` receives a line for each damaged one."""
        return checkpoints.latest(self.checkpoints, before, say)

    @property
    def trained(self) -> Path:
        """What a finished run saved: the whole model after full fine-tuning, else the adapter."""
        return self.model if self.model.is_dir() else self.adapter

    def snapshot(self, step: int) -> Path:
        """The folder of what was trained after that step; its name sorts by step."""
        return self.snapshots / f"step-{step:08d}"

    def snapshot_steps(self) -> list[int]:
        """The steps of which there is a snapshot; one that is there is whole."""
        names = (entry.name for entry in self.snapshots.glob("step-*") if entry.is_dir())
        return sorted(int(name[5:]) for name in names if contents.is_snapshot(name))

    def forget_after(self, step: int) -> None:
        """Drop the rows and snapshots of steps that will be done again, and what a kill cut short."""
        if not is_first_process():
            return
        for file in (self.metrics, self.gates):
            if file.is_file():
                kept = [row for row in read_jsonl(file) if row.get("step", 0) <= step]
                atomic.write(file, "".join(atomic.json_text(row) + "\n" for row in kept))
        for later in self.snapshot_steps():
            if later > step:
                shutil.rmtree(self.snapshot(later))
        for unfinished in self.snapshots.glob(".step-*"):
            if contents.is_snapshot(unfinished.name):
                shutil.rmtree(unfinished)

    def finish(self, result: dict[str, Any]) -> None:
        """Write what the run came to."""
        write_json(self.result, result)


def environment() -> dict[str, Any]:
    """What the run was made with and on."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    cuda = torch.cuda.is_available()
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": commit(),
        "python": platform.python_version(),
        "versions": versions,
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "devices": torch.cuda.device_count() if cuda else 0,
        "cpu_threads": torch.get_num_threads(),
    }


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    atomic.write(path, atomic.json_text(value, indent=2) + "\n")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that may have been cut short in its last line."""
    rows: list[dict[str, Any]] = []
    if path.is_file():
        # Not splitlines: answers may hold separators that it takes for the end of a line.
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                row = json.loads(line)
            except ValueError:
                break
            if not isinstance(row, dict):
                break
            rows.append(row)
    return rows
