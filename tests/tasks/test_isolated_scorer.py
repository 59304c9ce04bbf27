"""Answers that a scorer would run as Python are not run, are wrong, and change no other score; none takes forever."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
import threading
import time

import pytest

from nalora import tasks
from nalora.errors import NALoRAError
from nalora.tasks import isolated_scorer, sandbox, sandbox_view
from nalora.tasks.isolated_scorer import LIMITS, ScorerProcess, evaluates_answers

factory = pytest.importorskip("reasoning_gym.factory")
DatasetSpec = pytest.importorskip("reasoning_gym.composite").DatasetSpec

# One whose scorer calls eval, one whose scorer calls sympy's parse_expr, which does.
FAMILIES = ["spiral_matrix", "polynomial_multiplication"]
PATCH = "__import__('builtins').__dict__.__setitem__('float', lambda x: 1)"


@pytest.fixture(scope="module", params=FAMILIES)
def task(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")  # polynomial_multiplication depends on it
        made = tasks.get(f"gym/{request.param}", train_size=5, test_size=5)
    made._scorer.limits = dataclasses.replace(LIMITS, wall_seconds=2, cpu_seconds=1)
    return made


def scores_are_right(task) -> bool:
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
        # Written to the pipe of the scores: as the answer's own score, and as the next one's.
        "[[__import__('os').write(fd, b'1.0\\n') for fd in (1, 3, 4, 5, 6, 7)]]",
        "[__import__('os').write(4, b'1.0')]",
        "(lambda: __import__('os').write(4, b'1.0\\n'))()",
        "[].__class__.__base__.__subclasses__()",
        "Symbol('x').__class__.__init__.__globals__",
        'sympify(\'__import__("os").write(4, b"1.0")\')',
    ],
)
def test_a_hostile_answer_is_wrong_and_touches_nothing(task, answer, tmp_path):
    file = tmp_path / "written"
    start = time.monotonic()
    scores = task.score(task.test_examples()[0], [answer.replace("FILE", str(file))])
    assert scores["accuracy"] == 0
    assert time.monotonic() - start < 10
    assert not file.exists()
    assert scores_are_right(task)


def test_lists_and_formulas_are_still_read():
    task = tasks.get("gym/spiral_matrix", train_size=1, test_size=1)
    example = task.test_examples()[0]
    numbers = ", ".join(example.target.split())
    assert task.score(example, [f"[{numbers}]"])["score"] == 0.1, "the family's own score for a Python list"
    task = tasks.get("gym/simple_integration", train_size=1, test_size=5)
    for example in task.test_examples():
        assert task.score(example, [f"{example.target} + 7"])["accuracy"] == 1
        # sympy would solve the question itself.
        integrand = task._entry_of(example)["metadata"]["integrand"]
        assert task.score(example, [f"integrate({integrand})"])["accuracy"] == 0


@pytest.mark.parametrize("family", ["chain_sum", "rush_hour", "coin_flip", "prime_factorization"])
def test_no_answer_takes_forever_and_the_others_keep_their_scores(family):
    """Answers that these scorers count to, multiply out or fill the memory with."""
    task = tasks.get(f"gym/{family}", train_size=1, test_size=3)
    task._scorer.limits = dataclasses.replace(LIMITS, wall_seconds=2, cpu_seconds=1)
    examples = task.test_examples()
    for answer in ("E+999999999999", "1e999999999", "9" * 5000):
        start = time.monotonic()
        assert task.score(examples[0], [answer])["accuracy"] == 0
        assert time.monotonic() - start < 15
    if examples[0].target:
        hostile = [(examples[0], "1e999999999"), *((example, example.target) for example in examples)]
        assert task.scores(hostile) == [0, 1, 1, 1]


@pytest.mark.parametrize("answer", ["nan", "NaN", "-nan", "inf", "-Infinity", "nan+nanj", "infi", "nan + nani"])
def test_not_a_number_equals_no_number(answer):
    """complex_arithmetic gives min(1, exp(-nan)) = 1."""
    task = tasks.get("gym/complex_arithmetic", train_size=1, test_size=3)
    assert [task.score(example, [answer]) for example in task.test_examples()] == [{"accuracy": 0, "score": 0}] * 3


def test_scores_are_numbers_from_0_to_1(monkeypatch):
    from nalora.tasks.sandboxed import scorer

    given = [
        (b"0.5", 0.5),
        (b"1", 1.0),
        (b"nan", 0.0),
        (b"inf", 0.0),
        (b"-1", 0.0),
        (b"1.5", 0.0),
        (b"", 0.0),
        (b"x", 0.0),
    ]
    assert [scorer._checked(line) for line, _ in given] == [score for _, score in given]


def test_a_scorer_that_was_killed_is_started_again(task):
    assert scores_are_right(task)
    task._scorer.process._process.kill()
    task._scorer.process._process.wait()
    assert scores_are_right(task)


def test_it_outlives_the_thread_that_started_it(task):
    task._scorer.process.close()
    thread = threading.Thread(target=scores_are_right, args=[task])
    thread.start()
    thread.join()
    process = task._scorer.process._process
    assert scores_are_right(task)
    assert task._scorer.process._process is process


def test_packages_may_be_in_a_folder_that_the_sandbox_replaces(tmp_path, monkeypatch):
    """An environment in /tmp, as that of a fresh clone there, is hidden by the sandbox's own /tmp."""
    files = sandbox_view.package_files(["reasoning_gym"])
    for file in files:
        (tmp_path / file.name).symlink_to(file)
    monkeypatch.setattr(sandbox_view, "package_files", lambda names: [tmp_path / file.name for file in files])
    sandbox_view.view.cache_clear()
    try:
        process = ScorerProcess(isolated=True, limits=LIMITS)
        entry = factory.create_dataset("n_queens", size=1, seed=0)[0]
        assert process.request(("n_queens", {"size": 1, "seed": 0}, [(entry["answer"], entry)]), waits=1) == "[1.0]"
        process.close()
    finally:
        sandbox_view.view.cache_clear()


def test_it_serves_all_tasks_and_ends_with_its_process(tmp_path):
    code = """
import os
from nalora import tasks
for family in ("chain_sum", "gcd"):
    task = tasks.get(f"gym/{family}", train_size=1, test_size=1)
    example = task.test_examples()[0]
    assert task.score(example, [example.target])["accuracy"] == 1
    print(task._scorer.process._process.pid)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = map(int, ended.stdout.split())
    assert first == second
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


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


def test_own_answers_are_scored_in_one_go():
    task = tasks.get("gym/chain_sum", train_size=1, test_size=200)
    examples = task.test_examples()
    task.scores([(examples[0], "1")])  # starts the process
    start = time.monotonic()
    assert task.scores([(example, example.target) for example in examples]) == [1] * 200
    assert time.monotonic() - start < 2


def test_without_isolation_it_is_refused_before_anything_is_written(monkeypatch):
    monkeypatch.setattr(sandbox, "check", sandbox.check.__wrapped__)
    monkeypatch.setattr(sandbox, "_backends", list)
    monkeypatch.setattr(isolated_scorer, "_process", functools.cache(isolated_scorer._process.__wrapped__))
    with pytest.raises(NALoRAError, match="--unsafe-code"):
        tasks.get("gym/n_queens", train_size=1, test_size=2).prepare_scoring()
    tasks.get("gym/chain_sum", train_size=1, test_size=2).prepare_scoring()
    unsafe = tasks.get("gym/n_queens", train_size=1, test_size=2, unsafe_code=True)
    unsafe.prepare_scoring()
    example = unsafe.test_examples()[0]
    assert unsafe.score(example, ["[exit()]"])["accuracy"] == 0
    assert unsafe.score(example, [example.target])["accuracy"] == 1


@pytest.mark.parametrize("backend", sandbox._backends())
def test_every_backend_of_this_machine_scores(backend, monkeypatch):
    monkeypatch.setattr(sandbox, "check", lambda: backend)
    monkeypatch.setattr(isolated_scorer, "_process", functools.cache(isolated_scorer._process.__wrapped__))
    task = tasks.get("gym/n_queens", train_size=1, test_size=2)
    assert scores_are_right(task)
    assert task.score(task.test_examples()[0], ["[exit()]"])["accuracy"] == 0
    assert scores_are_right(task)
