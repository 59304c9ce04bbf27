"""Only evaluations of the same questions are compared, whatever the name of their task."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nalora.report.data import differences, read_run, read_runs
from nalora.report.evaluations import Evaluation, label
from nalora.report.html import page
from nalora.report.run_tables import run_tables
from nalora.report.sections import scores
from nalora.report.sentences import findings
from report.run_folders import EVALUATED, summary, write, write_run

PLACE = ("evaluations", "gym", "chain_sum")


def evaluate(run, folder, right=31, of=100, records=None, study=False, **evaluated):
    """Write a summary, with `old` as version 0.1 did."""
    found = summary(right, of)
    if evaluated.pop("old", False):
        del found["evaluated"]
    else:
        found["evaluated"] = EVALUATED | evaluated
    place = run.joinpath(*PLACE, folder)
    write(place / "summary.json", found)
    if records:
        rows = [{"id": f"q{i}", "loss": 1.0, "tokens": tokens} for i, tokens in enumerate(records)]
        (place / "losses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if study:
        write(place / "losses.json", found)


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path, evaluated=False)


def test_another_data_set_under_the_same_task_is_another_column(run):
    """The base model was evaluated on SVAMP, the adapter on ASDiv: they cannot be compared."""
    evaluate(run, "base-a", right=4, questions="aaaa", data="SVAMP")
    evaluate(run, "adapted-b", right=90, questions="bbbb", data="ASDiv")
    read = read_run(run)
    assert read.evaluations.keys() == {"gym/chain_sum (data SVAMP)", "gym/chain_sum (data ASDiv)"}
    assert [list(asked) for asked in read.evaluations.values()] == [["base"], ["adapted"]]
    assert not any(word in sentence for sentence in findings([read]) for word in (" rose ", " fell ", " went from "))
    text = scores([read])
    assert text.count("<table") == 2
    (notice,) = differences([read])
    assert "SVAMP" in notice
    assert "cannot be compared" in notice
    assert [column.measure for column in run_tables([read])["Results"].columns] == [
        "gym/chain_sum (data ASDiv): accuracy", "gym/chain_sum (data ASDiv): loss of the answers",
    ]  # fmt: skip
    assert "data SVAMP" in page([read])


@pytest.mark.parametrize(
    ("one", "other", "labels"),
    [
        ({"style": "chat"}, {}, ("chat style", "plain style")),
        ({"options": {"shots": 8}}, {"options": {"shots": 0}}, ("shots=8", "shots=0")),
        ({"max_new_tokens": 16}, {}, ("at most 16 tokens", "at most 8 tokens")),
        ({"of": 50}, {}, ("50 questions", "100 questions")),
        ({"questions": "abcdef123"}, {}, ("questions abcdef", "questions 012345")),
    ],
)
def test_what_differs_is_in_the_label(tmp_path, one, other, labels):
    runs = [write_run(tmp_path, name=name, evaluated=False) for name in ("one", "other")]
    for path, told in zip(runs, (one, other), strict=True):
        evaluate(path, "adapted-0", **told)
    names = [list(run.evaluations) for run in read_runs(runs)]
    assert names == [[f"gym/chain_sum ({label})"] for label in labels]


def test_evaluations_of_the_same_questions_share_a_name(tmp_path):
    """The name of the data's folder does not matter, only its content."""
    runs = [write_run(tmp_path, name=name, evaluated=False) for name in ("one", "other")]
    for path, data in zip(runs, ("here", "there"), strict=True):
        evaluate(path, "base-0", data=data)
        evaluate(path, "adapted-0", data=data)
    read = read_runs(runs)
    assert [list(each.evaluations) for each in read] == [["gym/chain_sum"]] * 2
    assert differences(read) == []


def test_summaries_of_0_1_without_proof_are_kept_apart(run):
    evaluate(run, "base-0", right=4, old=True)
    evaluate(run, "adapted-1", old=True)
    read = read_run(run)
    assert len(read.evaluations) == 2
    assert all("questions not recorded" in name for name in read.evaluations)
    assert "nalora evaluate RUN" in differences([read])[0]


def test_summaries_of_0_1_with_the_same_recorded_questions_share_a_name(run):
    evaluate(run, "base-0", right=4, old=True, records=[3, 5, 8])
    evaluate(run, "adapted-1", old=True, records=[3, 5, 8])
    assert list(read_run(run).evaluations) == ["gym/chain_sum"]


def test_summaries_of_0_1_with_other_recorded_questions_do_not(run):
    evaluate(run, "base-0", right=4, old=True, records=[3, 5, 8])
    evaluate(run, "adapted-1", old=True, records=[3, 5, 9])
    assert len(read_run(run).evaluations) == 2


@pytest.mark.parametrize(("settings", "alike"), [({}, True), ({"data_dir": "elsewhere"}, False)])
def test_evaluations_of_a_0_1_study_share_a_name_if_settings_are_equal(tmp_path, settings, alike):
    runs = [
        write_run(tmp_path, name="one", evaluated=False), write_run(tmp_path, name="other", evaluated=False, **settings)
    ]  # fmt: skip
    for number, path in enumerate(runs):
        evaluate(path, f"adapted-{number}", old=True, study=True)
    early = json.loads(runs[0].joinpath(*PLACE, "adapted-0", "summary.json").read_text())
    del early["questions"]  # the first summaries did not have it
    write(runs[0].joinpath(*PLACE, "adapted-0", "summary.json"), early)
    names = {name for each in read_runs(runs) for name in each.evaluations}
    assert len(names) == (1 if alike else 2)


def test_an_old_and_a_new_summary_are_kept_apart(run):
    evaluate(run, "base-0", right=4, old=True)
    evaluate(run, "adapted-1")
    assert len(read_run(run).evaluations) == 2


def test_a_partial_evaluation_of_both_models_is_shown_until_both_have_a_complete_one(run):
    evaluate(run, "base-0", of=100)
    for who in ("base", "adapted"):
        path = run.joinpath(*PLACE, f"{who}-1", "summary.json")
        write(path, summary(2, of=5) | {"questions": 100})
    first = "gym/chain_sum (first 5 of 100 questions)"
    read = read_run(run)
    assert set(read.evaluations[first]) == {"base", "adapted"}
    evaluate(run, "adapted-2", of=100)
    assert list(read_run(run).evaluations) == ["gym/chain_sum"]


descriptions = st.fixed_dictionaries({
    "questions": st.sampled_from(["aaaaaaaa", "aaaaaabb", "cc"]), "style": st.sampled_from(["plain", "chat"]),
    "options": st.dictionaries(st.sampled_from(["k", "n"]), st.integers(0, 1)), "max_new_tokens": st.just(8),
    "data": st.sampled_from([None, "a", "b"]),
})  # fmt: skip


@given(st.lists(st.lists(st.tuples(st.sampled_from(["base", "adapted"]), descriptions), max_size=3), max_size=4))
def test_a_name_is_one_set_of_questions_in_all_runs(runs):
    def evaluation(number, who, evaluated):
        told = json.dumps({k: v for k, v in evaluated.items() if k != "data"}, sort_keys=True)
        found = {"examples": 9, "questions": 9, "evaluated": evaluated, "alike": told}
        return Evaluation("t", False, who, found, f"{who}-{number}", frozenset({told}), number)

    read = [[evaluation(n, *each) for n, each in enumerate(run)] for run in runs]
    by_name: dict[str, set[str]] = {}
    for named in label(read):
        for name, asked in named.items():
            by_name.setdefault(name, set()).update(found["alike"] for found in asked.values())
    assert all(len(alike) == 1 for alike in by_name.values())
    assert len({next(iter(alike)) for alike in by_name.values()}) == len(by_name)
    assert {told for alike in by_name.values() for told in alike} == {
        each.summary["alike"] for run in read for each in run
    }
