"""What is diagnosed, a run or an adapter from anybody's script: its saved states, and where the result is written."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from nalora.diagnostics.inputs import DiagnosisOptions
from nalora.diagnostics.states import SavedState, intact_states, states_of
from nalora.errors import NALoRAError
from nalora.files.outputs import refuse_foreign_files, refuse_linked_folder
from nalora.models.adapters import is_adapter
from nalora.models.file_digest import digest_of_file
from nalora.runs import checkpoints, targets
from nalora.runs.folder import RunFolder
from nalora.runs.saved_run import finished_run, read_run, refuse_unless_own
from nalora.runs.settings import Run, check
from nalora.runs.writable import refuse_unwritable

_WEIGHTS = "adapter_model.safetensors"
# Entries of diagnosis.json and mismatch.json, by which a file is recognised as nalora's.
_OWN_ENTRIES = (b'"version"', b'"probe"', b'"blocks"', b'"run"')
_OWN_CHANNELS = (b'/kappa_drift"', b'/energy"')


class Subject(NamedTuple):
    """A run or an adapter.

    Args:
        run: its settings; those of an adapter are its base model and the task of the probe.
        folder: with its states, and with the state of its controller.
        trained: the adapter or the fully fine-tuned model; of an unfinished run, or a folder of checkpoints, None.
        output: the folder for the result.
        is_run: whether nalora trained it.
    """

    run: Run
    folder: RunFolder
    trained: Path | None
    output: Path
    is_run: bool

    def states(self, every: int) -> tuple[list[SavedState], list[str]]:
        """Return the states by step and notices about them, see `states_of`."""
        if self.is_run:
            return states_of(self.folder, self.run, every)
        found = adapter_states(self.folder.path)
        return intact_states(found, [], every, self.folder.path, "save checkpoints during training")


def subject_of(name: str | Path, options: DiagnosisOptions, *files: str, finished: bool = False) -> Subject:
    """Return what the user named, after checking that `files` can be written for it.

    Raises:
        NALoRAError: neither a run nor an adapter, an adapter without a task or a base model, an unfinished run if it
            must be `finished`, or files in the way that nalora did not write.
    """
    folder = RunFolder(name)
    if folder.settings.is_file() or not _has_adapters(folder.path):
        run = finished_run(name, trust=options.trust).run if finished else read_run(folder, trust=options.trust)
        if options.output is None:
            refuse_unless_own(folder, *files)
        trained = folder.trained if folder.trained.is_dir() else None
        return Subject(run, folder, trained, _checked(options.output or folder.path, files), True)
    if options.task is None:
        found, fix = "an adapter without a task", "add --task, whose training examples are measured on"
        raise NALoRAError(str(name), found=found, expected="--task NAME or a data file", fix=fix)
    states = adapter_states(folder.path)
    spec = targets.resolve(str(states[-1].folder), model=options.model, device=options.device, trust=options.trust).spec
    settings = {
        "model": spec.name, "revision": spec.revision, "trust_remote_code": spec.trust_remote_code,
        "device": spec.device, "task": options.task, "data_dir": options.data_dir,
    }  # fmt: skip
    output = options.output or targets.results_of(str(name))
    return Subject(check(settings, str(name)), folder, states[-1].folder, _checked(output, files), False)


def _checked(output: Path, files: tuple[str, ...]) -> Path:
    """Return the output folder; outside a run's folder, check that no file of others is in the way."""
    refuse_unwritable(output)
    if not RunFolder(output).settings.is_file():
        refuse_linked_folder(output, option="--output")
        paths = [output / name for name in files]
        refuse_foreign_files(paths, _is_own, option="--output", kind="a diagnosis")
    return output


def _is_own(head: bytes) -> bool:
    """Return whether a file that starts with these bytes is a diagnosis, or the values of its channels."""
    return all(entry in head for entry in _OWN_ENTRIES) or any(name in head for name in _OWN_CHANNELS)


def _has_adapters(folder: Path) -> bool:
    return is_adapter(folder) or any(is_adapter(path) for path in checkpoints.listed(folder))


def adapter_states(folder: Path) -> list[SavedState]:
    """Return the base model, the adapters in `checkpoint-N` folders, as Trainer saves them, and the folder's own.

    The folder's own adapter has the next step after the last checkpoint, unless it is that checkpoint's.
    """
    saved = [path for path in checkpoints.listed(folder) if is_adapter(path)]
    states = [SavedState(0, None), *(SavedState(checkpoints.step_in(path.name) or 0, path) for path in saved)]
    if is_adapter(folder):
        files = [path / _WEIGHTS for path in (folder, *saved[-1:])]
        if len(files) < 2 or len({digest_of_file(file) if file.is_file() else None for file in files}) == 2:
            states.append(SavedState(states[-1].step + 1, folder))
    return states
