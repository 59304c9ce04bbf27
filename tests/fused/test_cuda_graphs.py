"""A captured step is the eager step: same losses, same adapters, same controller."""

from __future__ import annotations

import contextlib

import pytest
import tiny
import torch
from torch.optim import AdamW

import nalora
from nalora import NALoRAConfig
from nalora.kernels.cuda_graphs import GraphedStep

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")


def test_a_missing_gpu_is_reported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(nalora.NALoRAError, match="no CUDA device"):
        GraphedStep(lambda batch: torch.zeros(()))


def train(graphed: bool, apply_to: str, kernels: str, compiled: bool = False):
    model = tiny.llama(torch.float32).to("cuda")
    rate = torch.tensor(3e-3, device="cuda")
    optimizer = AdamW(tiny.trainable(model), lr=rate, capturable=True, fused=True)
    controller = nalora.attach(model, optimizer, NALoRAConfig(apply_to=apply_to), kernels=kernels)
    forward = torch.compile(model) if compiled else model

    def step(batch):
        loss = tiny.sum_loss(forward, batch["ids"], batch["mask"])
        loss.backward()
        controller.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    run = GraphedStep(step, warmup=2) if graphed else step
    losses = []
    for number in range(9):
        length = 12 if number % 3 else 8  # two shapes, in turns
        mask = torch.ones(4, length, dtype=torch.long, device="cuda")
        mask[number % 4, 5:] = 0
        rate.fill_(3e-3 / (1 + number))
        losses.append(run({"ids": tiny.tokens(length=length, seed=number).to("cuda"), "mask": mask}).item())
    return losses, tiny.adapter_state(model), controller.state_dict()["tensors"], controller.metrics()


@gpu
@pytest.mark.parametrize("apply_to", ["gradient", "update"])
@pytest.mark.parametrize("kernels", ["auto", "fused"])
def test_replayed_steps_are_the_eager_steps(apply_to, kernels):
    eager, replayed = train(False, apply_to, kernels), train(True, apply_to, kernels)
    assert eager[0] == pytest.approx(replayed[0], rel=1e-5)
    assert tiny.largest_difference(eager[1], replayed[1]) < 1e-5
    for name, value in eager[2].items():
        torch.testing.assert_close(replayed[2][name], value, rtol=1e-4, atol=1e-5)
    assert eager[3] == pytest.approx(replayed[3], abs=1e-4)


@gpu
def test_a_compiled_model_is_captured_too():
    eager, replayed = train(False, "gradient", "auto"), train(True, "gradient", "auto", compiled=True)
    assert eager[0] == pytest.approx(replayed[0], rel=1e-4)


@gpu
def test_a_step_that_waits_for_the_gpu_is_refused_with_a_reason():
    step = GraphedStep(lambda batch: batch["x"].sum() * batch["x"].sum().item(), warmup=0)
    with pytest.raises(nalora.NALoRAError, match="cannot be captured"):
        step({"x": torch.ones(3, device="cuda")})


def test_a_capture_that_finds_no_memory_is_reported_and_blames_no_step(monkeypatch):
    """A study then repeats the run with fewer others beside it."""

    def step(batch):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    graphed = object.__new__(GraphedStep)
    graphed.step, graphed._stream, graphed._memory, graphed._parameters = step, None, None, []
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        graphed._capture({})


def test_shapes_beyond_the_most_run_eagerly_and_this_is_logged_once(caplog):
    graphed = object.__new__(GraphedStep)
    graphed.warmup, graphed.warm_later, graphed.most_shapes, graphed._is_logged = 2, 1, 2, False
    graphed._eager_steps, graphed._captured = {}, {}

    def eager(shape):
        """Whether the next step of a shape runs eagerly; a shape that does not is captured."""
        found = graphed._runs_eagerly(shape)
        if not found:
            graphed._captured.setdefault(shape, None)
        return found

    assert [eager("a") for _ in range(4)] == [True, True, False, False]
    assert [eager("b") for _ in range(3)] == [True, False, False]
    assert not caplog.records
    assert [eager("c") for _ in range(3)] == [True, True, True]
    assert eager("d")
    assert not eager("a")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "pad_to_multiple_of" in caplog.text
