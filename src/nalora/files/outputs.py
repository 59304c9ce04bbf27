"""Output paths of commands: a file that nalora wrote before is replaced, any other file is refused."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from nalora.errors import NALoRAError, wrong_kind

# The number of bytes read to find out who wrote a file.
_HEAD = 8192
# Every kind of file that nalora writes is marked in its first lines.
PAGE = b'<meta name="generator" content="nalora'
_PAGE_OF_0_1 = b"<title>nalora report:"
TEXT = "made by nalora"


def refuse_foreign_files(paths: Iterable[Path], is_own: Callable[[bytes], bool], *, option: str, kind: str) -> None:
    """Raise a NALoRAError for a path that is another program's file, a symbolic link or a folder.

    Args:
        paths: files that will be written; all are checked before anything is written.
        is_own: whether nalora wrote a file that starts with these bytes.
        option: the option that sets another path, such as ``--output``.
        kind: the kind of file, such as "a report".
    """
    for path in paths:
        try:
            mode = path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        if stat.S_ISLNK(mode):
            found = "a symbolic link"
        elif not stat.S_ISREG(mode):
            found = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        else:
            with path.open("rb") as file:
                head = file.read(_HEAD)
            if not head or is_own(head):
                continue
            found = f"a file that is not {kind} written by nalora"
        raise NALoRAError(
            str(path),
            found=found,
            expected=f"a new file, or {kind} that nalora wrote before",
            fix=f"move it away, or give another {option}",
        )


def refuse_linked_folder(folder: Path, *, option: str) -> None:
    """Raise a NALoRAError for a symbolic link in place of an output folder: its target was not named by the user."""
    if folder.is_symlink():
        raise wrong_kind(folder, "folder", "a folder", f"give the folder that it points to, or another {option}")


def is_page(head: bytes) -> bool:
    """Return whether a file that starts with these bytes is an HTML report of nalora."""
    return PAGE in head or _PAGE_OF_0_1 in head


def is_figure(head: bytes) -> bool:
    """Return whether the metadata of a PNG or SVG file name nalora."""
    return b"Software\x00nalora" in head or b"<dc:title>nalora</dc:title>" in head


def is_text(head: bytes) -> bool:
    """Return whether the comment in the first line of a Markdown or LaTeX file names nalora."""
    return TEXT.encode() in head.split(b"\n", 1)[0]
