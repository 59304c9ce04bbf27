"""List the shared libraries that an interpreter and its extension modules need, as the dynamic loader finds them.

Runs outside the sandbox, in a bare interpreter: loads every extension module in the files and folders of its arguments
without initialising it, and prints the libraries that are then loaded as a JSON list. This list is exact; a list
of folders such as /usr/lib would make other files visible too.
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
_LOADED_LATER = "libgcc_s.so.1"
# Needs a dozen libraries of a window system, which no sandboxed program can use.
_NEVER_USED = "_tkinter."


def main() -> None:
    """Load the extension modules and print the loaded libraries."""
    for name in (_LOADED_LATER, *(file for path in sys.argv[1:] for file in _extension_modules(path))):
        with contextlib.suppress(OSError):  # a module without its library cannot be imported in the sandbox either
            ctypes.CDLL(name)
    print(json.dumps(_loaded()))


def _extension_modules(path: str) -> Iterator[str]:
    if os.path.isfile(path):
        yield path
    for folder, _, names in os.walk(path):
        yield from (f"{folder}/{name}" for name in names if name.endswith(".so") and not name.startswith(_NEVER_USED))


def _loaded() -> list[str]:
    """Return the paths by which the loader found the shared libraries of this process, its own included."""
    paths: list[str] = []

    class Object(ctypes.Structure):
        _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]

    def note(info: Any, _size: int, _data: Any) -> int:
        paths.append(os.fsdecode(info.contents.name or b""))
        return 0

    libc: Any = ctypes.CDLL(None)
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Object), ctypes.c_size_t, ctypes.c_void_p)
    libc.dl_iterate_phdr(callback(note), None)
    return [path for path in paths if os.path.isabs(path) and os.path.exists(path)]


if __name__ == "__main__":
    main()
