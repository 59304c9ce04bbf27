"""llama-cpp-python in an environment of its own, below NALORA_TEST_ENVIRONMENTS or the temporary folder.

It is compiled once (2.5 minutes on two cores) and found there afterwards.
"""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
import tempfile
import venv
from pathlib import Path

import numpy as np

VERSION = "0.3.36"
_PLACE = Path(os.environ.get("NALORA_TEST_ENVIRONMENTS", Path(tempfile.gettempdir()) / "nalora-environments"))
FOLDER = _PLACE / f"llama-cpp-python-{VERSION}"


def interpreter() -> Path:
    """The Python of the environment."""
    python = FOLDER / "bin" / "python"
    probe = [python, "-c", f"import llama_cpp; assert llama_cpp.__version__ == {VERSION!r}"]
    if not python.exists() or subprocess.run(probe, capture_output=True).returncode:
        venv.create(FOLDER, with_pip=True)
        options = {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF -DGGML_OPENMP=OFF", "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
        package = f"llama-cpp-python=={VERSION}"
        subprocess.run([python, "-m", "pip", "install", "-q", package], check=True, env=os.environ | options)
    return python


def vocabularies() -> Path:
    """The folder of published vocabularies, with texts, that llama.cpp's source has for its own tests."""
    folder = FOLDER / "vocabularies"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as place:
            source = ["--no-deps", "--no-binary", ":all:", f"llama-cpp-python=={VERSION}"]
            subprocess.run([interpreter(), "-m", "pip", "download", "-q", *source, "-d", place], check=True)
            (archive,) = Path(place).glob("*.tar.gz")
            with tarfile.open(archive) as packed:
                files = [file for file in packed.getmembers() if "/models/ggml-vocab-" in file.name]
                for file in files:
                    file.name = Path(file.name).name
                packed.extractall(Path(place) / "vocabularies", files, filter="data")
            (Path(place) / "vocabularies").rename(folder)
    return folder


def asked(python: Path, folder: Path, requests: list[dict]) -> dict[str, np.ndarray]:
    """What llama.cpp answers to requests, see llama_cpp_answers.py."""
    (folder / "request.json").write_text(json.dumps(requests))
    script = Path(__file__).with_name("llama_cpp_answers.py")
    done = subprocess.run(
        [python, script, folder / "request.json", folder / "answers.npz"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(np.load(folder / "answers.npz"))
