"""Files that a command writes where the user says: one that nalora wrote before is replaced, any other is refused."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from nalora.errors import NALoRAError, wrong_kind

# How much of a file is read to find out who wrote it.
_HEAD = 8192
# Every kind that nalora writes says so in its first lines.
PAGE = b'<meta name="generator" content="nalora'
PAGE_OF_0_1 = b"<title>nalora report:"
TEXT = "made by nalora"


def refuse_foreign_files(paths: Iterable[Path], is_own: Callable[[bytes], bool], *, option: str, kind: str) -> None:
    """Refuse to write over what nalora did not write. All paths are checked before anything is written.

    Args:
        paths: files that will be written.
        is_own: whether the first kilobytes of a file are nalora's.
        option: how the user names another place, such as ``--output``.
        kind: what the files are, such as "a report".

    Raises:
        NALoRAError: one of the paths is somebody else's file, a symbolic link or a folder.
    """
    for path in paths:
        try:
            mode = path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        if stat.S_ISLNK(mode):
            found = "a symbolic link"
        elif not stat.S_ISREG(mode):
            found = "a folder" if stat.S_ISDIR(mode) else "no regular file"
        elif (head := _head(path)) and not is_own(head):
            found = f"a file that is not {kind} written by nalora"
        else:
            continue
        raise NALoRAError(
            str(path),
            found=found,
            expected=f"a new file, or {kind} that nalora wrote before",
            fix=f"move it away, or give another {option}",
        )


def refuse_linked_folder(folder: Path, *, option: str) -> None:
    """Refuse a symbolic link in place of a folder for several files: the user did not name where it leads.

    Raises:
        NALoRAError: it is one.
    """
    if folder.is_symlink():
        raise wrong_kind(folder, "folder", "a folder", f"give the folder that it points to, or another {option}")


def is_page(head: bytes) -> bool:
    """An HTML report."""
    return PAGE in head or PAGE_OF_0_1 in head


def is_figure(head: bytes) -> bool:
    """A PNG or SVG, whose metadata name the program."""
    return b"Software\x00nalora" in head or b"<dc:title>nalora</dc:title>" in head


def is_text(head: bytes) -> bool:
    """Markdown or LaTeX, which begins with a comment."""
    return TEXT.encode() in head.split(b"\n", 1)[0]


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD)
