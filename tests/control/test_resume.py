"""A plain loop that was stopped after any step and taken up again ends bit for bit where it would have."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch.optim import AdamW

import nalora
from nalora import NALoRAConfig

STEPS = 5
SETTINGS = {
    "gradient": {},
    "update": {"apply_to": "update"},
    "first": {"start": "first", "apply_to": "update"},
    "utility": {"importance": "utility"},
}


def set_up(settings):
    model = tiny.llama(torch.float32, lora_dropout=0.2)
    optimizer = AdamW(tiny.trainable(model), lr=3e-3)
    return model, optimizer, nalora.attach(model, optimizer, NALoRAConfig(**settings))


def train(model, optimizer, controller, steps, after_step=lambda step: None):
    for step in steps:
        # Two micro-batches of unlike size.
        tiny.sum_loss(model, tiny.tokens(4, 12, seed=2 * step)).backward()
        tiny.sum_loss(model, tiny.tokens(2, 9, seed=2 * step + 1)).backward()
        controller.clip_grad_norm_(0.3)
        optimizer.step()
        optimizer.zero_grad()
        after_step(step)


@pytest.mark.parametrize("name", SETTINGS)
def test_from_files_after_every_step(name, tmp_path):
    model, optimizer, controller = set_up(SETTINGS[name])

    def save(step):
        folder = tmp_path / str(step)
        folder.mkdir()
        whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        torch.save(whole, folder / "training.pt")
        controller.save(folder)

    train(model, optimizer, controller, range(STEPS), save)
    expected = tiny.adapter_state(model), controller.state_dict()["tensors"], controller.metrics()

    for step in range(STEPS):
        model, optimizer, controller = set_up(SETTINGS[name])
        saved = torch.load(tmp_path / str(step) / "training.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        controller.load(tmp_path / str(step))
        torch.set_rng_state(saved["rng"])
        train(model, optimizer, controller, range(step + 1, STEPS))
        assert_same(expected, (tiny.adapter_state(model), controller.state_dict()["tensors"], controller.metrics()))

    # A controller that starts anew goes elsewhere, so the state was needed.
    model, optimizer, controller = set_up(SETTINGS[name])
    saved = torch.load(tmp_path / "1" / "training.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["rng"])
    train(model, optimizer, controller, range(2, STEPS))
    assert tiny.largest_difference(expected[0], tiny.adapter_state(model)) > 1e-4


def test_the_state_travels_in_the_users_own_torch_file(tmp_path):
    """`state_dict` in one file with the optimizer's, read back without unpickling code."""
    model, optimizer, controller = set_up({})
    train(model, optimizer, controller, range(2))
    parts = {"model": model, "optimizer": optimizer, "controller": controller}
    torch.save(
        {name: part.state_dict() for name, part in parts.items()} | {"rng": torch.get_rng_state()}, tmp_path / "all.pt"
    )
    train(model, optimizer, controller, range(2, STEPS))
    expected = tiny.adapter_state(model), controller.state_dict()["tensors"], controller.metrics()

    model, optimizer, controller = set_up({})
    saved = torch.load(tmp_path / "all.pt", weights_only=True)
    for name, part in {"model": model, "optimizer": optimizer, "controller": controller}.items():
        part.load_state_dict(saved[name])
    torch.set_rng_state(saved["rng"])
    train(model, optimizer, controller, range(2, STEPS))
    assert_same(expected, (tiny.adapter_state(model), controller.state_dict()["tensors"], controller.metrics()))


def assert_same(expected, found):
    for one, other in zip(expected[:2], found[:2], strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert torch.equal(one[key], other[key]), key
    assert expected[2] == found[2]
