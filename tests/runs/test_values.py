"""What a run needs for its evaluation or its logs is checked before a model is loaded."""

from __future__ import annotations

import json

import pytest
from transformers.integrations.integration_utils import get_available_reporting_integrations

from nalora.errors import NALoRAError
from nalora.models import loading
from nalora.runs.settings import check, read
from nalora.runs.values import refuse_missing_loggers
from nalora.training.run import train

MISSING = next(name for name in ("wandb", "clearml", "swanlab") if name not in get_available_reporting_integrations())


@pytest.mark.parametrize("report_to", [MISSING, ["none", MISSING]])
def test_a_logger_that_is_not_installed_is_named_before_the_model_is_loaded(tmp_path, monkeypatch, report_to):
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("loaded a model"))
    run = check({
        "model": "smollm2-135m", "task": "gsm8k", "device": "cpu", "report_to": report_to,
        "output": str(tmp_path / "run"),
    })  # fmt: skip
    with pytest.raises(NALoRAError, match=f"no package {MISSING}.*Fix: pip install {MISSING}"):
        train(run)
    assert list(tmp_path.iterdir()) == []


def test_loggers_that_need_nothing_are_taken():
    for report_to in ("none", "all", [], ["none"], *get_available_reporting_integrations()):
        refuse_missing_loggers(report_to)


@pytest.fixture
def judging(tmp_path):
    """FastChat's files, as far as they are looked for before training."""
    (tmp_path / "judge_prompts.jsonl").write_text(json.dumps({"name": "single-v1"}))
    (tmp_path / "reference_gpt-4.jsonl").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("recipe", ["llama-2-7b-chat", "llama-3.1-8b-chat"])
def test_mt_bench_needs_a_judge_before_training(recipe, judging, tmp_path):
    with pytest.raises(NALoRAError, match=r"no judge for MT-Bench.*add judge_model=NAME and data_dir=FOLDER"):
        read(recipe).refuse_unready()
    with pytest.raises(NALoRAError, match="found no data_dir; expected mt_bench/judge_prompts.jsonl there"):
        read(recipe, ["judge_model=gpt-4"]).refuse_unready()
    (tmp_path / "empty").mkdir()
    with pytest.raises(NALoRAError, match=r"judge_prompts\.jsonl"):
        read(recipe, ["judge_model=gpt-4", f"data_dir={tmp_path / 'empty'}"]).refuse_unready()
    read(recipe, ["judge_model=gpt-4", f"data_dir={judging}"]).refuse_unready()
    read(recipe, ["judge_model=null"]).refuse_unready()


@pytest.mark.parametrize("task", ["gsm8k", "humaneval", "sst2", "digits"])
def test_other_tasks_need_no_judge(task):
    check({"model": "m", "task": task}).refuse_unready()


@pytest.mark.parametrize("value", [True, 3, "gate_proj", [0.5], {"gate_proj": "half"}, {"gate_proj": 0}])
def test_learning_rate_factors_of_another_kind_are_refused(value):
    with pytest.raises(NALoRAError, match="learning_rate_factors"):
        check({"model": "m", "task": "gsm8k", "learning_rate_factors": value})
