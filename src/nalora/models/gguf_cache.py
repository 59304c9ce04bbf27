"""Dense copies of GGUF files: ordinary model folders in the cache, made once for each file's content.

The weights are float32, which represents every value of the file exactly. Without the copy every command would
dequantise the file again (36 s for SmolLM2-135M on two cores), and only nalora could load an adapter, since
`adapter_config.json` names the folder that the base model was loaded from.
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

from nalora.errors import NALoRAError, first_line, missing_package, reason
from nalora.files import atomic, cache_folder
from nalora.models import versions
from nalora.models.file_digest import digest_of_file
from nalora.models.gguf_header import Header, read_header
from nalora.models.gguf_tokenizer import apply_header, check_tokenizer

# Lists the files of a finished copy. No suffix: comparisons of models by content ignore it.
_MANIFEST = "NALORA-MANIFEST"
# The encoder-decoders among the architectures that transformers reads; all others are decoders.
_SEQ2SEQ = frozenset({"t5", "umt5"})
_BYTES_BESIDES_WEIGHTS = 200_000_000

Manifest = dict[str, dict[str, Any]]


def dense_folder(gguf: Path) -> Path:
    """Return the folder with the dense model and tokenizer of a GGUF file; make it on the first call for this content.

    A folder is complete or does not exist. Where the file system has locks, one of several processes makes it;
    elsewhere each does, and the first to finish wins. A copy that does not match its manifest is made again.

    Raises:
        NALoRAError: the file does not exist or is truncated, transformers cannot read its architecture, the disk is
            full, or the package `gguf` is missing.
    """
    what = "keep a GGUF file's rule for BOS and EOS when it saves the tokenizer"
    otherwise = "use the model's folder or hub id"
    versions.require("transformers", versions.GGUF_TOKENIZERS, where=str(gguf), what=what, otherwise=otherwise)
    header, folder = _header_and_folder(gguf)
    if _is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            if not _is_complete(folder):  # another process may have made it in the meantime
                _make(gguf, header, folder)
    except (OSError, SafetensorError) as error:  # raised by the cache: errors of reading were converted
        raise NALoRAError(
            str(gguf),
            found=f"no way to write its dense weights into {folder.parent} ({reason(error)})",
            expected="a cache that can be written, with room for 4 bytes a parameter",
            fix="set NALORA_CACHE to a folder on another disk",
        ) from error
    return folder


def gguf_config(gguf: Path) -> Any:
    """Return the model's configuration: from the dense copy if there is one, else from the file's header.

    Raises:
        NALoRAError: the file does not exist, is truncated or cannot be read by transformers, or `gguf` is missing.
    """
    from transformers import AutoConfig

    header, folder = _header_and_folder(gguf)
    if _is_complete(folder):
        return AutoConfig.from_pretrained(folder)
    with _unreadable(gguf, header):
        return AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)


def cached_folder(gguf: Path) -> Path:
    """Return the place of a file's dense copy: by its content, so that renamed copies of the file share it."""
    cache, content = cache_folder() / "gguf", f"{gguf.stat().st_size}-{digest_of_file(gguf)[:16]}"
    existing = sorted(folder for folder in cache.glob(f"*-{content}") if folder.is_dir() and folder.name[0] != ".")
    return existing[0] if existing else cache / f"{gguf.stem[:80]}-{content}"


def is_dense_copy(folder: Path) -> bool:
    """Return whether a folder has the dequantised weights of a GGUF file, which adapters name as their base model."""
    return (folder / _MANIFEST).is_file()


def _header_and_folder(gguf: Path) -> tuple[Header, Path]:
    if importlib.util.find_spec("gguf") is None:
        raise missing_package(gguf.name, "gguf", "to read the file's weights")
    return read_header(gguf), cached_folder(gguf)


def _is_complete(folder: Path) -> bool:
    """Return whether all files are as written: by size and time, or by content where the time differs."""
    manifest = _read_manifest(folder)
    return manifest is not None and all(_is_unchanged(folder / name, entry) for name, entry in manifest.items())


def _read_manifest(folder: Path) -> Manifest | None:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and "config.json" in manifest else None


def _is_unchanged(file: Path, entry: dict[str, Any]) -> bool:
    try:
        status = file.stat()
        # A cache that was copied has other times. Reading half a gigabyte at every command would take a second.
        same_time = status.st_mtime_ns == entry["time"]
        return bool(status.st_size == entry["size"] and (same_time or digest_of_file(file) == entry["sha256"]))
    except (OSError, KeyError, TypeError):
        return False


def _make(gguf: Path, header: Header, folder: Path) -> None:
    if folder.exists() and _read_manifest(folder) is None:
        raise NALoRAError(
            str(folder),
            found="a folder without its list of files, which nalora did not leave like this",
            expected="nothing, or a copy that nalora finished",
            fix="move that folder elsewhere",
        )
    needed = 4 * header.weights + _BYTES_BESIDES_WEIGHTS
    if (free := shutil.disk_usage(folder.parent).free) < needed:
        raise NALoRAError(
            str(gguf),
            found=f"{free / 1e9:.1f} GB free in {folder.parent}",
            expected=f"{needed / 1e9:.1f} GB for its dense weights",
            fix="make room, or set NALORA_CACHE to a folder on another disk",
        )
    print(f"nalora: dequantising {gguf.name} once into {folder} ({needed / 1e9:.1f} GB) …", file=sys.stderr, flush=True)
    temporary = Path(tempfile.mkdtemp(prefix=_prefix(folder), dir=folder.parent))
    try:
        _dequantise(gguf, header, temporary)
        manifest: Manifest = {}
        for file in sorted(temporary.iterdir()):
            status = file.stat()
            size, time, digest = status.st_size, status.st_mtime_ns, digest_of_file(file)
            manifest[file.name] = {"size": size, "time": time, "sha256": digest}
        atomic.write(temporary / _MANIFEST, atomic.json_text(manifest, indent=1))
        temporary.chmod(0o755)  # mkdtemp gives access to its owner alone, and caches are shared
        _move(temporary, folder, [*manifest, _MANIFEST])
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move(temporary: Path, folder: Path, names: list[str]) -> None:
    """Move the finished copy to its place. A damaged copy is replaced file by file, the manifest last.

    File by file because other processes may be reading the folder, and because users may have added files to it.
    """
    if not folder.exists():
        try:
            temporary.rename(folder)
            return
        except OSError:
            if not folder.is_dir():
                raise
    if not _is_complete(folder):
        for name in names:
            os.replace(temporary / name, folder / name)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Let one process at a time make this folder, where the file system has locks."""
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
        except OSError:  # a file system without locks: the slower process finds the finished folder and keeps it
            yield
            return
        # No other process holds the lock: unfinished folders of this copy were left by killed processes.
        for unfinished in folder.parent.iterdir():
            if unfinished.name.startswith(_prefix(folder)):
                shutil.rmtree(unfinished, ignore_errors=True)
        yield


def _prefix(folder: Path) -> str:
    return f".making-{folder.name}-"


def _dequantise(gguf: Path, header: Header, folder: Path) -> None:
    import transformers

    auto = transformers.AutoModelForSeq2SeqLM if header.architecture in _SEQ2SEQ else transformers.AutoModelForCausalLM
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # Without this option weights stay in 4-bit blocks, which are not trainable, wherever a kernel for them is
    # installed. Releases without the option always dequantise.
    config = getattr(transformers, "GgufConfig", None)
    dense = {} if config is None else {"quantization_config": config(dequantize=True)}
    silence = contextlib.redirect_stderr(io.StringIO())  # a progress bar that transformers' own switch does not hide
    with _unreadable(gguf, header), silence:
        model = auto.from_pretrained(**source, **dense, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    with silence:
        model.save_pretrained(folder)
    apply_header(tokenizer, header)
    tokenizer.save_pretrained(folder)
    check_tokenizer(transformers.AutoTokenizer.from_pretrained(folder), header, gguf)
    # Generation stops at the header's end of turn as well as at its end of sequence.
    ends = [token for token in map(header.token_id, ("eos", "eot")) if token is not None]
    if len(set(ends)) == 2:
        file = folder / "generation_config.json"
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        atomic.write(file, atomic.json_text({**settings, "eos_token_id": ends}, indent=2) + "\n")


@contextlib.contextmanager
def _unreadable(gguf: Path, header: Header) -> Iterator[None]:
    """Convert any exception: a file may contain anything, and transformers' readers share no type of error."""
    try:
        yield
    except Exception as error:
        line = f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")
        raise NALoRAError(
            str(gguf),
            found=f"a GGUF file of the architecture {header.architecture!r} that cannot be read ({line})",
            expected="a language model whose architecture transformers reads from GGUF",
            fix="update transformers and gguf, or give the model as a folder or hub id",
        ) from error
