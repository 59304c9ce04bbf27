"""Which source a run was made with: a package's version says too little while the code changes."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

# For copies of the source without its git folder, such as an image or a cluster's working folder.
COMMIT_VARIABLE = "NALORA_COMMIT"


@functools.cache
def commit() -> str | None:
    """The commit of nalora's source, ``+changes`` after it where files differ from it; None for an installed wheel."""
    if named := os.environ.get(COMMIT_VARIABLE):
        return named
    source = Path(__file__).resolve().parents[1]
    top = _git(source, "rev-parse", "--show-toplevel")
    # A wheel installed below somebody else's repository is not that repository's source.
    if top is None or _git(source, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    changed = _git(source, "status", "--porcelain", "--untracked-files=no", "--", str(source))
    return f"{_git(source, 'rev-parse', 'HEAD')}{'+changes' if changed else ''}"


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, None where there is no git or no repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
