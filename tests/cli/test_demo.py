"""The demo on a tiny random Llama: its data file, real runs, the comparison, examples and the files it leaves."""

from __future__ import annotations

import io
import json

import pytest
import tiny
from rich.console import Console

from nalora.cli import demo


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    model = tiny.saved_llama(tmp_path_factory.mktemp("model"))
    return [
        f"model={model}",
        "prompt_style=plain",
        "steps=2",
        "test_share=0.03",
        "device=cpu",
        "max_length=900",
    ]


def run(folder, settings) -> tuple[bool, str]:
    screen = io.StringIO()
    finished = demo.run(Console(file=screen, width=160), folder=folder, settings=settings)
    return finished, screen.getvalue()


def test_both_arms_are_compared_with_intervals_and_examples(tmp_path, settings):
    finished, printed = run(tmp_path, settings)
    assert finished
    for part in ("before training", "LoRA", "NA-LoRA", "%", "…", "One seed", "apply_to=update"):
        assert part in printed
    assert f"nalora chat {tmp_path / 'lora'}" in printed.splitlines()[-1]
    (wrong,) = [line for line in printed.splitlines() if "What is" in line][-1:]
    assert wrong.split("?")[0].strip() in (tmp_path / "sums.jsonl").read_text().replace('{"question": "', ""), (
        "a real question"
    )
    results = json.loads((tmp_path / "result.json").read_text())
    assert [each["arm"]["name"] for each in results] == [arm.name for arm in demo.ARMS]
    assert results[0]["gates"] == {}
    assert results[1]["gates"]["p_res"] > 0
    # The same start and the same batches: the first loss is the same.
    losses = [
        json.loads((tmp_path / arm.name / "metrics.jsonl").read_text().splitlines()[0])["loss"] for arm in demo.ARMS
    ]
    assert losses[0] == losses[1]
    assert not list((tmp_path / "na-lora").rglob("base-*")), "the base model is evaluated once"
    assert "report.html" in printed
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(arm.name in page for arm in demo.ARMS)
    assert all((tmp_path / arm.name / "diagnosis.json").is_file() for arm in demo.ARMS)


def test_ctrl_c_keeps_what_is_finished_and_the_next_call_continues(tmp_path, settings, monkeypatch):
    train = demo.train
    trained = []

    def interrupted(described, **options):
        if len(trained) == 1:
            raise KeyboardInterrupt
        trained.append(described)
        return train(described, **options)

    with monkeypatch.context() as patched:
        patched.setattr(demo, "train", interrupted)
        finished, printed = run(tmp_path, settings)
    assert not finished
    assert "continues from here" in printed
    assert "Examples" in printed
    assert not (tmp_path / "na-lora").exists()
    assert not (tmp_path / "result.json").exists()
    assert run(tmp_path, settings)[0]
