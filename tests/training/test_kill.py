"""kill -9 at random points of training and of evaluation: nothing finished is lost, and the end is the same."""

from __future__ import annotations

import random
import time

import pytest
import tiny
import torch
from forked import PROCESSES
from safetensors.torch import load_file

from nalora.runs.folder import RunFolder, read_jsonl

# Children of a process that has imported everything: a start costs a tenth of a second, not ten.
KILLS = pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])


def run_to_the_end(settings) -> None:
    from nalora.runs.settings import check
    from nalora.training.run import train

    torch.set_num_threads(1)
    train(check(settings), resume=RunFolder(settings["output"]).settings.is_file())


def ask_to_the_end(settings) -> None:
    from nalora.evaluation.targets import Request, evaluate_target

    torch.set_num_threads(1)
    evaluate_target(settings["output"], Request(with_base=False, batch_tokens=200))


def until_done(work, settings, kills: int, longest: float, after_kill=lambda: None) -> None:
    """Start the work again and again, killed at a random moment `kills` times, then left alone."""
    chance = random.Random(kills)
    for attempt in range(kills + 1):
        process = PROCESSES.Process(target=work, args=(settings,))
        process.start()
        if attempt < kills:
            process.join(chance.uniform(0.0, longest))
            process.kill()
            process.join()
            after_kill()
        else:
            process.join(120)
            assert process.exitcode == 0


def timed(work, settings) -> float:
    began = time.perf_counter()
    until_done(work, settings, kills=0, longest=0)
    return time.perf_counter() - began


@pytest.fixture
def settings(tmp_path):
    return {
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 64, "test_size": 60,
        "method": "na-lora", "output": str(tmp_path / "killed"), "steps": 24, "batch_size": 8, "log_every": 1,
        "save_every": 2, "device": "cpu", "learning_rate": 1e-3,
    }  # fmt: skip


def same_rows(folder):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in read_jsonl(RunFolder(folder).metrics)]


@KILLS
def test_training(settings, tmp_path, kills):
    whole = {**settings, "output": str(tmp_path / "whole")}
    seconds = timed(run_to_the_end, whole)
    steps_kept = [0]

    def no_checkpoint_is_lost():
        checkpoint = RunFolder(settings["output"]).latest_checkpoint()
        steps_kept.append(int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0)
        assert steps_kept[-1] >= steps_kept[-2]

    until_done(run_to_the_end, settings, kills, seconds, no_checkpoint_is_lost)
    expected, ours = (
        load_file(RunFolder(s["output"]).adapter / "adapter_model.safetensors") for s in (whole, settings)
    )
    assert all(torch.equal(tensor, ours[name]) for name, tensor in expected.items())
    assert same_rows(whole["output"]) == same_rows(settings["output"])


@KILLS
def test_evaluation(settings, tmp_path, kills):
    settings["steps"] = 1
    run_to_the_end(settings)
    whole = tmp_path / "whole"
    import shutil

    shutil.copytree(settings["output"], whole)
    seconds = timed(ask_to_the_end, {**settings, "output": str(whole)})
    finished: dict[str, dict] = {}

    def outputs():
        files = sorted((tmp_path / "killed").rglob("outputs.jsonl"))
        return {row["id"]: row for row in read_jsonl(files[0])} if files else {}

    def nothing_finished_is_lost():
        nonlocal finished
        now = outputs()
        # Scores are added to the rows when all are scored.
        assert all(row.items() <= now[key].items() for key, row in finished.items()) if finished else True
        finished = now

    until_done(ask_to_the_end, settings, kills, seconds, nothing_finished_is_lost)
    nothing_finished_is_lost()
    (expected,) = (read_jsonl(file) for file in whole.rglob("outputs.jsonl"))
    assert len(finished) == 60
    assert list(finished.values()) == expected
    assert {"question", "expected", "outputs", "scores"} <= expected[0].keys()
    summaries = [next(folder.rglob("summary.json")).read_text() for folder in (whole, tmp_path / "killed")]
    measures = [text[: text.index('"unfinished"')] for text in summaries]
    assert measures[0] == measures[1]
