"""GGUF files as ordinary folders of dense weights: made once, kept in the cache by the file's content.

The weights are float32, which holds every value of the file exactly. Without this every command would read the file
anew: 36 s for SmolLM2-135M on two cores, and no tool but nalora could load an adapter, since `adapter_config.json`
names the folder that the base model was read from.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from nalora.errors import NALoRAError, missing_package
from nalora.files import atomic
from nalora.files.cache import cache_folder
from nalora.models.file_digest import digest_of_file
from nalora.models.gguf_header import Header, read_header
from nalora.models.gguf_tokenizer import follow_header, refuse_unless_followed

# What a finished copy consists of. No suffix: it is no part of the model for whoever compares models by content.
_MANIFEST = "NALORA-MANIFEST"
# Encoder-decoders among the architectures that transformers reads; all others are decoders.
_SEQ2SEQ = frozenset({"t5", "umt5"})
_ROOM_FOR_THE_REST = 200_000_000

Manifest = dict[str, dict[str, Any]]


def dense_folder(gguf: Path) -> Path:
    """The folder with the dense model and tokenizer of a GGUF file, made on the first call for this content.

    A folder is there whole or not at all. Several processes make it once between them, where the file system has
    locks; elsewhere each makes it, and the first to finish wins. What does not match its manifest is made again.

    Raises:
        NALoRAError: no such file, a truncated one, an architecture that transformers cannot read from GGUF, a disk
            without room, or no package `gguf`.
    """
    _require_gguf(gguf)
    header = read_header(gguf)
    folder = place_of(gguf)
    if _is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder):
            if not _is_whole(folder):  # another process may have made it meanwhile
                _make(gguf, header, folder)
    except (OSError, SafetensorError) as error:  # reading has errors of its own: this is the cache
        reason = getattr(error, "strerror", None) or str(error)
        raise NALoRAError(
            str(gguf),
            found=f"no way to write its dense weights into {folder.parent} ({reason})",
            expected="a cache that can be written, with room for 4 bytes a parameter",
            fix="set NALORA_CACHE to a folder on another disk",
        ) from error
    return folder


def place_of(gguf: Path) -> Path:
    """Where the dense copy of a file is kept: by its content, so that a copy under another name finds it too."""
    cached, content = cache_folder() / "gguf", f"{gguf.stat().st_size}-{digest_of_file(gguf)[:16]}"
    known = sorted(folder for folder in cached.glob(f"*-{content}") if folder.is_dir() and folder.name[0] != ".")
    return known[0] if known else cached / f"{gguf.stem[:80]}-{content}"


def gguf_config(gguf: Path) -> Any:
    """The model's configuration, from the dense copy where there is one, else from the file's header.

    Raises:
        NALoRAError: no such file, a truncated one, one that transformers cannot read, or no package `gguf`.
    """
    from transformers import AutoConfig

    _require_gguf(gguf)
    header = read_header(gguf)
    folder = place_of(gguf)
    if _is_whole(folder):
        return AutoConfig.from_pretrained(folder)
    try:
        return AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    except Exception as error:  # a file may hold anything, and readers share no type of error
        raise _unreadable(gguf, header, error) from error


def _require_gguf(gguf: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise missing_package(gguf.name, "gguf", "to read the file's weights")


def _is_whole(folder: Path) -> bool:
    """Whether the folder holds what was written: by size and time of each file, by content where the time differs."""
    manifest = _manifest_of(folder)
    return manifest is not None and all(_is_as_written(folder / name, entry) for name, entry in manifest.items())


def _manifest_of(folder: Path) -> Manifest | None:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and "config.json" in manifest else None


def _is_as_written(file: Path, entry: dict[str, Any]) -> bool:
    try:
        found = file.stat()
        # A cache that was copied has other times. Reading half a gigabyte at every command would take a second.
        same_time = found.st_mtime_ns == entry["time"]
        return bool(found.st_size == entry["size"] and (same_time or digest_of_file(file) == entry["sha256"]))
    except (OSError, KeyError, TypeError):
        return False


def _make(gguf: Path, header: Header, folder: Path) -> None:
    if folder.exists() and _manifest_of(folder) is None:
        raise NALoRAError(
            str(folder),
            found="a folder without its list of files, which nalora did not leave like this",
            expected="nothing, or a copy that nalora finished",
            fix="move that folder elsewhere",
        )
    needed = 4 * header.weights + _ROOM_FOR_THE_REST
    if (free := shutil.disk_usage(folder.parent).free) < needed:
        raise NALoRAError(
            str(gguf),
            found=f"{free / 1e9:.1f} GB free in {folder.parent}",
            expected=f"{needed / 1e9:.1f} GB for its dense weights",
            fix="make room, or set NALORA_CACHE to a folder on another disk",
        )
    print(f"nalora: dequantising {gguf.name} once into {folder} ({needed / 1e9:.1f} GB) …", file=sys.stderr, flush=True)
    making = Path(tempfile.mkdtemp(prefix=_prefix(folder), dir=folder.parent))
    try:
        _dequantise(gguf, header, making)
        names = sorted(file.name for file in making.iterdir())
        manifest = {name: _entry(making / name) for name in names}
        atomic.write(making / _MANIFEST, atomic.json_text(manifest, indent=1))
        making.chmod(0o755)  # mkdtemp lets only its owner in, and caches are shared
        _move(making, folder, [*names, _MANIFEST])
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _entry(file: Path) -> dict[str, Any]:
    found = file.stat()
    return {"size": found.st_size, "time": found.st_mtime_ns, "sha256": digest_of_file(file)}


def _move(making: Path, folder: Path, names: list[str]) -> None:
    """Put the finished copy into its place; in place of a damaged one, file by file and the manifest last.

    File by file, since others may read the folder, and since it may hold files that nalora did not make.
    """
    if not folder.exists():
        try:
            making.rename(folder)
            return
        except OSError:
            if not folder.is_dir():
                raise
    if not _is_whole(folder):
        for name in names:
            os.replace(making / name, folder / name)


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Only one process at a time makes this folder, where the file system has locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with (folder.parent / f".{folder.name}.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"nalora: waiting for the process that dequantises {folder.name} …", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: the slower process finds the folder there, and leaves it
            yield
            return
        # Under the lock nobody else is at it: what a killed process left of this copy is of no use.
        for left in folder.parent.iterdir():
            if left.name.startswith(_prefix(folder)):
                shutil.rmtree(left, ignore_errors=True)
        yield


def _prefix(folder: Path) -> str:
    return f".making-{folder.name}-"


def _dequantise(gguf: Path, header: Header, folder: Path) -> None:
    import transformers

    auto = transformers.AutoModelForSeq2SeqLM if header.architecture in _SEQ2SEQ else transformers.AutoModelForCausalLM
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # Without this option weights stay in 4-bit blocks wherever a kernel for them is installed: not trainable. Releases
    # that have no such option always dequantise.
    config = getattr(transformers, "GgufConfig", None)
    dense = {} if config is None else {"quantization_config": config(dequantize=True)}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # transformers draws this progress bar past its own switch
            model = auto.from_pretrained(**source, **dense, dtype=torch.float32)
            tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # a file may hold anything, and readers share no type of error
        raise _unreadable(gguf, header, error) from error
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
    follow_header(tokenizer, header)
    tokenizer.save_pretrained(folder)
    refuse_unless_followed(transformers.AutoTokenizer.from_pretrained(folder), header, gguf)
    _write_ends(header, folder)


def _write_ends(header: Header, folder: Path) -> None:
    """Let generation stop at the header's end of turn as well as at its end of sequence."""
    ends = [each for each in map(header.token_id, ("eos", "eot")) if each is not None]
    if len(set(ends)) < 2:
        return
    file = folder / "generation_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    atomic.write(file, atomic.json_text({**config, "eos_token_id": ends}, indent=2) + "\n")


def _unreadable(gguf: Path, header: Header, error: Exception) -> NALoRAError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return NALoRAError(
        str(gguf),
        found=f"a GGUF file of the architecture {header.architecture!r} that cannot be read ({reason})",
        expected="a language model whose architecture transformers reads from GGUF",
        fix="update transformers and gguf, or give the model as a folder or hub id",
    )
