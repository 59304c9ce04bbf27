"""A checkpoint counts when it is whole, the older one otherwise; nothing is removed that nalora did not write."""

from __future__ import annotations

import json
import os

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from stopped_runs import train_and_stop

from nalora.runs import checkpoints
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.training.run import train


def write(place, step, *, done=True):
    checkpoint = place / f"checkpoint-{step}"
    checkpoints.begin(checkpoint)
    save_file({"a": torch.arange(100.0)}, checkpoint / "adapter_model.safetensors")
    torch.save({"state": torch.arange(100)}, checkpoint / "optimizer.pt")
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (checkpoint / "optimizer_0").mkdir()  # as FSDP's shards are
    (checkpoint / "optimizer_0" / "__0_0.distcp").write_bytes(b"shard")
    if done:
        checkpoints.complete(checkpoint)
    return checkpoint


def names(place):
    return sorted(entry.name for entry in place.iterdir())


def as_0_1_left_it(checkpoint):
    (checkpoint / checkpoints.BEGUN).unlink()
    (checkpoint / checkpoints.COMPLETE).write_bytes(b"")


@pytest.mark.parametrize("old", [False, True], ids=["", "0.1"])
def test_the_last_whole_one_is_used(tmp_path, old):
    for step in (9, 10, 100):
        checkpoint = write(tmp_path, step)
        if old:
            as_0_1_left_it(checkpoint)
    write(tmp_path, 110, done=False)
    assert checkpoints.latest(tmp_path).name == "checkpoint-100"
    assert checkpoints.latest(tmp_path, before=100).name == "checkpoint-10"
    assert checkpoints.latest(tmp_path, before=9) is None
    assert len(names(tmp_path)) == 4, "looking removes nothing"


@pytest.mark.parametrize("old", [False, True], ids=["", "0.1"])
@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer.pt", "trainer_state.json"])
@pytest.mark.parametrize("left", [0.0, 0.5, 0.99])
def test_a_truncated_checkpoint_is_skipped_with_a_notice(tmp_path, old, file, left):
    write(tmp_path, 10)
    damaged = write(tmp_path, 20)
    if old:
        as_0_1_left_it(damaged)
    os.truncate(damaged / file, int(left * (damaged / file).stat().st_size))
    messages = []
    assert checkpoints.latest(tmp_path, notify=messages.append).name == "checkpoint-10"
    assert len(messages) == 1
    assert "checkpoint-20 is damaged" in messages[0]
    assert file in messages[0]


@pytest.mark.parametrize("file", ["optimizer_0/__0_0.distcp", "adapter_model.safetensors", "complete"])
def test_a_file_that_is_missing_or_unreadable_is_damage(tmp_path, file):
    checkpoint = write(tmp_path, 20)
    if file == "complete":
        (checkpoint / file).write_text('{"fil')
    else:
        (checkpoint / file).unlink()
    assert checkpoints.damage(checkpoint) is not None


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer.pt", "optimizer_0/__0_0.distcp"])
def test_other_content_of_the_same_size_is_damage(tmp_path, file):
    """Else the run would go on from wrong numbers, or end in a traceback."""
    older, checkpoint = write(tmp_path, 1), write(tmp_path, 2)
    content = bytearray((checkpoint / file).read_bytes())
    content[-3] ^= 0xFF
    (checkpoint / file).write_bytes(content)
    messages = []
    assert checkpoints.latest(tmp_path, notify=messages.append) == older
    assert f"{file} has different content" in messages[0]


def test_every_file_is_on_the_disk_before_the_mark(tmp_path, monkeypatch):
    checkpoint = write(tmp_path, 5, done=False)
    synced = []
    real = os.fsync

    def fsync(descriptor):
        assert not (checkpoint / checkpoints.COMPLETE).exists() or {*expected} <= {*synced}
        synced.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    expected = [str(path.resolve()) for path in checkpoint.rglob("*") if path.name != checkpoints.BEGUN]
    expected.append(str(checkpoint.resolve()))
    monkeypatch.setattr(os, "fsync", fsync)
    checkpoints.complete(checkpoint)
    mark = next(i for i, path in enumerate(synced) if f".{checkpoints.COMPLETE}." in path)
    assert {*expected} <= {*synced[:mark]}, "files and folders first"
    assert synced[mark + 1 :], "then the mark's own place in the folder"


def foreign(tmp_path):
    """Folders and files that are named like checkpoints and are somebody else's."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "weights.bin").write_text("mine")
    place = tmp_path / "checkpoints"
    for name in ("checkpoint-3/model.bin", "checkpoint-best/complete", "checkpoint-7/complete", "runs/events"):
        (place / name).parent.mkdir(parents=True)
        (place / name).write_text("mine")
    (place / "checkpoint-8").symlink_to(tmp_path / "elsewhere")
    (place / "checkpoint-9").write_text("mine")
    return place, {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}


def test_what_is_named_alike_is_neither_used_nor_removed(tmp_path):
    place, before = foreign(tmp_path)
    assert checkpoints.latest(place) is None
    write(place, 1, done=False)
    checkpoints.remove_unfinished(place)
    for step in (11, 12, 13, 14):
        write(place, step)
        checkpoints.rotate(place)
    assert {"checkpoint-13", "checkpoint-14"} <= {*names(place)}
    assert not {"checkpoint-1", "checkpoint-11", "checkpoint-12"} & {*names(place)}
    now = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert before == {path for path in now if "checkpoint-13" not in path and "checkpoint-14" not in path}
    assert not any(checkpoints.is_free(place / f"checkpoint-{step}") for step in (3, 7, 8, 9))
    assert checkpoints.is_free(place / "checkpoint-13")


def test_a_damaged_one_does_not_push_out_a_whole_one(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    os.truncate(tmp_path / "checkpoint-3" / "optimizer.pt", 7)
    checkpoints.rotate(tmp_path)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_a_run_resumes_from_the_older_of_two_and_leaves_foreign_folders(tmp_path, monkeypatch):
    settings = {
        "model": tiny.saved_llama(tmp_path / "base", layers=1), "task": "gym/chain_sum", "train_size": 21,
        "test_size": 4, "output": str(tmp_path / "run"), "steps": 8, "batch_size": 8, "learning_rate": 1e-3,
        "device": "cpu", "save_every": 2,
    }  # fmt: skip
    train(check(settings | {"output": str(tmp_path / "whole")}))
    train_and_stop(check(settings), monkeypatch, after=4)
    folder = RunFolder(settings["output"])
    os.truncate(folder.checkpoints / "checkpoint-4" / "optimizer.pt", 100)
    mine = folder.checkpoints / "checkpoint-6" / "mine.bin"
    mine.parent.mkdir()
    mine.write_text("mine")
    lines = []

    from rich.console import Console as Real

    monkeypatch.setattr(Real, "print", lambda self, line="", **_: lines.append(str(line)))
    train(check(settings), resume=True, console=Real(quiet=True))
    assert any("checkpoint-4 is damaged (optimizer.pt" in line for line in lines)
    one, other = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("whole", "run"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert [entry.name for entry in mine.parent.iterdir()] == ["mine.bin"]
    assert names(folder.checkpoints) == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]
    assert checkpoints.damage(folder.checkpoints / "checkpoint-4") is None, "written again"
