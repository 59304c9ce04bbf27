"""The state file: versioned, atomic, and never half believed."""

from __future__ import annotations

import json
import os

import pytest
import tiny
import tiny_experts
import torch
from installed import CONTROLLED_EXPERTS
from safetensors import safe_open
from safetensors.torch import save_file

import nalora
from nalora import NALoRAConfig, NALoRAError
from nalora.control.checkpoint import FILE_NAME


def controller(layers: int = 2, model=None, **settings) -> nalora.NALoRAController:
    model = model or tiny.llama(layers=layers)
    return nalora.attach(model, torch.optim.SGD(tiny.trainable(model), lr=0.1), NALoRAConfig(**settings))


def stepped(one: nalora.NALoRAController, seeds=(0, 1)) -> nalora.NALoRAController:
    for seed in seeds:
        tiny.sum_loss(one.model, tiny.tokens(seed=seed)).backward()
        one._optimizer.step()
        one._optimizer.zero_grad()
    return one


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_round_trip_is_bit_exact(tmp_path):
    first = stepped(controller())
    path = first.save(tmp_path / "new" / "folder")
    assert path.name == FILE_NAME
    second = controller()
    second.load(path.parent)
    assert same(first.state_dict()["tensors"], second.state_dict()["tensors"])
    assert first.metrics() == second.metrics()


def test_state_dict_survives_torch_save_with_weights_only(tmp_path):
    first = stepped(controller())
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = controller()
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert same(first.state_dict()["tensors"], second.state_dict()["tensors"])


def test_the_file_names_its_version_and_configuration(tmp_path):
    controller(keep_ratio=0.5).save(tmp_path)
    with safe_open(tmp_path / FILE_NAME, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["version"] == "2"
    assert json.loads(metadata["config"])["keep_ratio"] == 0.5


def test_writing_is_whole_or_not_at_all(tmp_path, monkeypatch):
    first = stepped(controller())
    first.save(tmp_path)
    before = (tmp_path / FILE_NAME).read_bytes()
    stepped(first)
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        first.save(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [FILE_NAME]


def test_other_settings_are_reported(tmp_path):
    controller(keep_ratio=0.5).save(tmp_path)
    with pytest.warns(UserWarning, match="differ from the saved ones: keep_ratio"):
        controller(keep_ratio=0.6).load(tmp_path)


def rewritten(path, change):
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    change(metadata, tensors)
    save_file(tensors, path, metadata)


def no_version(metadata, tensors):
    del metadata["version"]


def newer(metadata, tensors):
    metadata["version"] = "3"


def narrower(metadata, tensors):
    key = next(key for key in tensors if key.endswith("/mask"))
    tensors[key] = tensors[key][:-1].clone()


def block_lost(metadata, tensors):
    for key in [key for key in tensors if "layers.1." in key]:
        del tensors[key]


def block_too_many(metadata, tensors):
    for key in [key for key in tensors if "layers.1." in key]:
        tensors[key.replace("layers.1.", "layers.2.")] = tensors[key].clone()


def truncated(path):
    path.write_bytes(path.read_bytes()[:-20])


def corrupted(path):
    path.write_bytes(b"\0" * 100)


def emptied(path):
    path.write_bytes(b"")


def removed(path):
    path.unlink()


DAMAGE = {
    "another version": (lambda path: rewritten(path, newer), "version 3"),
    "no version": (lambda path: rewritten(path, no_version), "damaged"),
    "another width": (lambda path: rewritten(path, narrower), "saved shape"),
    "a block too few": (lambda path: rewritten(path, block_lost), "no such block"),
    "a block too many": (lambda path: rewritten(path, block_too_many), "does not have"),
    "truncated": (truncated, "damaged"),
    "corrupted": (corrupted, "damaged"),
    "empty": (emptied, "damaged"),
    "missing": (removed, "no controller state"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_bad_files_are_refused_and_leave_everything_as_it_was(damage, tmp_path):
    spoil, message = DAMAGE[damage]
    first = stepped(controller())
    spoil(first.save(tmp_path))
    second = stepped(controller(), seeds=(5,))
    state, adapters = second.state_dict()["tensors"], tiny.adapter_state(second.model)
    with pytest.raises(NALoRAError, match=message) as refusal:
        second.load(tmp_path)
    assert refusal.value.fix
    assert same(state, second.state_dict()["tensors"])
    assert same(adapters, tiny.adapter_state(second.model))


@CONTROLLED_EXPERTS
def test_a_state_of_version_1_has_no_experts_which_start_anew(tmp_path):
    """Until then experts were plain LoRA next to the dense blocks that were controlled."""
    model = tiny_experts.adapted("Qwen3Moe")
    first = stepped(controller(model=model))
    first.save(tmp_path)
    state = first.state_dict()["tensors"]
    assert any("experts" in key for key in state)

    def without_experts(metadata, tensors):
        metadata["version"] = "1"
        for key in [key for key in tensors if "experts" in key]:
            del tensors[key]

    rewritten(tmp_path / FILE_NAME, without_experts)
    first.detach()
    second = controller(model=model)
    with pytest.warns(UserWarning, match="a state without experts; their averages start anew"):
        second.load(tmp_path)
    for key, value in second.state_dict()["tensors"].items():
        if "experts" not in key:
            assert torch.equal(value, state[key])
        elif key.endswith(("mask", "scales")):
            assert (value == 1).all()
