"""The oldest torch that pyproject.toml allows, with the oldest versions of other packages, in its own environment.

PyPI has this torch as a CUDA build of several gigabytes, so that the environment is kept next to those of the trainers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from integrations.environments import CACHE, ROOT

pytestmark = pytest.mark.slow

(OLDEST,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FILES = ["control/test_controller.py", "control/test_checkpoint.py", "control/test_resume.py", "fused/test_linears.py",
         "integrations/test_trainer.py"]  # fmt: skip


@pytest.fixture(scope="module")
def python() -> Path:
    folder = CACHE / f"torch-{OLDEST}"
    CACHE.mkdir(parents=True, exist_ok=True)
    python = folder / "bin" / "python"
    with FileLock(f"{folder}.lock"):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            pins = [line for line in (ROOT / "constraints-oldest.txt").read_text().splitlines() if "==" in line]
            tools = ["pytest", "pytest-xdist", "hypothesis", "datasets", "numpy"]
            subprocess.run([python, "-m", "pip", "--quiet", "install", f"torch=={OLDEST}.*", *pins, *tools], check=True)
            (folder / "complete").touch()
    return python


def test_the_controller_and_trainer_work_with_the_oldest_torch(python):
    version = subprocess.run([python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True)
    assert version.stdout.startswith(OLDEST), version.stderr
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-m", "not slow and not gpu", *(ROOT / "tests" / file for file in FILES)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:]
