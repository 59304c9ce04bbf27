"""Answers that a scorer would run as Python do nothing, are wrong, and change no other mark."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from pathlib import Path

import pytest

from nalora import tasks
from nalora.errors import NALoRAError
from nalora.tasks import isolated_scorer, sandbox
from nalora.tasks.isolated_scorer import LIMITS, evaluates_answers

factory = pytest.importorskip("reasoning_gym.factory")
DatasetSpec = pytest.importorskip("reasoning_gym.composite").DatasetSpec

# One whose scorer calls eval, one whose scorer calls sympy's parse_expr, which does.
FAMILIES = ["spiral_matrix", "polynomial_multiplication"]
PATCH = "__import__('builtins').__dict__.__setitem__('float', lambda x: 1)"


@pytest.fixture(scope="module", params=FAMILIES)
def task(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")  # polynomial_multiplication draws by it
        made = tasks.get(f"gym/{request.param}", train_size=5, test_size=5)
    made._isolated.limits = dataclasses.replace(LIMITS, wall_seconds=2, cpu_seconds=1)
    yield made
    made._isolated.close()


def marks_are_right(task) -> bool:
    """Whether a right and a wrong answer still get what the family's own scorer gives them."""
    right, wrong = task.test_examples()[:2]
    given = [task.score(right, [answer])["score"] for answer in (right.target, wrong.target)]
    own = task._datasets["test"].score_answer
    return given == [own(answer, task._entry("test", 0)) for answer in (right.target, wrong.target)] and given[0] == 1


@pytest.mark.parametrize(
    "answer",
    [
        "[__import__('os').system('touch FILE')]",
        "[open('FILE', 'w').write('here')]",
        "exit()",
        "[exit()]",
        "[__import__('os')._exit(0)]",
        "[__import__('os').kill(__import__('os').getppid(), 9)]",
        "[9**9**9**9]",
        "9**9**9**9",
        "[' ' * (1 << 40)]",
        f"[{PATCH}]",
        "[__import__('os').fork()]",
    ],
)
def test_a_hostile_answer_is_wrong_and_touches_nothing(task, answer, tmp_path):
    file = tmp_path / "written"
    start = time.monotonic()
    scores = task.score(task.test_examples()[0], [answer.replace("FILE", str(file))])
    assert scores["accuracy"] == 0
    assert time.monotonic() - start < 10
    assert not file.exists()
    assert marks_are_right(task)


def test_an_answer_leaves_no_file_for_the_next():
    task = tasks.get("gym/spiral_matrix", train_size=1, test_size=1)
    example = task.test_examples()[0]
    numbers = ", ".join(example.target.split())
    # Right where it may make a file that is not there yet.
    answer = f"[open('/tmp/nalora-left', 'x').close()] and [{numbers}]"
    marks = [task.score(example, [each])["score"] for each in (f"[{numbers}]", answer, answer)]
    assert marks[0] == marks[1] == marks[2] > 0
    assert not Path("/tmp/nalora-left").exists()


def test_a_scorer_that_was_killed_is_started_again(task):
    assert marks_are_right(task)
    task._isolated._process.kill()
    task._isolated._process.wait()
    assert marks_are_right(task)


def test_it_outlives_the_thread_that_started_it(task):
    task._isolated.close()
    thread = threading.Thread(target=marks_are_right, args=[task])
    thread.start()
    thread.join()
    process = task._isolated._process
    assert marks_are_right(task)
    assert task._isolated._process is process


def test_packages_may_lie_in_the_folder_that_is_another_inside(task, tmp_path, monkeypatch):
    """An environment in /tmp, as that of a fresh clone there, is hidden by the sandbox's own /tmp."""
    places = [tmp_path / str(place) for place, _ in enumerate(isolated_scorer._package_folders())]
    for place, source in zip(places, isolated_scorer._package_folders(), strict=True):
        place.symlink_to(source)
    monkeypatch.setattr(isolated_scorer, "_package_folders", lambda: [str(place) for place in places])
    task._isolated.close()
    assert marks_are_right(task)


def test_it_ends_with_its_task():
    task = tasks.get("gym/n_queens", train_size=1, test_size=1)
    example = task.test_examples()[0]
    assert task.score(example, [example.target])["accuracy"] == 1
    process = task._isolated._process
    del task
    gc.collect()
    assert process.poll() is not None


@pytest.mark.parametrize(
    ("family", "evaluates"),
    [
        *((family, True) for family in ("string_insertion", "n_queens", "spiral_matrix", "binary_matrix")),
        *((family, True) for family in ("simple_integration", "countdown", "puzzle24", "coin_flip", "composite")),
        *((family, False) for family in ("chain_sum", "syllogism", "rearc", "letter_counting")),
    ],
)
def test_scorers_that_evaluate_are_found(family, evaluates):
    settings = {"datasets": [DatasetSpec("n_queens", 1, {})]} if family == "composite" else {}
    assert evaluates_answers(factory.create_dataset(family, size=1, seed=0, **settings)) == evaluates


def test_harmless_families_are_scored_at_once():
    task = tasks.get("gym/chain_sum", train_size=1, test_size=200)
    examples = task.test_examples()
    start = time.monotonic()
    assert all(task.score(example, [example.target])["accuracy"] == 1 for example in examples)
    assert time.monotonic() - start < 1  # 5 ms each


def test_without_isolation_it_is_refused_before_anything_is_written(monkeypatch):
    monkeypatch.setattr(sandbox, "_chosen", [])
    monkeypatch.setattr(sandbox, "_ways", list)
    with pytest.raises(NALoRAError, match="--unsafe-code"):
        tasks.get("gym/n_queens", train_size=1, test_size=2).prepare_scoring()
    tasks.get("gym/chain_sum", train_size=1, test_size=2).prepare_scoring()
    unsafe = tasks.get("gym/n_queens", train_size=1, test_size=2, unsafe_code=True)
    unsafe.prepare_scoring()
    example = unsafe.test_examples()[0]
    assert unsafe.score(example, ["[exit()]"])["accuracy"] == 0
    assert unsafe.score(example, [example.target])["accuracy"] == 1


@pytest.mark.parametrize("way", sandbox._ways())
def test_every_way_of_this_machine_scores(way, monkeypatch):
    fault = sandbox._fault(way)
    if fault is not None and "processes" not in fault:  # as for programs: Linux holds no such limit against user 0
        pytest.skip(f"cannot be had here: {fault}")
    monkeypatch.setattr(sandbox, "_chosen", [way])
    task = tasks.get("gym/n_queens", train_size=1, test_size=2)
    assert marks_are_right(task)
    assert task.score(task.test_examples()[0], ["[exit()]"])["accuracy"] == 0
    assert marks_are_right(task)
