"""Write the files of this version of nalora that later versions must still read (tests/test_released.py).

    PYTHONPATH=src:tests OMP_NUM_THREADS=1 python tests/released/make.py

The folder is named after the version (v0.1). `run_files/` and `every_study_setting.yaml` in it are written by hand;
this script checks that the run files give every setting a value other than its default, and makes the rest.

run.tar.gz     base/, sst2/, run.yaml and run/: a finished NA-LoRA run with checkpoints, snapshots, an evaluation of
               the run and of its base model, and a diagnosis
store.tar.gz   base/, small.yaml and store/: a finished study of two arms and two seeds
state/         what `controller.save` wrote, and recipe.json: the model, adapter and settings that it belongs to
expected.json  the commit and the versions it was made with, and the keys of all runs that the files describe

All paths in them are relative. Files that exist are never written again: they are those of a release.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zlib
from importlib import metadata
from pathlib import Path
from typing import Any

import peft
import tiny
import torch
import transformers
import yaml

import nalora

FOLDER = Path(__file__).parent / f"v{'.'.join(nalora.__version__.split('.')[:2])}"
SOURCE = Path(nalora.__file__).resolve().parents[1]
SIZES = {"layers": 2, "hidden": 16}
RUN: dict[str, Any] = {
    "model": "base", "task": "sst2", "data_dir": "sst2", "prompt": "decoder", "output": "run",
    "method": "na-lora", "apply_to": "update", "keep_ratio": 0.5, "rank": 2, "alpha": 4, "learning_rate": 5e-3,
    "steps": 6, "batch_size": 8, "micro_batch_size": 4, "max_length": 128, "dtype": "float32", "device": "cpu",
    "log_every": 1, "save_every": 4, "snapshot_every": 3, "diagnose_every": 3, "probe_size": 4,
}  # fmt: skip
STUDY: dict[str, Any] = {
    "settings": {
        "model": "base", "task": "gym/chain_sum", "train_size": 40, "test_size": 6, "max_new_tokens": 3,
        "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "rank": 2, "steps": 3, "batch_size": 4, "device": "cpu",
    },
    "arms": {"lora": {"method": "lora"}, "na-lora": {"method": "na-lora", "apply_to": "update"}},
    "learning_rates": [1e-3, 1e-2], "validation_size": 8, "seeds": [0, 1],
}  # fmt: skip
# Besides llama's own: gates in all three regimes, and no setting of NA-LoRA at its default.
RECIPE: dict[str, Any] = {
    "model": {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": 0,
    },
    "lora": {"r": 2, "lora_alpha": 4, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "nalora": {
        "keep_ratio": 0.5, "sharpness": 10.0, "mask_ema": 0.8, "positive_penalty": 0.5, "scale_ema": 0.7,
        "gate": [0.5, 0.7, 1.6], "up": [0.4, 0.7, 1.5], "down": [0.3, 0.7, 1.4], "mask": False, "scaling": False,
        "importance": "utility", "mask_channels": "shuffled", "mask_seed": 5, "preserve_mean": True,
        "regimes": "derived", "thresholds": [-1.0, 1.25], "apply_to": "update", "start": "first",
    },
}  # fmt: skip


def main() -> None:
    made = [FOLDER / name for name in ("run.tar.gz", "store.tar.gz", "state", "expected.json")]
    if there := [path for path in made if path.exists()]:
        sys.exit(f"{there[0]} exists: the files of a release are not made again")
    if _git("status", "--porcelain", str(SOURCE)):
        sys.exit(f"{SOURCE} has changes: commit them first, so that the files say which code made them")
    refuse_missing_settings()
    keys = keys_of_files()
    with tempfile.TemporaryDirectory() as temporary:
        run = made_run(Path(temporary) / "run")
        store, answer = made_store(Path(temporary) / "store")
        pack(run, made[0])
        pack(store, made[1])
    save_state(made[2])
    packages = ("nalora", "torch", "transformers", "peft", "accelerate", "reasoning-gym")
    versions = {name: metadata.version(name) for name in packages}
    expected = {"commit": _git("rev-parse", "HEAD"), "versions": versions, "keys": keys, "answer": answer}
    made[3].write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def made_run(place: Path) -> Path:
    """A folder with a model, its data, a run's file and the run, finished, evaluated and diagnosed."""
    tiny.saved_llama(_new(place) / "base", **SIZES, initializer_range=0.3)
    words = ("good", "bad", "fine", "dull", "nice", "sad", "keen", "lame", "bright", "bleak", "warm", "cold")
    for split, chosen in (("train", words), ("dev", words[:6])):
        rows = [f"a {word} film of {split}\t{1 - index % 2}" for index, word in enumerate(chosen)]
        _new(place / "sst2", exist_ok=True).joinpath(f"{split}.tsv").write_text("\n".join(["sentence\tlabel", *rows]))
    (place / "run.yaml").write_text(yaml.safe_dump(RUN, sort_keys=False))
    command(place, "train", "run.yaml")
    make_paths_relative(place)
    command(place, "evaluate", "run")
    command(place, "diagnose", "run", "--probe-size", "6")
    return place


def made_store(place: Path) -> tuple[Path, str]:
    """A folder with a model, a study's file and its finished store; and the answer that the command printed."""
    tiny.saved_llama(_new(place) / "base", **SIZES)
    (place / "small.yaml").write_text(yaml.safe_dump(STUDY, sort_keys=False))
    command(place, "study", "small.yaml", "--store", "store", "--workers", "1")
    for log in (place / "store").glob("*.log"):  # tracebacks and warnings in them name folders of this machine
        log.unlink()
    make_paths_relative(place)
    return place, command(place, "study", "small.yaml", "--store", "store")


def make_paths_relative(place: Path) -> None:
    """Remove the path of this folder from what PEFT and a study wrote, and correct the checksums of checkpoints."""
    for file in [*place.rglob("adapter_config.json"), *place.rglob("README.md"), *place.rglob("run.yaml")]:
        content = file.read_bytes().replace(f"{place}/".encode(), b"")
        file.write_bytes(content)
        if (complete := file.with_name("complete")).is_file():
            record = json.loads(complete.read_text())
            record["files"][file.name], record["crc32"][file.name] = len(content), zlib.crc32(content)
            complete.write_text(json.dumps(record) + "\n")


def save_state(folder: Path) -> None:
    """A controller's state after three steps, and what it takes to build that controller again."""
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**RECIPE["model"]))
    model = peft.get_peft_model(base, peft.LoraConfig(**RECIPE["lora"])).train()
    optimizer = torch.optim.AdamW(tiny.trainable(model), lr=1e-2)
    scales = {name: nalora.ProjectionScale(*RECIPE["nalora"][name]) for name in ("gate", "up", "down")}
    given = RECIPE["nalora"] | scales | {"thresholds": tuple(RECIPE["nalora"]["thresholds"])}
    defaults = {field.name: field.default for field in dataclasses.fields(nalora.NALoRAConfig)}
    _refuse([name for name, default in defaults.items() if given.get(name, default) == default], "recipe.json")
    controller = nalora.attach(model, optimizer, nalora.NALoRAConfig(**given))
    for step in range(3):
        ids = tiny.tokens(seed=step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    controller.save(folder)
    (folder / "recipe.json").write_text(json.dumps(RECIPE, indent=1) + "\n")


def keys_of_files() -> dict[str, list[str]]:
    """The keys that the command line lists of the runs that the files describe."""
    with tempfile.TemporaryDirectory() as temporary:
        study = Path(temporary) / "study.yaml"
        study.write_text(yaml.safe_dump(study_of_run_files(FOLDER / "run_files"), sort_keys=False))
        files = {"run_files": study, "every_study_setting.yaml": FOLDER / "every_study_setting.yaml"}
        listing = ("--store", str(Path(temporary) / "none"), "--dry-run")
        return {
            name: re.findall(r"^[0-9a-f]{16}\b", command(FOLDER, "study", str(file.resolve()), *listing), re.MULTILINE)
            for name, file in files.items()
        }


def study_of_run_files(folder: Path) -> dict[str, Any]:
    """A study with an arm for each run file: listing its runs checks every setting and trains nothing."""
    arms = {}
    for file in sorted(folder.glob("*.yaml")):
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
        own = {"learning_rates": [settings.pop("learning_rate", 1e-4)], "seeds": [settings.pop("seed", 0)]}
        of_the_study = ("output", "validation_size")
        arms[file.stem] = {name: value for name, value in settings.items() if name not in of_the_study} | own
    return {"settings": {"model": "base"}, "arms": arms, "validation_size": 4}


def refuse_missing_settings() -> None:
    """Refuse run files that leave a setting out, or at its default, in every file that could give it."""
    from nalora.training.settings import RunSettings

    from nalora import methods, tasks

    files = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in (FOLDER / "run_files").glob("*.yaml")]
    own = {field.name: field.default for field in dataclasses.fields(RunSettings)}
    _refuse([name for name, default in own.items() if not _is_given(name, default, files)], "run_files")
    for name in methods.names():
        method = methods.get(name)
        if name.startswith("na-lora-"):  # the controls have na-lora's settings
            continue
        of_it = [each for each in files if name in (each["method"], each.get("on"))]
        options = {field.name: field.default for field in dataclasses.fields(method) if field.name != "host"}
        _refuse([option for option, default in options.items() if not _is_given(option, default, of_it)], name)
    for name in ("gsm8k", "humaneval", "mbpp", "mt-bench", "sst2", "gym/chain_sum"):
        of_it = [each for each in files if each["task"] == name]
        _refuse([option for option in tasks.option_types(name) if not _is_given(option, None, of_it)], name)


def _is_given(name: str, default: Any, files: list[dict[str, Any]]) -> bool:
    return any(name in each and each[name] != default for each in files)


def _refuse(missing: list[str], where: str) -> None:
    if missing:
        sys.exit(f"{where}: no value other than the default of {', '.join(missing)}")


def command(folder: Path, *arguments: str) -> str:
    """What the command line printed, run in that folder."""
    variables = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    line = [sys.executable, "-m", "nalora.cli", *arguments]
    done = subprocess.run(line, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(line)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def pack(folder: Path, archive: Path) -> None:
    """The folder's content as an archive that names neither the user nor the time."""

    def nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return entry

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=9) as written:
        for entry in sorted(folder.iterdir()):
            written.add(entry, entry.name, filter=nobody)
    for file in (
        entry for entry in folder.rglob("*") if entry.is_file() and str(folder).encode() in entry.read_bytes()
    ):
        sys.exit(f"{file}: found the absolute path of this folder, expected relative paths")
    archive.write_bytes(buffer.getvalue())


def _new(folder: Path, *, exist_ok: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=exist_ok)
    return folder


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=SOURCE, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
