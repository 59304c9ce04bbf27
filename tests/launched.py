"""The same runs in one process and in two that were launched together. As a script it is what the processes run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from nalora import methods
from nalora.models import loading
from nalora.runs.folder import RunFolder, read_jsonl
from nalora.runs.settings import check
from nalora.training import run as running

# In float64 a difference is another method; in float32 it may be rounding that a method amplifies.
CASES: dict[str, dict] = {
    "full": {"method": "full"},
    "lora": {"method": "lora"},
    "packed": {"method": "na-lora", "packing": True, "max_length": 400, "train_size": 41, "apply_to": "update"},
    "eager": {"method": "lora", "attention": "eager", "micro_batch_size": 2},
    "like-length": {"method": "lora", "batches": "like-length"},
    "rslora": {"method": "rslora"},
    "dora": {"method": "dora"},
    "pissa": {"method": "pissa", "float64": False},
    "lora+": {"method": "lora+", "ratio": 4},
    "adalora": {"method": "adalora"},
    "lora-ga": {"method": "lora-ga", "gradient_batches": 2},
    "gora": {"method": "gora", "gradient_batches": 2, "min_rank": 2},
    "lora-pro": {"method": "lora-pro"},
    "lora-pro full": {"method": "lora-pro", "mode": "full"},
    "na-lora": {"method": "na-lora"},
    "na-lora update": {"method": "na-lora", "apply_to": "update"},
    **{name: {"method": name} for name in methods.names() if name.startswith("na-lora-")},
    "lora-scaled": {"method": "lora-scaled", "gate_scale": 0.5},
    "rows of four steps": {"method": "lora", "log_every": 4},
}
SGD = {"optimizer": "sgd", "learning_rate": 0.3}
# The same of models whose loss is not a decoder's. One process takes whole batches, two take four passes of 2: Adam
# divides a factor of the gradient out again, SGD shows it.
_ALL = [name for name in CASES if name not in ("packed", "eager", "like-length", "rows of four steps")]
_QUICK = {
    "t5": ["lora sgd", "adalora sgd", "na-lora sgd", "gora"],
    "bart": ["lora sgd"],
    "clip": ["na-lora", "adalora sgd"],
}
OTHERS: dict[str, dict] = {
    f"{kind} {name}{ending}": {**CASES[name], **more, "kind": kind}
    for kind in _QUICK
    for name in _ALL
    for ending, more in (("", {}), (" sgd", SGD))
    # LoRA-Pro and LoRA+ group the parameters for Adam; BART differs from T5 in nothing but its blocks.
    if (name in ("full", "lora", "adalora", "na-lora") or not ending) and (kind != "bart" or name == "lora")
}
QUICK = [f"{kind} {name}" for kind, names in _QUICK.items() for name in names]
# They meet other processes as NA-LoRA does, or as LoRA: what they change is computed from what is the same everywhere.
SLOW = ["rslora", "lora+", "rows of four steps", *(name for name in CASES if name.startswith("na-lora-"))]
RESUMED = ["pissa", "adalora", "lora-pro full", "na-lora update", "like-length"]
_ELSEWHERE = ("eager", "like-length", "lora-scaled")
SLOW_SHARDED = ["rslora", "lora+", "packed", "rows of four steps", "lora-pro", "dora"]
SHARDED = [name for name, case in CASES.items() if not case["method"].startswith("na-lora") and name not in _ELSEWHERE]


def settings(base: str, kind: str = "") -> dict:
    """10 steps of 8 rows, over passes of 17: in each third step the second process has nothing but blanks.

    Rank 3 does not come out even on two processes either. Models of other kinds are in folders beside the base's.
    """
    if kind == "clip":
        return {
            "model": f"{base}-clip", "task": "digits", "train_limit": 17, "device": "cpu", "rank": 3,
            "regimes": "derived", "steps": 10, "batch_size": 8, "learning_rate": 1e-3, "log_every": 1,
        }  # fmt: skip
    return {
        "model": f"{base}-{kind}" if kind else base,
        "task": "gym/chain_sum", "train_size": 17, "test_size": 4, "device": "cpu", "rank": 3,
        "settings": {"min_terms": 2, "max_terms": 4, "min_digits": 2, "max_digits": 5},
        "steps": 10, "batch_size": 8, "learning_rate": 1e-3, "log_every": 1,
    }  # fmt: skip


def start(folder: Path, base: str, *, processes: int, what: str) -> subprocess.Popen:
    """Launch processes that do `what` (see the end of this file) in the folder."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "NALORA_CACHE": str(folder / "cache"),
    }  # fmt: skip
    launch = [sys.executable, "-W", "ignore"]
    if processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    folder.mkdir(parents=True, exist_ok=True)
    command = [*launch, str(Path(__file__).resolve()), str(folder), base, what]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(*started: subprocess.Popen, seconds: float = 480) -> None:
    """Wait for them; none is left behind."""
    try:
        for process in started:
            output, _ = process.communicate(timeout=seconds)
            assert process.returncode == 0, output[-4000:]
    finally:
        for process in started:
            process.kill()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = RunFolder(folder)
    file = found.model / "model.safetensors" if found.model.is_dir() else found.adapter / "adapter_model.safetensors"
    return load_file(file)


def losses(folder: Path) -> list[float]:
    return logged(folder, "loss")


def logged(folder: Path, name: str) -> list[float]:
    return [row[name] for row in read_jsonl(RunFolder(folder).metrics)]


def train_loss(folder: Path) -> float:
    return json.loads(RunFolder(folder).result.read_text())["train_loss"]


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest over all tensors, relative to each one's norm.

    A key's bias adds the same to every score of a query, so its gradient is zero but for rounding: no norm to go by.
    """
    assert one.keys() == other.keys()
    smallest = {k: 1e-2 if k.endswith("k_proj.bias") else 1e-30 for k in one}
    return max(((one[k] - other[k]).norm() / one[k].norm().clamp_min(smallest[k])).item() for k in one)


def train(folder: Path, base: str, name: str, *, sharded: bool = False, resume: bool = False) -> None:
    """One case, with what this process ends with beside the run's folder."""
    from unittest.mock import patch

    case = dict((CASES | OTHERS)[name])
    float64, kind = case.pop("float64", True), case.pop("kind", "")
    if kind and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        case |= {"micro_batch_size": 2}
    if sharded:
        case |= {"snapshot_every": 5}
    if name in RESUMED:
        case |= {"save_every": 4}
    load, make, made = loading.load, running.make_trainer, []

    def loaded(spec, *processor):
        found = load(spec, *processor)
        if float64:
            found.model.double()
        return found

    def trainer(settings, model, *rest):
        made.append(make(settings, model, *rest))
        if sharded:
            shard(made[0])
        return made[0]

    with patch.object(loading, "load", loaded), patch.object(running, "make_trainer", trainer):
        running.train(
            check({**_known(settings(base, kind), case), **case, "output": str(folder / name)}), resume=resume
        )
    rank = os.environ.get("RANK", "0")
    if sharded:
        assert all(isinstance(p, torch.distributed.tensor.DTensor) for p in made[0].model.parameters())
        return
    learned = {n: p.detach() for n, p in made[0].model.named_parameters() if p.requires_grad}
    controller = getattr(made[0], "nalora_controller", None)
    state = controller.state_dict() if controller else None
    torch.save({"learned": learned, "controller": state}, folder / f"{name}.{rank}.pt")


def _known(given: dict, case: dict) -> dict:
    """Without the setting that only NA-LoRA has."""
    return given if case["method"].startswith("na-lora") else {k: v for k, v in given.items() if k != "regimes"}


def shard(trainer) -> None:
    """As with recipes/accelerate/fsdp2.yaml, which Accelerate drops on a CPU; put back, its own code does the rest."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    trainer.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )
    trainer.accelerator.state.distributed_type = DistributedType.FSDP
    trainer.is_fsdp_enabled = True


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, model_folder, asked = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    for each in asked.get("train", ()):
        train(place, model_folder, each)
    for each in asked.get("sharded", ()):
        train(place / "sharded", model_folder, each, sharded=True)
    for each in asked.get("resume", ()):
        train(place, model_folder, each, resume=True)
    for each in asked.get("resume sharded", ()):
        train(place / "sharded", model_folder, each, sharded=True, resume=True)
    # Everything is written. A thread of gloo may abort a process that ends while it still runs.
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)
