"""What two calls of a layer have in common decides whether one recording serves both."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from nalora.kernels.fused.layer_calls import Call

SHAPES = st.sampled_from([(2, 3), (3, 2), (1,)])
LEAVES = st.one_of(SHAPES.map(torch.zeros), st.integers(0, 2), st.booleans(), st.none(), st.sampled_from(["a", "b"]))
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner), max_leaves=6)


@given(st.lists(VALUES, max_size=3), st.dictionaries(st.sampled_from("xyz"), VALUES))
def test_a_call_is_put_together_again_with_other_tensors(args, kwargs):
    call = Call(tuple(args), kwargs)
    others = [tensor + 1 for tensor in call.tensors()]
    again = call.with_tensors(others)
    assert [id(tensor) for tensor in again.tensors()] == [id(tensor) for tensor in others]
    assert again.kind() == call.kind()
    assert hash(again.kind()) == hash(call.kind())


def test_calls_differ_by_shapes_gradients_and_constants():
    x = torch.zeros(2, 3)
    calls = [
        Call((x,), {}), Call((x.T,), {}), Call((x.double(),), {}), Call((x.clone().requires_grad_(),), {}),
        Call((x, None), {}), Call((), {"x": x}), Call((x,), {"flag": True}), Call((x,), {"flag": 1}),
        Call(((x,),), {}), Call(([x],), {}),
    ]  # fmt: skip
    assert len({call.kind() for call in calls}) == len(calls)


def test_an_object_that_may_change_has_no_kind():
    assert Call((torch.zeros(1),), {"cache": object()}).kind() is None
    assert Call(({1, 2},), {}).kind() is None
