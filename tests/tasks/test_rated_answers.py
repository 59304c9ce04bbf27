"""A judge as the measure of one's own data: requested at the start, recorded, and never asked twice."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny

from nalora import NALoRAError, tasks
from nalora.evaluation.targets import Request, evaluate_target
from nalora.runs import settings
from nalora.tasks.rated_answers import grading_prompt
from nalora.training.run import train

TURNS = [("system", "Be {short}."), ("user", "What is {0}?"), ("assistant", "A brace."), ("user", "And {n}?")]


@pytest.fixture
def chat(tmp_path):
    rows = [
        {"messages": [*({"role": r, "content": c} for r, c in TURNS), {"role": "assistant", "content": f"It is {n}."}]}
        for n in range(12)
    ]
    for n, row in enumerate(rows):
        row["messages"][3] = {"role": "user", "content": f"And {{{n}}}?"}
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "chat.jsonl")


def test_the_judge_sees_conversation_expected_answer_and_answer(chat, server, tmp_path):
    task = tasks.get(chat, measure=["judge", "f1"], judge_model="judge-1", judge_url=server.url)
    assert task.measures == ("judge", "f1")
    example = task.test_examples()[0]
    scores = task.score(example, ["Rating: [[10]]"])
    assert scores == {"judge": 7.0, "f1": 0.0}
    (prompt,) = server.prompts
    assert prompt == grading_prompt(example, "Rating: [[10]]")
    for part in ("system: Be {short}.", "assistant: A brace.", f"### EXPECTED ANSWER\n{example.target}\n"):
        assert part in prompt
    assert prompt.endswith("### ANSWER\nRating: [[10]]")


def test_a_missing_judge_is_reported_before_anything_is_loaded(chat, monkeypatch):
    run = {"model": "smollm2-135m", "task": chat, "measure": "judge"}
    with pytest.raises(NALoRAError, match="no judge for measure: judge"):
        settings.check(run).refuse_unready()
    settings.check(run | {"judge_model": None}).refuse_unready()
    settings.check(run | {"judge_model": "judge-1"}).refuse_unready()
    monkeypatch.setattr(tasks, "get", lambda *_, **__: pytest.fail("the file was read"))
    settings.check(run | {"measure": "f1"}).refuse_unready()


def test_an_evaluation_asks_first_and_records_every_answer(chat, server, tmp_path):
    run = settings.check({
        "model": tiny.saved_llama(tmp_path / "base", layers=1), "task": chat, "output": str(tmp_path / "run"),
        "steps": 1, "batch_size": 2, "max_length": 256, "max_new_tokens": 3, "device": "cpu", "measure": "judge",
        "judge_model": "judge-1", "judge_url": server.url,
    })  # fmt: skip
    train(run)
    server.reply = lambda prompt, number: 401
    with pytest.raises(NALoRAError, match="the key was rejected"):
        evaluate_target(str(tmp_path / "run"), Request(trust=True))
    assert not list((tmp_path / "run" / "evaluations").rglob("outputs.jsonl"))
    server.reply, server.requests[:] = (lambda prompt, number: "[[7]]" if number % 2 else "[[3]]"), []
    summaries = evaluate_target(str(tmp_path / "run"), Request(trust=True))
    assert 3 <= summaries["adapted"]["measures"]["judge"]["value"] <= 7
    rated = [prompt for prompt in server.prompts if prompt != "Say yes."]
    assert len(rated) == len(set(rated)) > 0
    (record,) = (tmp_path / "run" / "evaluations").rglob("judgements.jsonl")
    assert len(record.read_text().splitlines()) == len(rated)
    # Scores that are lost are read from the record.
    for file in (tmp_path / "run" / "evaluations").rglob("scores.jsonl"):
        file.unlink()
    again = evaluate_target(str(tmp_path / "run"), Request(trust=True))
    assert again["adapted"]["measures"] == summaries["adapted"]["measures"]
    assert len([prompt for prompt in server.prompts if prompt != "Say yes."]) == len(rated)


@pytest.mark.slow
def test_a_real_server_rates_answers(chat, transformers_server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    url, model = transformers_server
    options = dict(measure="judge", judge_model=model, judgements=tmp_path / "judged.jsonl")
    task = tasks.get(chat, judge_url=url, judge_tokens=8, **options)
    task.prepare_scoring()
    examples = [*task.train_examples()][:4]
    with ThreadPoolExecutor(task.scoring_threads) as threads:
        assert [*threads.map(lambda example: task.score(example, ["one"]), examples)] == [{"judge": 7.0}] * 4
    unreachable = tasks.get(chat, judge_url="http://127.0.0.1:9/v1", **options)
    assert unreachable.score(examples[3], ["one"]) == {"judge": 7.0}, "recorded, not requested"
    with pytest.raises(NALoRAError, match="no answer"):
        unreachable.prepare_scoring()
