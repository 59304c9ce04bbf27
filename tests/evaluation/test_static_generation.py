"""Generation with a cache of fixed size gives the same tokens as `generate`."""

from __future__ import annotations

import pytest
import tiny
import torch

from nalora.evaluation import static_generation
from nalora.evaluation.static_generation import generate_greedily

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device")])]  # fmt: skip
PAD, LONGEST = 0, 9


def prompts(device):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 60, (13, LONGEST), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(13):
        mask[row, : row % 6] = 0
    return (ids * mask + PAD * (1 - mask)).to(device), mask.to(device)


def generated(model, ids, mask, tokens, ends):
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False,
                         pad_token_id=PAD, eos_token_id=ends)  # fmt: skip
    rows = []
    for row in out[:, ids.shape[1] :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        rows.append(row[:end])
    return rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_the_same_tokens_as_generate(device, tokens):
    model = tiny.llama(torch.float64).to(device).eval()
    ids, mask = prompts(device)
    plain = generated(model, ids, mask, tokens, [61])
    # End tokens that some rows reach early and others late or never, so that rows leave the batch.
    ends = [61, plain[0][0], plain[3][tokens // 2], plain[7][-1]]
    expected = generated(model, ids, mask, tokens, ends)
    found = generate_greedily(model, ids, mask, max_new_tokens=tokens, ends=ends, pad=PAD)
    assert found == expected
    if tokens == 40:
        assert {len(row) for row in found} > {40}, "some rows end early, some never"


@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_that_grows_changes_nothing(device, monkeypatch):
    model = tiny.llama(torch.float64).to(device).eval()
    ids, mask = prompts(device)
    whole = generate_greedily(model, ids, mask, max_new_tokens=90, ends=[61], pad=PAD)
    lengths = []
    keep = static_generation._Batch.select

    def kept(self, rows, length, config):
        lengths.append(length)
        return keep(self, rows, length, config)

    monkeypatch.setattr(static_generation._Batch, "select", kept)
    monkeypatch.setattr(static_generation, "_FIRST_ROOM", 16)
    monkeypatch.setattr(static_generation, "_ALIGNED", 8)
    assert generate_greedily(model, ids, mask, max_new_tokens=90, ends=[61], pad=PAD) == whole
    assert max(lengths) == 104, "room for nine and ninety"
    assert len(set(lengths)) > 1


def test_a_row_that_may_stop_leaves_and_the_others_continue():
    model = tiny.llama(torch.float64).eval()
    ids, mask = prompts("cpu")
    whole = generate_greedily(model, ids, mask, max_new_tokens=40, ends=[61], pad=PAD)
    asked = set()

    def stops(row):
        asked.add(len(row))
        return row[0] == whole[2][0]

    found = generate_greedily(model, ids, mask, max_new_tokens=40, ends=[61], pad=PAD, stops=stops)
    for row, expected in zip(found, whole, strict=True):
        if expected[0] == whole[2][0]:
            assert row[: min(asked)] == expected[: min(asked)]
            assert set(row[min(asked) :]) <= {PAD}
        else:
            assert row == expected
