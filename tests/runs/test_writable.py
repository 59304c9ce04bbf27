"""A place that cannot be written to is refused before anything is loaded, and trying leaves nothing there."""

from __future__ import annotations

import os

import pytest

from nalora.errors import NALoRAError
from nalora.models import loading
from nalora.runs.settings import check
from nalora.runs.writable import folder_name, refuse_unwritable
from nalora.training.run import train


def places(folder) -> dict[str, tuple[str, str]]:
    """Unusable outputs by name: the path and the message."""
    (folder / "file").write_text("mine")
    (folder / "link").symlink_to(folder / "nowhere" / "else")
    return {
        "a file": (str(folder / "file"), "found a file; expected a new or empty folder"),
        "below a file": (str(folder / "file" / "run"), "file, which is a file and not a folder"),
        "a broken link": (str(folder / "link"), "found a symbolic link; expected a new or empty folder"),
        "the kernel's": ("/proc/run", "cannot be written to"),
        "a long name": (str(folder / ("x" * 300)), "a name of 300 bytes"),
        "a long name in unicode": (str(folder / ("é" * 200)), "a name of 400 bytes"),
        "a NUL": (str(folder / "a\0b"), "cannot be written to"),
    }


@pytest.mark.parametrize("name", [
    "a file", "below a file", "a broken link", "the kernel's", "a long name", "a long name in unicode", "a NUL",
])  # fmt: skip
def test_training_refuses_it_before_anything_is_loaded(tmp_path, monkeypatch, name):
    output, message = places(tmp_path)[name]
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("loaded a model"))
    with pytest.raises(NALoRAError) as error:
        train(check({"model": "smollm2-135m", "task": "gsm8k", "device": "cpu", "output": output}))
    assert message in str(error.value)
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_the_right_to_write_is_refused(tmp_path):
    (tmp_path / "shut").mkdir(mode=0o555)
    with pytest.raises(NALoRAError, match="Permission denied"):
        refuse_unwritable(tmp_path / "shut" / "run")


def test_a_usable_place_stays_as_it_is(tmp_path):
    refuse_unwritable(tmp_path)
    refuse_unwritable(tmp_path / "a" / "b" / "c")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["owner/name", "é" * 300, "a/" * 2_000])
def test_any_model_has_a_folder_s_name(tmp_path, text):
    (tmp_path / folder_name(text)).mkdir()
    assert folder_name("owner/name") == "owner--name"
    assert folder_name("x" * 300) != folder_name("x" * 301)
