"""The cache is off inside and as it was afterwards, also after an error."""

from __future__ import annotations

import pytest
import tiny
import torch

from nalora.models.key_value_cache import without_cache


@pytest.mark.parametrize("caching", [True, False])
def test_the_cache_is_put_back_after_an_error(caching):
    model = tiny.llama(torch.float32)
    model.config.use_cache = caching
    switch = without_cache(model)
    switch.__enter__()
    assert model.config.use_cache is False
    assert not switch.__exit__(ValueError, ValueError("inside"), None)
    assert model.config.use_cache is caching


def test_a_model_without_such_a_setting_is_left_alone():
    model = torch.nn.Linear(2, 2)
    with without_cache(model):
        pass
    assert not hasattr(model, "config")
