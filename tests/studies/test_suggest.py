"""A rate is suggested from short runs: the pick, ends of the grid, divergence, noise; and what short runs train."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import tiny
from dummies import Attempting, Instantly

import nalora
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.studies import suggest
from nalora.studies.conduct import conduct
from nalora.studies.rate_evidence import known
from nalora.studies.store import Store
from nalora.studies.suggest import ShortRuns, short_runs
from nalora.training.run import train

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
STEPS = 30


@pytest.fixture
def run():
    return check({"model": "smollm2-135m", "task": "gym/chain_sum", "steps": 200, "seed": 3, "output": "runs/mine"})


def loss_at(step, final):
    """Falls to its value, with noise that is the same for all rates, as that of equal batches."""
    return final + 2.0 / step + 0.3 * (step % 3)


@pytest.fixture
def pick(run, tmp_path):
    """The suggestion from made-up runs: the loss of each rate, or the step at which it diverged."""

    def from_losses(losses, loss_of=loss_at):
        schedule = ShortRuns(short_runs(run, sorted(losses), STEPS), str(tmp_path / "store"))
        (cell,) = schedule.cells
        for rate, final in losses.items():
            folder = Store(schedule.store).folder(schedule.job(cell, rate, 3).key)
            folder.path.mkdir(parents=True)
            diverged = isinstance(final, str)
            last = int(final) if diverged else STEPS
            rows = [
                {"step": step, "loss": loss_of(step, 0 if diverged else final), "grad_norm": 1.5, "learning_rate": rate}
                for step in range(1, last + 1)
            ]
            folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
            ending = {"diverged": True, "diverged_step": last} if diverged else {"train_loss": 1.0}
            folder.result.write_text(json.dumps(ending | {"steps": last}))
        shorts = suggest.logged(schedule, STEPS)
        return suggest.suggest(shorts, known(), STEPS), shorts

    return from_losses


def test_the_rate_with_the_lowest_mean_loss_of_the_last_ten_steps_is_picked(pick):
    suggestion, shorts = pick({1e-3: 1.2, 2e-3: 1.1, 4e-3: 1.15, 8e-3: 1.4})
    assert (suggestion.rate, suggestion.end, suggestion.reason) == (2e-3, "", "")
    assert [short.rate for short in shorts] == list(RATES)
    expected = sum(loss_at(step, 1.1) for step in range(21, 31)) / 10
    assert shorts[1].loss == pytest.approx(expected)
    assert (shorts[1].grad_norm, shorts[1].diverged, len(shorts[1].losses)) == (1.5, None, 10)


@pytest.mark.parametrize(("best", "end"), [(1e-3, "lowest"), (8e-3, "highest")])
def test_a_pick_at_an_end_of_the_grid_is_named(pick, best, end):
    suggestion, _ = pick({rate: 1.0 if rate == best else 1.2 for rate in RATES})
    assert (suggestion.rate, suggestion.end) == (best, end)


def test_the_rate_above_is_worth_a_run_only_at_a_difference_that_stored_grids_had(pick):
    loss = sum(loss_at(step, 1.1) for step in range(21, 31)) / 10
    most = known().total.next_gap
    assert 0 < most < 0.1
    suggestion, _ = pick({1e-3: 1.3, 2e-3: 1.1, 4e-3: 1.1 + 0.9 * most * loss, 8e-3: 1.4})
    assert suggestion.next == 4e-3


@pytest.mark.parametrize(
    "losses",
    [
        {1e-3: 1.3, 2e-3: 1.1, 4e-3: 1.4, 8e-3: 1.5},  # far above
        {1e-3: 1.3, 2e-3: 1.1, 4e-3: "9", 8e-3: "5"},  # diverged
        {1e-3: 1.3, 2e-3: 1.1, 6e-3: 1.1001},  # not an octave
    ],
)
def test_other_rates_above_are_not_recommended(pick, losses):
    suggestion, _ = pick(losses)
    assert (suggestion.rate, suggestion.next) == (2e-3, None)


def test_rates_with_the_same_loss_within_noise_are_named(pick):
    noise = iter([0.3, -0.2, 0.25, -0.35, 0.1] * 100)
    suggestion, _ = pick({1e-3: 1.0, 2e-3: 1.01, 4e-3: 2.0}, lambda step, final: final + next(noise) * (final == 1.01))
    assert (suggestion.rate, suggestion.equal) == (1e-3, (2e-3,))


def test_a_grid_is_extended_by_two_rates_of_the_same_distance():
    assert suggest.extended(RATES, "lowest") == [2.5e-4, 5e-4, *RATES]
    assert suggest.extended((1e-3, 3e-3), "highest") == [1e-3, 3e-3, 9e-3, 2.7e-2]


@pytest.mark.parametrize("rate", [*RATES, *suggest.FULL_RATES, 1e-3 * 2**0.5, 1e-5, 0.1 + 0.2])
def test_a_typed_rate_has_the_same_value(rate):
    (again, _) = suggest.rates_of(f"{suggest.as_typed(rate)},7")
    assert again == rate


def test_a_rate_that_diverged_is_not_picked_however_low_its_loss_was(pick):
    suggestion, shorts = pick({1e-3: 1.2, 2e-3: 1.1, 4e-3: "30", 8e-3: "4"})
    assert suggestion.rate == 2e-3
    assert [short.diverged for short in shorts] == [None, None, 30, 4]
    assert [short.loss is None for short in shorts] == [False, False, True, True]


def test_nothing_is_suggested_if_all_rates_diverged(pick):
    suggestion, _ = pick({rate: "7" for rate in RATES})
    assert suggestion.rate is None
    assert "all rates diverged" in suggestion.reason


def test_nothing_is_suggested_if_losses_are_equal_within_noise(pick):
    noise = iter([0.3, -0.2, 0.25, -0.35, 0.1] * 100)
    suggestion, _ = pick({1e-3: 1.0, 2e-3: 1.01, 4e-3: 1.02}, lambda step, final: final + next(noise) * (final > 1))
    assert suggestion.rate is None
    assert "same loss within noise" in suggestion.reason


def test_equal_losses_are_no_suggestion_and_small_but_steady_differences_are(pick):
    assert suggest.equal([1.0, 2.0], [1.0, 2.0])
    assert suggest.equal([1.0], [1.0])
    assert not suggest.equal([1.0, 3.0, 2.0], [1.01, 3.03, 2.03])


def test_a_rate_whose_loss_jumps_is_not_equal_to_one_whose_loss_falls():
    """Measured: SmolLM2-135M, batches of two sums, steps 3 to 12 at 0.002 and 0.008."""
    falls = [1.50, 1.73, 1.71, 1.17, 1.06, 1.16, 0.90, 0.21, 0.30, 0.27]
    jumps = [1.28, 1.65, 9.97, 1.15, 6.60, 2.37, 2.30, 0.95, 1.15, 2.06]
    near = [1.87, 1.74, 1.63, 1.16, 0.81, 1.26, 0.57, 0.44, 0.48, 0.73]
    assert not suggest.equal(falls, jumps)
    assert suggest.equal(falls, near)


def test_unfinished_runs_have_no_loss(run, tmp_path):
    schedule = ShortRuns(short_runs(run, RATES, STEPS), str(tmp_path))
    assert [(short.loss, short.step) for short in suggest.logged(schedule, STEPS)] == [(None, 0)] * 4


@pytest.mark.parametrize("text", ["1e-3", "1e-3,1e-3", "0,1e-3", "a,b", "1e-3,inf", "", "1e-3,nan"])
def test_rates_that_are_no_grid_are_refused(text):
    with pytest.raises(nalora.NALoRAError, match="--rates: found .*; expected two or more different positive numbers"):
        suggest.rates_of(text)


def test_rates_are_sorted():
    assert suggest.rates_of("4e-3, 1e-3,2e-3") == (1e-3, 2e-3, 4e-3)


def test_default_rates_suit_the_method_and_are_refused_for_other_optimizers():
    base = {"model": "smollm2-135m", "task": "gsm8k"}
    assert suggest.default_rates(check(base))[0] == 2.5e-4
    assert suggest.default_rates(check({**base, "method": "full"}))[-1] == pytest.approx(1.6e-3)
    with pytest.raises(nalora.NALoRAError, match="optimizer: sgd: found no default learning rates.*give --rates"):
        suggest.default_rates(check({**base, "optimizer": "sgd"}))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"stop_after": 9}, "stop_after: 9: found a run that stops early itself"),
        ({"schedule": "range_test"}, "schedule: range_test: found a run that tries learning rates itself"),
        (
            {"steps": 30},
            "--steps 30: found a run of 30 steps; .*give --steps 10, or train 2 times as long",
        ),
    ],
)
def test_runs_without_short_runs_are_refused(more, expected):
    run = check({"model": "smollm2-135m", "task": "gsm8k", "steps": 200, **more})
    with pytest.raises(nalora.NALoRAError, match=expected):
        short_runs(run, RATES, STEPS)


@pytest.fixture
def small(tmp_path):
    return {
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 48, "test_size": 8,
        "output": str(tmp_path / "run"), "steps": 9, "batch_size": 8, "log_every": 1, "device": "cpu",
        "max_length": 128, "validation_size": 8, "seed": 5, "snapshot_every": 1,
    }  # fmt: skip


def trained_losses(folder):
    rows = [json.loads(line) for line in RunFolder(folder).metrics.read_text().splitlines()]
    return [(row["loss"], row["grad_norm"], row["learning_rate"]) for row in rows]


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_short_run_is_the_beginning_of_the_whole_run_and_keeps_no_weights(small, tmp_path, method):
    whole = check({**small, "method": method, "learning_rate": 1e-2})
    study = short_runs(whole, (1e-3, 1e-2), 4)
    progress = conduct(study, tmp_path / "store", Instantly(suggest.train_shortly), schedule_of=ShortRuns)
    train(whole)
    _, short = suggest.logged(progress.schedule, 4)
    assert trained_losses(short.folder) == trained_losses(small["output"])[:4]
    assert list(short.losses) == [loss for loss, _, _ in trained_losses(small["output"])[:4]]
    assert not {"adapter", "model", "snapshots", "evaluations"} & {entry.name for entry in short.folder.iterdir()}
    assert RunFolder(small["output"]).trained.is_dir(), "those of the whole run stay"


def test_finished_short_runs_are_not_repeated_and_a_wider_grid_adds_its_own(small, tmp_path):
    def trained(rates):
        engine = Attempting(suggest.train_shortly)
        study = short_runs(check(small), rates, 3)
        conduct(study, tmp_path / "store", engine, retry_failed=True, schedule_of=ShortRuns)
        return len(engine.submitted)

    assert [trained((1e-3, 2e-3)), trained((1e-3, 2e-3)), trained((1e-3, 2e-3, 4e-3))] == [2, 0, 1]


def test_a_short_run_that_diverges_is_a_result(small, tmp_path):
    run = check({**small, "max_norm": 0.0, "warmup": 0.0, "method": "full"})
    engine = Attempting(suggest.train_shortly)
    progress = conduct(short_runs(run, (1e-3, 1e30), 6), tmp_path / "store", engine, schedule_of=ShortRuns)
    assert progress.missing == []
    fine, diverged = suggest.logged(progress.schedule, 6)
    assert (fine.diverged, diverged.loss) == (None, None)
    assert diverged.diverged is not None
    assert suggest.suggest([fine, diverged], known(), 6).rate == 1e-3


def test_a_worker_starts_without_peft():
    """Which imports bitsandbytes, whose warnings would be printed before the worker's output goes to its log."""
    code = "import sys, nalora.studies.suggest; print({'peft', 'bitsandbytes'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
