"""Hooks on methods and optimizer steps: called at the right moments, and removed without a trace."""

from __future__ import annotations

import pickle

import pytest
import torch

from nalora.control.hooks import hook_steps, wrap_method
from nalora.kernels.inert_hook import inert_hook


class Counter:
    def add(self, number, twice=False):
        """Add a number."""
        return number * (2 if twice else 1)


@pytest.mark.parametrize("own", [False, True])
def test_a_wrapped_method_reports_its_calls_and_is_restored(own):
    counter, calls = Counter(), []
    if own:
        counter.add = lambda number, twice=False: -number
    before = dict(vars(counter))
    restore = wrap_method(
        counter,
        "add",
        before=lambda *args, **kwargs: calls.append(("before", args, kwargs)),
        after=lambda *args, **kwargs: calls.append(("after", args, kwargs)),
        result=lambda returned: calls.append(("result", returned)),
    )
    returned = counter.add(3, twice=True)
    assert returned == (-3 if own else 6)
    arguments = ((3,), {"twice": True})
    assert calls == [("before", *arguments), ("result", returned), ("after", *arguments)]
    restore()
    assert vars(counter) == before
    counter.add(1)
    assert len(calls) == 3


def test_a_method_that_raises_is_not_reported_as_done():
    calls = []
    wrap_method(counter := Counter(), "add", after=lambda *_: calls.append("after"))
    with pytest.raises(TypeError):
        counter.add()
    assert calls == []


@pytest.mark.parametrize("with_closure", [False, True])
def test_a_step_begins_when_its_gradients_are_complete(with_closure):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    moments = []
    remove = hook_steps(
        optimizer,
        begin=lambda: moments.append(("begin", weight.item(), weight.grad.item())),
        end=lambda happened: moments.append(("end", weight.item(), happened)),
        zeroed=lambda *args, **kwargs: moments.append(("zeroed",)),
    )

    def backward():
        optimizer.zero_grad()
        loss = (weight * 4).sum()
        loss.backward()
        return loss

    if with_closure:
        assert optimizer.step(backward).item() == 4
    else:
        backward()
        optimizer.step()
    assert moments == [("zeroed",), ("begin", 1.0, 4.0), ("end", -1.0, None)]
    for undo in remove:
        undo()
    backward()
    optimizer.step()
    assert len(moments) == 3


def test_an_inert_hook_can_be_pickled_and_does_nothing():
    hook = pickle.loads(pickle.dumps(inert_hook()))
    assert hook(1, 2, 3) is None
