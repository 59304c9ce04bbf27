"""What a command's target is, for all commands: the folder of a run, the folder of a PEFT adapter, or a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nalora.errors import NALoRAError, did_you_mean
from nalora.files import expanded
from nalora.models import hub, loading
from nalora.models.adapters import adapter_config, is_adapter, with_adapter
from nalora.models.loading import Kind, Loaded, ModelSpec
from nalora.runs import checkpoints, packaged
from nalora.runs.folder import RunFolder
from nalora.runs.saved_run import FinishedRun, finished_run, read_run
from nalora.runs.writable import folder_name

# Where `nalora train` writes by default.
_RUNS = Path("runs")
# Parts of an adapter on the hub: all but pictures and optimizer states.
_ADAPTER_PATTERNS = ["*.json", "*.safetensors", "adapter_model.bin", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True)
class Target:
    """What the user named, before anything is loaded.

    Args:
        name: as the user wrote it.
        sort: what it is.
        spec: the base model of a run or an adapter, or the model itself; `load` determines its kind.
        trained: the folder of the trained adapter, or of a fully fine-tuned model; None for a model.
        run: the finished run with its folder and settings; None for anything else.
    """

    name: str
    sort: Literal["run", "adapter", "model"]
    spec: ModelSpec
    trained: Path | None = None
    run: FinishedRun | None = None

    @property
    def adapter(self) -> Path | None:
        """The folder of the adapter; None for a model, and for a run that trained the whole model."""
        return self.trained if self.trained and is_adapter(self.trained) else None

    @property
    def trained_spec(self) -> ModelSpec:
        """What is loaded as the model: the fully fine-tuned one, else the base model."""
        if self.trained is None or self.adapter:
            return self.spec
        return replace(self.spec, name=str(self.trained), revision=None, quantise=None)


class Models(NamedTuple):
    """The trained model, and its base if it was asked for and is another one."""

    trained: Loaded
    base: Loaded | None


def resolve(
    name: str,
    *,
    model: str | None = None,
    device: str | None = None,
    trust: bool = False,
    own: Mapping[str, Any] | None = None,
) -> Target:
    """Return what the user named: RUN, ADAPTER or MODEL. Nothing is loaded.

    Args:
        name: a folder, a GGUF file, a hub id or a known name.
        model: the base model, in place of the one that a run or an adapter names.
        device: to load on; by default the run's, or the best available one.
        trust: whether code that comes with a run or a model may run.
        own: the user's own settings of a run, as in `read_run`.

    Raises:
        NALoRAError: none of these, an unfinished run, an adapter whose base model is unknown or missing, or settings
            or files that would run code without trust.
    """
    path = expanded(name)
    if (path / "run.yaml").is_file():
        finished = finished_run(path, trust=trust, own=own)
        settings = finished.run.settings
        spec = settings.model_spec() if settings.evaluate_quantised else replace(settings.model_spec(), quantise=None)
        spec = _with(spec, model, device)
        return Target(name, "run", spec, finished.trained, finished)
    folder = path if is_adapter(path) else None if path.exists() else _adapter_on_hub(name)
    if folder is not None:
        spec = _base_of(folder, model, trust)
        return Target(name, "adapter", _with(spec, None, device), folder)
    if model is not None:
        found = "no adapter" if path.exists() else "no such folder"
        raise _no_target(name, path, f"{found}, and --model for its base")
    spec = ModelSpec(name, device=device, trust_remote_code=trust)
    if path.is_dir() and not (path / "config.json").is_file():
        raise _no_target(name, path, "a folder without run.yaml, adapter_config.json and config.json")
    if not path.exists() and name not in loading.NAMED and loading.is_path(name):
        raise _no_target(name, path, "no such folder or file")
    return Target(name, "model", spec)


def load(
    target: Target,
    *,
    kind: Kind | None = None,
    with_base: bool = False,
    prepare: Callable[[Loaded], Loaded] = lambda loaded: loaded,
) -> Models:
    """Load the trained model of a target, and its base model if asked, with the tokenizer saved with the adapter.

    Args:
        target: from `resolve`.
        kind: of the model; by default the one that its configuration describes.
        with_base: whether the base model is needed too. An adapted model shares its weights.
        prepare: what a task makes of a model (`Task.prepare_model`).

    Raises:
        NALoRAError: a model that cannot be loaded, or an adapter that is damaged or does not fit the base.
    """
    with near_names(target.name) if target.sort == "model" else contextlib.nullcontext():
        kind = kind or loading.model_kind(target.spec)
        spec, trained_spec = (replace(spec, kind=kind) for spec in (target.spec, target.trained_spec))
        saved = load_processor(target, kind) if target.trained else None
        model = prepare(loading.load(trained_spec, processor=saved))
    if target.trained is None:
        return Models(model, None)
    if target.adapter is None:
        return Models(model, prepare(loading.load(spec, processor=saved)) if with_base else None)
    adapted = with_adapter(model.model, target.adapter, keep_base=with_base)
    return Models(Loaded(adapted, model.processor, spec), model if with_base else None)


def load_processor(target: Target, kind: Kind | None = None) -> Any:
    """Load the tokenizer, or the processor of images: the one saved with the adapter, else the base model's."""
    spec = replace(target.trained_spec, kind=kind or loading.model_kind(target.spec))
    return loading.load_processor(spec, target.trained)


def results_of(name: str) -> Path:
    """Return the folder for results of what is no run: an adapter's or a model's own folder is the user's."""
    path = Path(name)
    return _RUNS / "evaluations" / folder_name(name.strip("/") if path.name else path.resolve().name)


def _with(spec: ModelSpec, model: str | None, device: str | None) -> ModelSpec:
    """Return the specification with another base model or device; a revision belongs to a name."""
    if model is not None and model != spec.name:
        spec = replace(spec, name=model, revision=None)
    return spec if device is None else replace(spec, device=device)


def _base_of(folder: Path, model: str | None, trust: bool) -> ModelSpec:
    """Return the base model of an adapter: `model`, or the one that its configuration names."""
    config = adapter_config(folder)
    named = config.get("base_model_name_or_path")
    if model is not None:
        return ModelSpec(model, trust_remote_code=trust)
    if isinstance(named, str) and named:
        if (found := _existing(named, folder)) is not None:
            return ModelSpec(str(found), trust_remote_code=trust)
        if named in loading.NAMED or not loading.is_path(named):
            return ModelSpec(named, revision=config.get("revision"), trust_remote_code=trust)
    # An adapter in the folder of a run: the run knows its base by a name that may be another machine's path, too.
    for parent in folder.absolute().parents[:2]:
        if (parent / "run.yaml").is_file():
            return read_run(RunFolder(parent), trust=trust).settings.model_spec()
    raise NALoRAError(
        str(folder),
        found=f"an adapter whose base model {named!r} is not there" if named else "an adapter that names no base model",
        expected="the base model that it was trained on",
        fix="give it with --model BASE: a hub id, a folder or a GGUF file",
    )


def _existing(named: str, folder: Path) -> Path | None:
    """Return the base model at a path that an adapter names: a script may have been started in a folder above it."""
    path = expanded(named)
    starts = [Path(), folder, *folder.absolute().parents]
    places = [path] if path.is_absolute() else [start / path for start in starts]
    return next((place for place in places if (place / "config.json").is_file()), None)


def _adapter_on_hub(name: str) -> Path | None:
    """Return the downloaded folder of an adapter on the hub; None for a model, or where the hub has no answer."""
    if name in loading.NAMED or loading.gguf_file(name) is not None or loading.is_path(name):
        return None
    from huggingface_hub import snapshot_download
    from transformers.utils import find_adapter_config_file

    try:
        with hub.offline_if_unreachable(name):
            if find_adapter_config_file(name) is None:
                return None
            return Path(snapshot_download(name, allow_patterns=_ADAPTER_PATTERNS))
    except (OSError, ValueError):  # loading it as a model reports why
        return None


def _no_target(name: str, path: Path, found: str) -> NALoRAError:
    inside = sorted(_targets_in(path), key=_order) if path.is_dir() else []
    near = [str(folder.relative_to(path.parent)) for folder in _targets_in(path.parent)] if not inside else []
    fix = f"name one inside it, such as {inside[-1]}" if inside else did_you_mean(path.name, near, "check the path")
    expected = "the folder of a run, of a PEFT adapter or of a model, a GGUF file, or a hub id"
    return NALoRAError(name, found=found, expected=expected, fix=fix)


def _targets_in(folder: Path) -> Iterator[Path]:
    """Yield the runs, adapters and models directly inside a folder."""
    for file in ("run.yaml", "adapter_config.json", "config.json"):
        yield from (path.parent for path in folder.glob(f"*/{file}"))


def _order(folder: Path) -> tuple[int, str]:
    return checkpoints.step_in(folder.name) or 0, folder.name


@contextlib.contextmanager
def near_names(name: str) -> Iterator[None]:
    """Add a name that the user may have meant to the error about a model that is neither here nor on the hub."""
    try:
        yield
    except NALoRAError as error:
        if error.where != f"model {name!r}" or loading.is_path(name) or name in loading.NAMED:
            raise
        if not (near := _near(name)):
            raise
        fix = f"{near} Otherwise {error.fix}"
        raise NALoRAError(error.where, found=error.found, expected=error.expected, fix=fix) from error


def _near(name: str) -> str:
    """Return a question for the nearest run, adapter, model or recipe; empty if none is similar."""
    folders = [str(folder) for folder in (*_targets_in(_RUNS), *_targets_in(Path()))]
    if same := next((folder for folder in folders if Path(folder).name == name), None):
        return f"did you mean {same}?"
    recipes = packaged.recipes()
    if not (near := did_you_mean(name, [*loading.NAMED, *folders, *recipes], "")):
        return ""
    recipe = near.removeprefix("did you mean ").removesuffix("?")
    return f"{near[:-1]}, a recipe that `nalora train {recipe}` trains?" if recipe in recipes else near
