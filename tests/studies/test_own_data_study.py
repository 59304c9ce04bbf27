"""A study on conversations from a file: the real work, without workers; a changed file is another task."""

from __future__ import annotations

import json

import tiny
from dummies import Instantly

from nalora.studies.conduct import conduct
from nalora.studies.job import work
from nalora.studies.store import ANSWERS, TEST, VALIDATION, key
from nalora.studies.study import parse

TURNS = [("user", "Hi {}"), ("assistant", "Hello"), ("user", "{} + 1 ="), ("assistant", "{}")]


def test_a_study_compares_methods_on_conversations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chats = [{"messages": [{"role": r, "content": c.format(n)} for r, c in TURNS]} for n in range(40)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, chats)))
    study = parse({
        "name": "chats",
        "settings": {"model": tiny.saved_llama(tmp_path / "base", layers=1), "task": "chat.jsonl", "rank": 4,
                     "steps": 2, "batch_size": 4, "device": "cpu", "max_new_tokens": 2, "max_length": 128,
                     "measure": "contains"},
        "arms": {"lora": {"method": "lora"}, "na-lora": {"method": "na-lora", "apply_to": "update"}},
        "learning_rates": [1e-3], "validation_size": 4, "seeds": [0],
    })  # fmt: skip
    done = conduct(study, tmp_path / "store", Instantly(work))
    assert len(done.results) == 2
    for result in done.results.values():
        assert result.has_all((VALIDATION, TEST, ANSWERS))
        assert [*result.measures] == ["contains"]
    again = Instantly(work)
    conduct(study, tmp_path / "store", again)
    assert again.submitted == []
    before = {key(study.run({}, arm, 1e-3, 0)) for arm in study.arms_in({})}
    assert before == {*done.results}
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, chats[1:])))
    assert not before & {key(study.run({}, arm, 1e-3, 0)) for arm in study.arms_in({})}
