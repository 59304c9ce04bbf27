from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest

from nalora import tasks
from nalora.errors import NALoRAError

factory = pytest.importorskip("reasoning_gym.factory")

# One digit each: 90 questions, so that both sets must share some.
SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def gym(family="chain_sum", **options):
    return tasks.get(f"gym/{family}", **{"train_size": 40, "test_size": 20} | options)


def test_a_family_has_training_and_test_questions():
    task = gym()
    train, test = task.train_examples(), task.test_examples()
    assert (len(train), len(test)) == (40, 20)
    assert train[0].id == "chain_sum-train-0-0"
    assert train[0].prompt.endswith("\nGive only the answer.\nAnswer:\n")
    assert int(train[0].target) == eval(train[0].prompt.partition(": ")[2].partition(" =")[0])


def test_no_question_is_in_both_sets():
    task = gym(settings=SMALL, train_size=300, test_size=30)
    asked = {example.prompt for example in task.test_examples()}
    train = [example.prompt for example in task.train_examples()]
    assert not asked & set(train)
    # The generated sets did overlap, or this would show nothing; the remaining questions keep their index.
    assert 0 < len(train) < 300
    kept = [example.facts["index"] for example in task.train_examples()]
    assert kept == sorted(set(kept)) != list(range(len(kept)))


def test_examples_held_out_of_training_are_scored_by_their_own_answer():
    task = gym(train_size=60, test_size=10)
    for example in task.train_examples():
        assert task.score(example, [example.target])["accuracy"] == 1


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_seeds_of_both_sets_and_of_all_seeds_are_far_apart(monkeypatch, seed):
    drawn = []
    create = factory.create_dataset

    def create_dataset(family, **settings):
        drawn.append((settings["seed"], settings["size"]))
        return create(family, **settings)

    monkeypatch.setattr(factory, "create_dataset", create_dataset)
    gym(seed=seed).train_examples()
    assert drawn == [(2_000_000 * seed, 40), (2_000_000 * seed + 1_000_000, 20)]


def test_seeds_and_settings_change_the_questions():
    prompts = [[each.prompt for each in gym(**o).test_examples()] for o in ({}, {"seed": 1}, {"settings": SMALL})]
    assert prompts[0] == [each.prompt for each in gym().test_examples()]
    assert not set(prompts[0]) & set(prompts[1])
    assert not set(prompts[0]) & set(prompts[2])


def test_no_questions_left_to_train_on_is_an_error():
    with pytest.raises(NALoRAError, match="each of 1 generated questions"):
        gym(settings=SMALL, train_size=1, test_size=2000).train_examples()


@pytest.mark.parametrize(
    "wrap", ["{}", "  {}\n", "I add.\n<answer> {} </answer>", "<answer>3</answer><answer>{}</answer>"]
)
def test_the_answer_is_the_output_or_its_last_tag(wrap):
    task = gym()
    for example in task.test_examples():
        assert task.score(example, [wrap.format(example.target)]) == {"accuracy": 1, "score": 1}


def test_part_of_a_score_is_not_correct():
    task = gym()
    example = task.test_examples()[0]
    scores = task.score(example, [f"It is {example.target}"])
    assert scores["accuracy"] == 0
    assert 0 < scores["score"] < 1
    assert task.score(example, [""]) == {"accuracy": 0, "score": 0}
    assert task.summarise([example], [scores]) == scores


@pytest.mark.parametrize(("score", "accuracy"), [(0.0, 0), (0.51, 0), (0.99, 0), (1.0, 1)])
def test_only_a_full_score_is_accurate(monkeypatch, score, accuracy):
    task = gym()
    monkeypatch.setattr(task._scorer, "scores", lambda answers: [score] * len(answers))
    assert task.score(task.test_examples()[0], ["7"]) == {"accuracy": accuracy, "score": score}


def test_what_a_scorer_cannot_read_is_wrong():
    task = gym("prime_factorization")
    example = task.test_examples()[0]
    with pytest.raises(ValueError, match="invalid literal"):
        factory.get_score_answer_fn("prime_factorization")("seven", task._entry("test", 0))
    assert task.score(example, ["seven"]) == {"accuracy": 0, "score": 0}


@pytest.mark.parametrize("family", ["chain_sum", "rearc", "n_queens", "letter_counting"])
def test_facts_survive_a_file_and_score_the_same(family):
    """A grid of rearc is made of tuples: as lists of JSON its own answer would score 0.05."""
    task = gym(family, test_size=3)
    task.prepare_scoring()
    for example in task.test_examples():
        facts = json.loads(json.dumps(example.facts))
        again = tasks.Example(example.id, example.prompt, facts=facts)
        assert task.score(again, [example.target])["accuracy"] == 1


def test_the_commonest_answer_is_reported():
    task = gym("syllogism", test_size=50)
    examples = task.test_examples()
    (name, share), *_ = task.chance(examples).items()
    answers = [example.target for example in examples]
    assert name == f"commonest answer ({max(set(answers), key=answers.count)})"
    assert share == max(map(answers.count, answers)) / 50


def test_a_family_without_answers_can_be_evaluated_but_not_trained_on():
    task = gym("propositional_logic", test_size=3)
    assert [example.target for example in task.test_examples()] == ["", "", ""]
    assert task.chance(task.test_examples()) == {}
    task.prepare_scoring()
    with pytest.raises(NALoRAError, match="without an answer"):
        task.train_examples()


def test_an_empty_answer_is_an_answer():
    assert any(example.target == "" for example in gym("ab", train_size=100).train_examples())


@pytest.mark.parametrize(("family", "words"), [("game_of_life_halting", "'qqq'"), ("puzzle24", "for every question")])
def test_a_scorer_that_accepts_anything_is_refused(family, words, monkeypatch):
    """Also where nobody measured it, as in a later version of reasoning-gym."""
    monkeypatch.setattr("nalora.tasks.gym.untrusted", dict)
    with pytest.raises(NALoRAError, match=words):
        gym(family, test_size=5).prepare_scoring()


def test_a_scorer_that_rejects_its_own_answers_is_refused(monkeypatch):
    task = gym()
    monkeypatch.setattr(task._scorer, "scores", lambda answers: [0.5] * len(answers))
    with pytest.raises(NALoRAError, match="does not accept its own answer"):
        task.prepare_scoring()


def test_questions_repeat_and_leave_the_global_generator_alone():
    random.seed(3)
    state = random.getstate()
    first = [(e.prompt, e.target) for e in gym("list_functions", test_size=100).test_examples()]
    assert random.getstate() == state
    random.seed(4)
    assert [(e.prompt, e.target) for e in gym("list_functions", test_size=100).test_examples()] == first


def test_families_that_depend_on_the_hash_seed_require_one(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(NALoRAError, match="PYTHONHASHSEED=0"):
        gym("ransom_note")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert len(gym("ransom_note").test_examples()) == 20
    with pytest.raises(NALoRAError, match="other questions each time"):
        gym("codeio")


def test_another_process_has_the_same_questions():
    code = "from nalora import tasks; print(tasks.get('gym/word_ladder', test_size=5).test_examples()[4])"
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    runs = [subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout != b""


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("chain_sums", {}, "did you mean chain_sum"),
        ("", {}, "no family ''"),
        ("chain_sum", {"settings": {"colour": 1}}, "colour.*among min_terms"),
        ("chain_sum", {"settings": {"min_terms": -1}}, "min_terms"),
        ("chain_sum", {"settings": {"size": 3}}, "options of the task"),
        ("chain_sum", {"settings": 1}, "settings: found 1"),
        ("chain_sum", {"train_size": 0}, "train_size: found 0"),
        ("chain_sum", {"test_size": 1_000_001}, "1 to 1000000"),
        ("chain_sum", {"seed": -1}, "seed: found -1"),
        ("chain_sum", {"seed": 5000}, "0 to 2146"),
        ("chain_sum", {"colour": 1}, "colour"),
    ],
)
def test_what_cannot_be_generated_is_refused(family, options, words):
    with pytest.raises(NALoRAError, match=words):
        gym(family, **options)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(NALoRAError, match="pip install reasoning-gym"):
        gym()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"test_size": 40}, "test_size=40: found 20 of 40 questions.*with test_size=20.*leave test_size out"),
        ({"seed": 1}, "seed=1: found 20 of 20 questions.*with seed=0.*leave seed out"),
        ({"settings": SMALL}, "20 of 20 questions.*leave settings out"),
        ({"test_size": 10, "seed": 1}, "leave test_size and seed out"),
    ],
)
def test_questions_that_training_did_not_exclude_are_refused(changes, words):
    with pytest.raises(NALoRAError, match=words):
        gym(**changes).refuse_training_examples(gym())


@pytest.mark.parametrize("changes", [{}, {"test_size": 7}, {"train_size": 9}, {"max_new_tokens": 9}])
def test_the_start_of_the_test_set_may_be_evaluated(changes):
    gym(**changes).refuse_training_examples(gym())


def test_a_smaller_test_set_that_is_not_the_start_is_refused():
    """The questions of acre depend on how many are generated."""
    gym("acre").refuse_training_examples(gym("acre"))
    with pytest.raises(NALoRAError, match="may have been trained on"):
        gym("acre", test_size=7).refuse_training_examples(gym("acre"))
