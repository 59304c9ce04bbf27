"""The commit that a run's environment names."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nalora

SOURCE = Path(nalora.__file__).parent
PRINT = "from nalora.runs.provenance import commit; print(commit())"


def git(folder, *arguments):
    identity = ("-c", "user.name=n", "-c", "user.email=n@localhost")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit_of(source, **variables):
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(source), **variables}
    done = subprocess.run([sys.executable, "-c", PRINT], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def copied(tmp_path):
    """A copy of the modules that this needs."""
    package = tmp_path / "repository" / "src" / "nalora"
    (package / "runs").mkdir(parents=True)
    for name in ("__init__.py", "runs/__init__.py"):
        (package / name).write_text('"""A copy."""\n')
    shutil.copy(SOURCE / "runs" / "provenance.py", package / "runs")
    return package


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_a_checkout_names_its_commit_and_whether_files_were_changed(copied):
    repository = copied.parents[1]
    git(repository, "init", "-q")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "first")
    head = git(repository, "rev-parse", "HEAD")
    assert commit_of(copied.parent) == head
    (repository / "notes.txt").write_text("not the source")
    assert commit_of(copied.parent) == head
    (copied / "__init__.py").write_text('"""Changed."""\n')
    assert commit_of(copied.parent) == f"{head}+changes"


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_a_wheel_inside_another_repository_names_no_commit(copied):
    repository = copied.parents[1]
    git(repository, "init", "-q")
    git(repository, "commit", "-qm", "somebody else's", "--allow-empty")
    assert commit_of(copied.parent) == "None"


def test_a_copy_without_git_takes_the_commit_from_the_environment(copied):
    assert commit_of(copied.parent, NALORA_COMMIT="abc123") == "abc123"
    assert commit_of(copied.parent) == "None"
