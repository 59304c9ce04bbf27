"""nalora installs next to other trainers at their own pins, and changes none of their packages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
import wheels
from integrations.environments import PACKAGES, ROOT, python_of
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow

TRAINERS = ["llamafactory==0.9.5", "ms-swift==4.6.0", "axolotl==0.21.0", "trl==1.16.0"]
# What nalora and a trainer both need. The resolution leaves out the rest of a trainer's requirements, some of which are
# gigabytes and none of which nalora names.
SHARED = {
    "accelerate", "datasets", "huggingface-hub", "numpy", "packaging", "peft", "pydantic", "pyyaml", "rich",
    "safetensors", "scipy", "tokenizers", "torch", "transformers", "trl", "typer", "typing-extensions",
}  # fmt: skip


def pip(*arguments: object, python: Path | str = sys.executable, check: bool = True) -> str:
    command = [python, "-m", "pip", *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return wheels.build(tmp_path_factory.mktemp("wheel"))


def requirements_of(package: str, folder: Path) -> list[Requirement]:
    """What a package on PyPI requires without extras, on this machine."""
    options = ("--quiet", "--no-deps", "--only-binary", ":all:", "--ignore-requires-python")
    pip("download", *options, "--dest", folder, package)
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        (name,) = (each for each in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each))
        lines = HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    found = [Requirement(line) for line in lines]
    return [each for each in found if each.marker is None or each.marker.evaluate({"extra": ""})]


def would_install(wheel: Path, *arguments: object, python: Path | str = sys.executable) -> dict[str, str]:
    """Versions by name of what pip would install for nalora with its extras `cli` and `train`."""
    constraint = ("--constraint", ROOT / "constraints.txt")
    options = ("--quiet", "--dry-run", "--report", "-", *constraint)
    report = json.loads(pip("install", *options, f"{wheel}[cli,train]", *arguments, python=python))
    found = [each["metadata"] for each in report["install"]]
    return {canonicalize_name(each["name"]): each["version"] for each in found}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_one_environment_satisfies_nalora_and_a_trainer(wheel, tmp_path, trainer):
    shared = [each for each in requirements_of(trainer, tmp_path) if canonicalize_name(each.name) in SHARED]
    assert len(shared) >= 3
    chosen = would_install(wheel, "--ignore-installed", *map(str, shared))
    assert "nalora" in chosen
    for each in shared:
        assert each.specifier.contains(chosen[canonicalize_name(each.name)], prereleases=True), each


@pytest.mark.parametrize("name", PACKAGES)
def test_nothing_of_a_trainers_environment_is_replaced(wheel, name):
    python = python_of(name)
    installed = {canonicalize_name(each["name"]) for each in json.loads(pip("list", "--format=json", python=python))}
    replaced = set(would_install(wheel, python=python)) & (installed - {"nalora"})
    assert not replaced
    problems = pip("check", python=python, check=False).splitlines()
    assert not [line for line in problems if line.startswith("nalora ")]
