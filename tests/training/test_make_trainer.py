"""How a batch is split over processes and passes, and the errors if it cannot be."""

from __future__ import annotations

import pytest
import tiny

from nalora import NALoRAError
from nalora.distributed import processes
from nalora.runs.folder import RunFolder, read_jsonl
from nalora.runs.settings import RunSettings, check
from nalora.training.batches import Split, split_batch
from nalora.training.run import train


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    def launch(count):
        monkeypatch.setattr(processes, "count", lambda: count)

    return launch


def settings(batch_size, micro_batch_size=None):
    return RunSettings("model", "task", batch_size=batch_size, micro_batch_size=micro_batch_size)


@pytest.mark.parametrize(
    ("count", "batch", "micro", "split"),
    [(1, 8, None, (8, 1, 1)), (2, 8, None, (4, 1, 2)), (2, 8, 2, (2, 2, 2)), (8, 8, None, (1, 1, 8))],
)
def test_a_step_is_the_batch_however_it_is_split(launched, count, batch, micro, split):
    launched(count)
    assert split_batch(settings(batch, micro)) == Split(*split)


@pytest.mark.parametrize("count", [3, 16])
@pytest.mark.parametrize("micro", [None, 1, 2])
def test_a_wrong_number_of_processes_names_those_that_fit(launched, count, micro):
    launched(count)
    with pytest.raises(NALoRAError, match="divides it: 1, 2, 4, 8") as refused:
        split_batch(settings(8, micro))
    assert "micro_batch_size" not in str(refused.value)
    assert f"a multiple of {count}" in refused.value.fix


def test_a_wrong_micro_batch_size_names_what_fits(launched):
    launched(2)
    with pytest.raises(NALoRAError, match="set micro_batch_size to a divisor of 4"):
        split_batch(settings(8, 8))
    assert split_batch(settings(8, 4)).accumulated == 1


@pytest.mark.parametrize(("warmup", "rising"), [(0, 0), (0.5, 5), (1, 10), (1.0, 10)])
def test_a_warmup_of_one_is_the_whole_run(tmp_path, warmup, rising):
    """Every value is a share of the steps."""
    run = check({
        "model": tiny.saved_llama(tmp_path / "base", layers=1), "task": "gym/chain_sum", "train_size": 8,
        "test_size": 2, "output": str(tmp_path / "run"), "steps": 10, "batch_size": 2, "log_every": 1, "device": "cpu",
        "warmup": warmup, "learning_rate": 1e-3, "schedule": "constant_with_warmup",
    })  # fmt: skip
    train(run)
    rates = [row["learning_rate"] for row in read_jsonl(RunFolder(tmp_path / "run").metrics)]
    assert rates == pytest.approx([1e-3 * min(1.0, step / rising) if rising else 1e-3 for step in range(10)])


@pytest.mark.parametrize("warmup", [-0.1, 1.5, 100])
def test_a_warmup_that_is_no_share_is_refused(warmup):
    with pytest.raises(NALoRAError, match="warmup.*a share between 0 and 1"):
        check({"model": "m", "task": "gym/chain_sum", "warmup": warmup})
