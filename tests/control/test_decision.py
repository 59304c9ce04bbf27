"""Decisions and commits on small numbers, compared with the paper's equations."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from nalora import NALoRAConfig, equations
from nalora.control.decision import BlockGroup, Decision

WIDTH = 4


def group(blocks=2, **acts):
    return BlockGroup([f"block {i}" for i in range(blocks)], WIDTH, torch.float64, torch.device("cpu"), **acts)


def filled(sensitivity, regimes, tokens):
    """A group that has counted this: Σ|φ′| by channel, gates by regime, tokens; a row for each block."""
    found = group(len(tokens))
    for index, row in enumerate(zip(sensitivity, regimes, tokens, strict=True)):
        fill(found, index, *row)
    return found


def fill(found, index, sensitivity, regimes, tokens):
    for sums, value in zip(found.sums(index), (sensitivity, (regimes[0], regimes[2]), tokens), strict=True):
        sums.copy_(torch.as_tensor(value).reshape(sums.shape).to(sums))


def decision(**changes):
    found = {
        "mask": torch.tensor([[0.5, 1.0, 1.0, 0.1], [0.2, 0.2, 0.2, 0.2]], dtype=torch.float64),
        "scales": torch.tensor([[1.5, 0.75, 1.25], [0.5, 0.5, 0.5]], dtype=torch.float64),
        "valid": torch.tensor([True, True]),
        "shares": torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.8, 0.1]], dtype=torch.float64),
        "score": torch.tensor([0.25, 0.75], dtype=torch.float64),
    }
    return Decision(**{**found, **changes})


def state(of):
    return {name: getattr(of, name).clone() for name in of.STATE}


def test_a_new_group_multiplies_by_one_and_has_counted_nothing():
    fresh = group()
    assert fresh.mask.tolist() == [[1.0] * WIDTH] * 2
    assert fresh.scales.tolist() == [[1.0] * 3] * 2
    assert {name: getattr(fresh, name).shape[0] for name in fresh.STATE} == dict.fromkeys(fresh.STATE, 2)
    assert all(not getattr(fresh, name).any() for name in ("updates", "skipped", "shares", "score", "stability"))
    assert {getattr(fresh, name).dtype for name in ("mask", "scales", "shares", "score", "stability")} == {
        torch.float64
    }
    assert {fresh.updates.dtype, fresh.skipped.dtype} == {torch.int64}
    assert (fresh.mask_acts, fresh.scaling_acts) == (True, True)
    assert fresh.kind == (torch.device("cpu"), torch.float64)
    assert fresh.tokens.tolist() == [0, 0]


def test_a_commit_takes_everything_over_and_stability_is_how_far_the_mask_moved():
    here, new = group(), decision()
    here.commit(new, None)
    # From a mask of ones: by 0.5 and 0.9 in two of four channels, and by 0.8 in each. The scales moved otherwise.
    assert here.stability.tolist() == pytest.approx([(0.5 + 0.9) / 4, 0.8])
    for name in ("mask", "scales", "shares", "score"):
        assert torch.equal(getattr(here, name), getattr(new, name))
    assert (here.updates.tolist(), here.skipped.tolist()) == ([1, 1], [0, 0])
    here.commit(new, None)
    assert here.stability.tolist() == [0, 0], "the same mask again"
    assert here.updates.tolist() == [2, 2]


def test_a_commit_writes_into_the_memory_that_is_there():
    """A captured CUDA graph keeps reading it."""
    here = group()
    places = {name: getattr(here, name).data_ptr() for name in here.STATE}
    here.commit(decision(), torch.tensor(True))
    assert {name: getattr(here, name).data_ptr() for name in here.STATE} == places


def test_a_block_that_saw_nothing_keeps_its_state_and_is_counted_as_skipped():
    here = group()
    before = state(here)
    here.commit(decision(valid=torch.tensor([False, True])), None)
    for name in ("mask", "scales", "shares", "score", "stability", "updates"):
        assert torch.equal(getattr(here, name)[0], before[name][0])
        assert not torch.equal(getattr(here, name)[1], before[name][1])
    assert here.skipped.tolist() == [1, 0]


@pytest.mark.parametrize("happened", [torch.tensor(0.0), torch.tensor(False), torch.tensor([0])])
def test_a_step_that_the_optimizer_skipped_changes_nothing_and_is_not_an_error(happened):
    here = group()
    before = state(here)
    here.commit(decision(valid=torch.tensor([False, True])), happened)
    assert all(torch.equal(getattr(here, name), before[name]) for name in here.STATE)
    here.commit(decision(), torch.ones_like(happened))
    assert here.updates.tolist() == [1, 1]


SENSITIVITY = [[8.0, 4.0, 2.0, 6.0], [1.0, 2.0, 3.0, 4.0]]
REGIMES = [[4.0, 20.0, 16.0], [0.0, 10.0, 6.0]]
TOKENS = [10.0, 4.0]


def test_a_decision_is_the_equations_of_the_paper():
    config = NALoRAConfig(start="ones", keep_ratio=0.5, sharpness=4.0, mask_ema=0.9, scale_ema=0.8)
    here = filled(SENSITIVITY, REGIMES, TOKENS)
    assert here.tokens.tolist() == TOKENS
    made = here.decide(config)
    for index in range(2):
        k = torch.tensor(SENSITIVITY[index], dtype=torch.float64) / TOKENS[index]
        fresh = torch.sigmoid(4.0 * (k - torch.quantile(k, 0.5)))
        torch.testing.assert_close(made.mask[index], 0.9 + 0.1 * fresh)
        shares = torch.tensor(REGIMES[index], dtype=torch.float64) / sum(REGIMES[index])
        torch.testing.assert_close(made.shares[index], shares)
        a = float((shares[1] - config.positive_penalty * shares[2]).clamp(0, 1))
        assert made.score[index].item() == pytest.approx(a)
        for place, limits in enumerate((config.gate, config.up, config.down)):
            wanted = min(max(1 + limits.sensitivity * (2 * a - 1), limits.low), limits.high)
            assert made.scales[index, place].item() == pytest.approx(0.8 + 0.2 * wanted)
    assert made.valid.tolist() == [True, True]
    assert torch.equal(here.mask, torch.ones_like(here.mask)), "nothing is committed yet"


def test_the_first_decision_may_start_the_averages_and_later_ones_go_on():
    config = NALoRAConfig(start="first", keep_ratio=0.5, sharpness=4.0, mask_ema=0.9, scale_ema=0.8)
    here = filled(SENSITIVITY, REGIMES, TOKENS)
    k = torch.tensor(SENSITIVITY, dtype=torch.float64) / torch.tensor(TOKENS)[:, None]
    fresh = torch.sigmoid(4.0 * (k - torch.quantile(k, 0.5, dim=1, keepdim=True)))
    first = here.decide(config)
    torch.testing.assert_close(first.mask, fresh)
    here.commit(first, None)
    here.mask.fill_(1.0)
    here.scales.fill_(1.0)
    second = here.decide(config)
    torch.testing.assert_close(second.mask, 0.9 + 0.1 * fresh)
    torch.testing.assert_close(second.scales, 0.8 + 0.2 * first.scales)


@pytest.mark.parametrize("broken", [{"tokens": [0.0, 4.0]}, {"sensitivity": [[float("nan")] * 4, SENSITIVITY[1]]},
                                    {"sensitivity": [[1.0, float("inf"), 1.0, 1.0], SENSITIVITY[1]]}])  # fmt: skip
def test_a_block_without_tokens_or_with_numbers_that_are_not_finite_keeps_what_it_had(broken):
    given = {"sensitivity": SENSITIVITY, "regimes": REGIMES, "tokens": TOKENS, **broken}
    here = filled(**given)
    here.mask.fill_(0.25)
    here.scales.fill_(0.5)
    here.shares.fill_(0.125)
    here.score.fill_(0.375)
    made = here.decide(NALoRAConfig(start="first"))
    assert made.valid.tolist() == [False, True]
    assert made.mask[0].tolist() == [0.25] * WIDTH
    assert made.scales[0].tolist() == [0.5] * 3
    assert made.shares[0].tolist() == [0.125] * 3
    assert made.score[0].item() == 0.375
    assert made.shares[1].tolist() == [0.0, 10 / 16, 6 / 16]
    assert all(torch.isfinite(each).all() for each in (made.mask, made.scales, made.shares, made.score))


def test_one_token_is_enough():
    here = filled([[0.1, 0.2, 0.3, 0.4], SENSITIVITY[1]], [[1.0, 2.0, 1.0], REGIMES[1]], [1.0, 4.0])
    made = here.decide(NALoRAConfig(start="first"))
    assert made.valid.tolist() == [True, True]
    assert made.shares[0].tolist() == [0.25, 0.5, 0.25]


def test_all_channels_are_kept_by_a_mask_of_ones():
    made = filled(SENSITIVITY, REGIMES, TOKENS).decide(NALoRAConfig(start="first", keep_ratio=1))
    assert made.mask.tolist() == [[1.0] * WIDTH] * 2


def test_a_frozen_mask_is_that_of_the_first_step():
    config = NALoRAConfig(mask_channels="frozen", keep_ratio=0.5, mask_ema=0.9)
    here = filled(SENSITIVITY, REGIMES, TOKENS)
    first = here.decide(config)
    k = torch.tensor(SENSITIVITY, dtype=torch.float64) / torch.tensor(TOKENS)[:, None]
    expected = equations.soft_mask(k, equations.quantile_threshold(k, 0.5), config.sharpness)
    torch.testing.assert_close(first.mask, expected)
    here.commit(first, None)
    fill(here, 0, [1.0, 9.0, 9.0, 1.0], REGIMES[1], 10.0)
    assert torch.equal(here.decide(config).mask, first.mask)


def test_shuffled_scores_are_the_same_scores_in_other_places_by_seed_and_name():
    def mask_of(names, seed):
        config = NALoRAConfig(mask_channels="shuffled", mask_seed=seed, start="first", keep_ratio=0.5)
        here = BlockGroup(names, 64, torch.float64, torch.device("cpu"))
        for index in range(len(names)):
            fill(here, index, torch.arange(64.0), REGIMES[0], 10.0)
        plain = here.decide(NALoRAConfig(start="first", keep_ratio=0.5)).mask
        made = here.decide(config).mask
        assert torch.equal(here.decide(config).mask, made), "drawn once"
        torch.testing.assert_close(made.sort(dim=1).values, plain.sort(dim=1).values)
        assert not torch.equal(made, plain)
        return made

    one = mask_of(["a", "b"], 0)
    assert not torch.equal(one[0], one[1]), "each block has its own order"
    assert torch.equal(mask_of(["b", "a"], 0).flip(0), one), "by its name, not by its place"
    assert not torch.equal(mask_of(["a", "b"], 1), one)


def test_ranks_decide_by_the_tokens_of_their_group_and_not_by_those_of_all_processes(tmp_path):
    """Two ranks with half of the tokens each are one rank with all of them, each in a thread of this process."""
    sums = {0: ([4.0, 3.0, 2.0, 1.0], [1, 2, 3], 6), 1: ([1.0, 1.0, 5.0, 1.0], [4, 0, 2], 3)}
    together = filled([[5.0, 4.0, 7.0, 2.0]], [[5, 2, 5]], [9]).decide(NALoRAConfig(start="first"))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'alone'}", rank=0, world_size=1)
    store, decided = dist.HashStore(), {}

    def decide(rank):
        ranks = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        sensitivity, regimes, tokens = sums[rank]
        decided[rank] = filled([sensitivity], [regimes], [tokens]).decide(NALoRAConfig(start="first"), ranks)

    try:
        threads = [threading.Thread(target=decide, args=(rank,)) for rank in sums]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        dist.destroy_process_group()
    for rank in sums:
        for name, expected in together._asdict().items():
            assert torch.equal(getattr(decided[rank], name), expected), (rank, name)
