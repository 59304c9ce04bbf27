"""`nalora launch`: NA-LoRA in another program's training."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from nalora.errors import NALoRAError
from nalora.files.yaml_files import read_yaml

_VARIABLE = "NALORA_"


def launch(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings of NALoRAConfig.")] = None,
) -> None:
    """Run a training command and attach NA-LoRA to the first Trainer that trains a PEFT LoRA model.

    nalora launch -- llamafactory-cli train lora.yaml

    nalora launch --config nalora.yaml -- trl sft --model_name_or_path … --use_peft

    Settings: those of NALoRAConfig in --config, or environment variables such as NALORA_APPLY_TO=update.
    """
    command = context.args
    if not command:
        raise NALoRAError(
            "nalora launch", found="no command", expected="a training command after --",
            fix="nalora launch -- python train.py",
        )  # fmt: skip
    settings = chosen(read_yaml(config) if config else {}, os.environ)
    from nalora.integrations.launched import environment

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "attached"
        try:
            status = subprocess.run(
                command, env={**os.environ, **environment(settings, report)}, check=False
            ).returncode
        except FileNotFoundError as error:
            raise NALoRAError(
                "nalora launch", found=f"no program {command[0]!r}", expected="a command that can be run",
                fix="check the name and the active environment",
            ) from error  # fmt: skip
        if not report.exists():
            print(
                "nalora: nothing was attached: no transformers.Trainer of this command trained a PEFT LoRA model",
                file=sys.stderr,
            )
            status = status or 3
    raise typer.Exit(status)
