"""The shared libraries that an interpreter and its extension modules need, as the dynamic loader finds them.

Runs outside the sandbox, in a bare interpreter: loads every extension module named or found below a folder, without
initialising it, and prints a JSON list of what the loader then holds. That is exact where a list of folders
such as /usr/lib would also show other people's files.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

# The C library loads it when a thread ends, and no module names it.
_LOADED_LATER = ("libgcc_s.so.1",)
# A dozen libraries of a window system, which no program inside can use.
_NEVER_USED = "_tkinter."


def main() -> None:
    """One argument for each file or folder."""
    for name in (*_LOADED_LATER, *(file for path in sys.argv[1:] for file in _extension_modules(path))):
        with contextlib.suppress(OSError):  # a module whose library is not installed cannot be imported inside either
            ctypes.CDLL(name)
    print(json.dumps(loaded()))


def _extension_modules(path: str) -> Iterator[str]:
    if os.path.isfile(path):
        yield path
    for folder, _, names in os.walk(path):
        yield from (os.path.join(folder, name) for name in names if _is_module(name))


def _is_module(name: str) -> bool:
    return name.endswith(".so") and not name.startswith(_NEVER_USED)


def loaded() -> list[str]:
    """The paths by which the loader found this process's shared libraries, itself among them."""
    found: list[str] = []

    class Object(ctypes.Structure):
        _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]

    def note(info: Any, _size: int, _data: Any) -> int:
        found.append(os.fsdecode(info.contents.name or b""))
        return 0

    libc: Any = ctypes.CDLL(None)
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Object), ctypes.c_size_t, ctypes.c_void_p)
    libc.dl_iterate_phdr(callback(note), None)
    return [path for path in found if os.path.isabs(path) and os.path.exists(path)]


if __name__ == "__main__":
    main()
