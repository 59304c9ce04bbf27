"""Other people's trainers, each training a small model three ways, for the slow tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import environments
import tiny
import torch
import yaml
from attached_scripts import SETTINGS
from safetensors.torch import load_file

from nalora.control.checkpoint import FILE_NAME

HERE = Path(__file__).parent
WORDS = [f"{name}={value}" for name, value in SETTINGS.items()]
LAST, MIDDLE = "checkpoint-4", "checkpoint-2"
ADAPTER = "adapter_model.safetensors"
COMMON = {
    "max_steps": 4, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "output_dir": "out", "seed": 3,
}  # fmt: skip


class Project:
    """A trainer's environment, and the arguments of one training in a folder of its own."""

    def __init__(self, name: str, base: str, data: Path) -> None:
        self.name, self.base, self.data = name, base, data
        self.python = Path(sys.executable) if name == "trl" else environments.python_of(name)

    def run(self, folder: Path, how: str, resume: Path | None = None, **changes) -> str:
        """Train plainly ("plain"), with `nalora launch` or the plugin ("ours"), or by hand ("attached")."""
        folder.mkdir(exist_ok=True)
        arguments = getattr(self, f"_{self.name}")(folder, how, resume, changes)
        bin_folder = self.python.parent
        program = {"llamafactory": ["llamafactory-cli", "train"], "swift": ["swift", "sft"], "trl": ["trl", "sft"],
                   "axolotl": ["axolotl", "train"]}[self.name]  # fmt: skip
        command = [str(bin_folder / program[0]), program[1], *arguments]
        if how == "attached":
            command = [str(self.python), str(HERE / "attached_scripts.py"), self.name, *arguments]
        elif self.name == "axolotl":
            command += ["--launcher", "python"]
        elif how == "ours":
            command = [str(self.python), "-m", "nalora", "launch", *WORDS, "--", *command]
        done = subprocess.run(
            command, cwd=folder, env=self._environment(bin_folder), capture_output=True, text=True, timeout=900
        )
        self.code, printed = done.returncode, done.stdout + done.stderr
        assert self.code == 0 or changes, printed[-6000:]
        return printed

    def _environment(self, bin_folder: Path) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("NALORA_", "PYTHONPATH"))}
        # TRL is in this environment, where nalora may be a working tree.
        path = {"PYTHONPATH": str(environments.ROOT / "src")} if self.name == "trl" else {}
        quiet = {"HF_HUB_OFFLINE": "1", "CI": "1", "DO_NOT_TRACK": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
        return kept | path | quiet | {"OMP_NUM_THREADS": "1", "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}

    def _llamafactory(self, folder: Path, how: str, resume: Path | None, changes: dict) -> list[str]:
        (folder / "dataset_info.json").write_text(json.dumps({"sums": {"file_name": str(self.data)}}))
        settings = COMMON | {
            "model_name_or_path": self.base, "stage": "sft", "do_train": True, "finetuning_type": "lora",
            "lora_rank": 4, "lora_target": "all", "dataset_dir": str(folder), "dataset": "sums",
            "template": "default", "cutoff_len": 256, "per_device_train_batch_size": 2, "report_to": "none",
            "use_cpu": True, "resume_from_checkpoint": str(resume) if resume else None,
        } | changes  # fmt: skip
        return [self._file(folder, settings)]

    def _axolotl(self, folder: Path, how: str, resume: Path | None, changes: dict) -> list[str]:
        settings = COMMON | {
            "base_model": self.base, "adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True,
            "datasets": [{"path": str(self.data), "ds_type": "json", "type": "alpaca"}], "val_set_size": 0,
            "dataset_prepared_path": str(folder / "prepared"), "sequence_len": 256, "micro_batch_size": 2,
            "gradient_accumulation_steps": 1, "optimizer": "adamw_torch", "lr_scheduler": "cosine", "bf16": False,
            "attn_implementation": "sdpa", "special_tokens": {"pad_token": "<pad>"},
            "resume_from_checkpoint": str(resume) if resume else None,
        }  # fmt: skip
        if how == "ours":
            settings |= {"plugins": ["nalora"], "nalora": SETTINGS}
        else:  # its LoRA kernels need a GPU
            settings |= dict.fromkeys(["lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"], False)
        return [self._file(folder, settings | changes)]

    def _file(self, folder: Path, settings: dict) -> str:
        file = folder / "training.yaml"
        file.write_text(yaml.safe_dump({name: value for name, value in settings.items() if value is not None}))
        return str(file)

    def _swift(self, folder: Path, how: str, resume: Path | None, changes: dict) -> list[str]:
        settings = COMMON | {
            "model": self.base, "model_type": "llama", "template": "default", "tuner_type": "lora", "lora_rank": 4,
            "dataset": self.data, "target_modules": "all-linear", "torch_dtype": "float32", "max_length": 256,
            "split_dataset_ratio": 0, "add_version": "false", "report_to": "none", "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 1,
        }  # fmt: skip
        return self._flags(settings | ({"resume_from_checkpoint": resume} if resume else {}) | changes)

    def _trl(self, folder: Path, how: str, resume: Path | None, changes: dict) -> list[str]:
        (folder / "rows").mkdir(exist_ok=True)
        rows = [
            {"prompt": row["instruction"], "completion": row["output"]} for row in json.loads(self.data.read_text())
        ]
        (folder / "rows" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
        settings = COMMON | {
            "model_name_or_path": self.base, "dataset_name": folder / "rows", "use_peft": "true", "lora_r": 4,
            "lora_target_modules": "all-linear", "per_device_train_batch_size": 2, "report_to": "none",
            "use_cpu": "true", "bf16": "false",
        }  # fmt: skip
        return self._flags(settings | ({"resume_from_checkpoint": resume} if resume else {}) | changes)

    def _flags(self, settings: dict) -> list[str]:
        return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


class Trained(Project):
    """A project whose three trainings were made: plain, attached and ours."""

    def __init__(self, name: str, folder: Path) -> None:
        rows = [
            {"instruction": f"{a} plus {b} is", "input": "", "output": str(a + b)} for a in range(3) for b in range(4)
        ]
        (folder / "sums.json").write_text(json.dumps(rows))
        super().__init__(name, tiny.saved_llama(folder / "base", initializer_range=0.5), folder / "sums.json")
        self.folder = folder
        self.printed = {how: self.run(folder / how, how) for how in ("plain", "attached", "ours")}

    def check_adapter(self) -> None:
        """Ours is that of `attach_trainer` bit for bit and not plain LoRA's, and the plan was printed once."""
        printed = self.printed["ours"]
        assert printed.count("nalora: NA-LoRA is attached to ") == 1
        assert "NA-LoRA plan: 2 FFN block(s), control of the update" in printed
        ours = weights(self.folder / "ours")
        assert any(tensor.any() for key, tensor in ours.items() if "lora_B" in key)
        assert same(ours, weights(self.folder / "attached"))
        assert not same(ours, weights(self.folder / "plain"))

    def check_resumption(self) -> None:
        """The state is in the checkpoints, and a training that is resumed from one ends as the whole one."""
        folder = self.folder
        for checkpoint in (MIDDLE, LAST):
            assert same(*(weights(folder / how, checkpoint, FILE_NAME) for how in ("ours", "attached")))
            assert not (folder / "plain" / "out" / checkpoint / FILE_NAME).exists()
        self.run(folder / "resumed", "ours", resume=folder / "ours" / "out" / MIDDLE)
        assert same(weights(folder / "resumed"), weights(folder / "ours"))
        assert same(*(weights(folder / how, LAST, FILE_NAME) for how in ("resumed", "ours")))


def weights(folder: Path, checkpoint: str = LAST, file: str = ADAPTER) -> dict[str, torch.Tensor]:
    return load_file(folder / "out" / checkpoint / file)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
