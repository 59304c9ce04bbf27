"""The launch configurations are what Accelerate reads, each opens with its command, and the page names them all."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

import nalora

ROOT = Path(__file__).parents[2]
FILES = sorted((Path(nalora.__file__).parent / "runs" / "recipes" / "accelerate").glob("*.yaml"))


def launched(file: Path) -> argparse.Namespace:
    """What `accelerate launch` makes of the file."""
    given = ["--config_file", str(file), "-m", "nalora.cli", "train", "run.yaml"]
    return _validate_launch_command(launch_command_parser().parse_args(given))[0]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_accelerate_reads_it(file):
    config = load_config_from_file(str(file))
    assert config.mixed_precision == "no"  # the run's dtype sets it
    assert launched(file).num_processes == config.num_processes
    lines = file.read_text().splitlines()
    assert lines[0].startswith(f"# accelerate launch --config_file recipes/accelerate/{file.name} ")
    assert file.name in (ROOT / "docs" / "distributed.md").read_text()


def test_what_each_configures(monkeypatch):
    asked = {file.stem: launched(file) for file in FILES}
    assert asked.keys() == {"several-gpus", "several-nodes", "fsdp2", "zero1", "zero2"}
    assert asked["several-gpus"].multi_gpu
    assert asked["several-nodes"].num_machines == 2
    assert [asked[f"zero{stage}"].zero_stage for stage in (1, 2)] == [1, 2]
    assert all(asked[f"zero{stage}"].use_deepspeed for stage in (1, 2))
    environment = prepare_multi_gpu_env(asked["fsdp2"])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert not plugin.cpu_ram_efficient_loading
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    assert environment["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
