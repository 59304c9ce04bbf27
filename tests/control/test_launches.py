"""A launch that starts fewer processes than requested is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nalora.distributed import processes
from nalora.errors import NALoRAError

MEET = "from nalora.distributed import processes; processes.init_process_group('cpu'); print('met', processes.count())"


def launched(tmp_path, *options):
    """Run `accelerate launch` without the configuration of the machine's user."""
    (tmp_path / "meet.py").write_text(MEET)
    left_out = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in left_out}
    return subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--cpu", *options, str(tmp_path / "meet.py")],
        env=environment | {"HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_accelerate_s_single_process_in_place_of_two_is_refused(tmp_path):
    done = launched(tmp_path, "--num_processes", "2")
    assert "met" not in done.stdout
    assert "found one process in place of several" in done.stderr
    assert "torchrun --nproc_per_node N -m nalora.cli train RUN.yaml" in done.stderr


def test_one_process_by_accelerate_is_fine(tmp_path):
    done = launched(tmp_path, "--num_processes", "1")
    assert "met 1" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({}, False),
        ({"MASTER_ADDR": "127.0.0.1"}, False),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, False),
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}, True),
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}, False),
    ],
)
def test_by_what_it_is_noticed(monkeypatch, variables, refused):
    for name in ("ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if refused:
        with pytest.raises(NALoRAError, match="torchrun"):
            processes.check_launch()
    else:
        processes.check_launch()
