from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from nalora import tasks
from nalora.errors import NALoRAError
from nalora.tasks import sources
from nalora.tasks.glue import f1, mcc

# For each set the hub's columns and label number, and T5's prompt and target.
HUB = {
    "mnli": (
        {"premise": "It rains.", "hypothesis": "It is wet.", "label": 2},
        "mnli hypothesis: It is wet. premise: It rains.",
        "contradiction",
    ),
    "sst2": ({"sentence": "a fine film ", "label": 1}, "sst2 sentence: a fine film", "positive"),
    "cola": ({"sentence": "Him sleeps.", "label": 0}, "cola sentence: Him sleeps.", "unacceptable"),
    "qnli": (
        {"question": "Who?", "sentence": "It was me.", "label": 0},
        "qnli question: Who? sentence: It was me.",
        "entailment",
    ),
    "mrpc": (
        {"sentence1": "One.", "sentence2": "Two.", "label": 1},
        "mrpc sentence1: One. sentence2: Two.",
        "equivalent",
    ),
}
FILES = {
    "mnli/train.tsv": "index\tsentence1\tsentence2\tgold_label\n0\tIt rains.\tIt is wet.\tentailment\n",
    "mnli/dev_matched.tsv": "index\tsentence1\tsentence2\tlabel1\tgold_label\n"
    "0\tIt rains.\tIt is wet.\tneutral\tcontradiction\n",
    "sst2/train.tsv": 'sentence\tlabel\nan "odd film \t0\n',
    "sst2/dev.tsv": "sentence\tlabel\na fine film \t1\n",
    "cola/in_domain_train.tsv": "gj04\t1\t\tHe sleeps.\n",
    "cola/in_domain_dev.tsv": "gj04\t0\t*\tHim sleeps.\n",
    "cola/out_of_domain_dev.tsv": "clc95\t1\t\tShe sleeps.\n",
    "qnli/dev.tsv": "index\tquestion\tsentence\tlabel\n0\tWho?\tIt was me.\tentailment\n",
    "mrpc/msr_paraphrase_train.txt": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    "1\t7\t8\tThe price rose.\tPrices went up.\r\n"
    "0\t-1\t-1\tI like it.\tI hate it.\r\n1\t-1\t-1\tI run.\tI am running.\r\n",
    "mrpc/msr_paraphrase_test.txt": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t1\t2\tOne.\tTwo.\r\n",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        file = tmp_path / "glue" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    return tmp_path


@pytest.mark.parametrize("name", HUB)
def test_the_hub_gives_t5s_own_format(monkeypatch, name):
    row, prompt, target = HUB[name]
    validation = "validation_matched" if name == "mnli" else "validation"
    for split, of in (("train", "train_examples"), (validation, "test_examples")):
        wanted = (name, "nyu-mll/glue", split, name)
        monkeypatch.setattr(sources, "hub_rows", lambda *asked, wanted=wanted: [row] if asked == wanted else [])
        examples = getattr(tasks.get(name), of)()
        assert [(each.prompt, each.target, each.facts) for each in examples] == [(prompt, target, {"label": target})]


@pytest.mark.parametrize("inside", ["", "glue", "glue/{name}"])
@pytest.mark.parametrize("name", HUB)
def test_files_give_the_same_as_the_hub(folder, name, inside):
    _, prompt, target = HUB[name]
    example = tasks.get(name, data_dir=folder / inside.format(name=name)).test_examples()[0]
    assert (example.id, example.prompt, example.target) == (f"{name}-test-0", prompt, target)


def test_training_files_are_read(folder):
    sets = {name: tasks.get(name, data_dir=folder).train_examples() for name in ("mnli", "sst2", "cola")}
    assert {name: (each[0].prompt, each[0].target) for name, each in sets.items()} == {
        "mnli": ("mnli hypothesis: It is wet. premise: It rains.", "entailment"),
        "sst2": ('sst2 sentence: an "odd film', "negative"),
        "cola": ("cola sentence: He sleeps.", "acceptable"),
    }


def test_both_cola_files_are_the_validation_split(folder):
    assert [example.target for example in tasks.get("cola", data_dir=folder).test_examples()] == [
        "unacceptable",
        "acceptable",
    ]
    (folder / "glue/cola/out_of_domain_dev.tsv").unlink()
    with pytest.raises(NALoRAError, match="out_of_domain_dev.tsv"):
        tasks.get("cola", data_dir=folder).test_examples()


def test_glues_own_file_names_are_read_too(tmp_path):
    (tmp_path / "cola").mkdir()
    (tmp_path / "cola/dev.tsv").write_text(FILES["cola/in_domain_dev.tsv"])
    assert len(tasks.get("cola", data_dir=tmp_path).test_examples()) == 1


def test_made_up_pairs_of_mrpc_are_dropped(folder):
    assert [example.target for example in tasks.get("mrpc", data_dir=folder).train_examples()] == ["equivalent"]


MRPC_COLUMNS = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"


def mrpc_files(folder, *names):
    """Files of MRPC, each with one pair that names its file."""
    for name in names:
        (folder / name).write_text(f"{MRPC_COLUMNS}1\t1\t2\t{name}\tTwo.\n")
    return tasks.get("mrpc", data_dir=folder)


@pytest.mark.parametrize(
    ("names", "train", "test"),
    [
        (("msr_paraphrase_train.txt", "train.tsv", "dev.tsv"), "train.tsv", "dev.tsv"),
        (
            ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt", "dev.tsv"),
            "msr_paraphrase_train",
            "msr_paraphrase_test",
        ),
        (("train.tsv", "dev.tsv", "msr_paraphrase_test.txt"), "train.tsv", "dev.tsv"),
        (("msr_paraphrase_train.txt",), "msr_paraphrase_train.txt", None),
        (("dev.tsv",), None, "dev.tsv"),
    ],
)
def test_files_are_taken_in_pairs(tmp_path, names, train, test):
    task = mrpc_files(tmp_path, *names)
    for expected, examples in ((train, task.train_examples), (test, task.test_examples)):
        if expected is None:
            with pytest.raises(NALoRAError, match="none of"):
                examples()
        else:
            assert f"sentence1: {expected}" in examples()[0].prompt


def test_files_of_two_splits_are_refused(tmp_path):
    task = mrpc_files(tmp_path, "msr_paraphrase_train.txt", "dev.tsv")
    for examples in (task.train_examples, task.test_examples):
        with pytest.raises(NALoRAError, match=r"msr_paraphrase_train.txt and dev.tsv, which may share examples"):
            examples()


def test_pairs_of_mrpc_without_ids_are_all_kept(tmp_path):
    rows = "1\tOne.\tTwo.\n0\tThree.\tFour.\n"
    (tmp_path / "train.tsv").write_text(f"Quality\t#1 String\t#2 String\n{rows}")
    assert len(tasks.get("mrpc", data_dir=tmp_path).train_examples()) == 2


def test_sentences_of_cola_that_are_test_questions_are_left_out_and_counted(folder):
    with (folder / "glue/cola/in_domain_train.tsv").open("a") as file:
        # Also with another label: sentences are compared.
        file.write("gj04\t0\t*\tHim sleeps.\ngj04\t1\t\tShe sleeps.\ngj04\t0\t*\tShe sleeps.\n")
    task = tasks.get("cola", data_dir=folder)
    assert [each.prompt for each in task.training_set()] == ["cola sentence: He sleeps."]
    assert task.dropped_test_questions == 3
    for name in ("in_domain_dev.tsv", "out_of_domain_dev.tsv"):
        (folder / "glue/cola" / name).unlink()
    alone = tasks.get("cola", data_dir=folder)
    assert (len(alone.training_set()), alone.dropped_test_questions) == (4, None)


def test_a_decoder_continues_with_the_label(folder):
    example = tasks.get("sst2", data_dir=folder, prompt="decoder").test_examples()[0]
    assert example.prompt == "sst2 sentence: a fine film\nlabel:\n"
    assert example.target == "positive"


@pytest.mark.parametrize(
    ("output", "accuracy", "answered"),
    [
        ("positive", 1, 1),
        (" positive\n", 1, 1),
        ("negative", 0, 1),
        ("", 0, 0),
        ("positively", 0, 0),
        ("positive negative", 0, 0),
        ("entailment", 0, 0),
        ("1", 0, 0),
    ],
)
def test_only_the_labels_own_word_is_right(folder, output, accuracy, answered):
    task = tasks.get("sst2", data_dir=folder)
    assert task.score(task.test_examples()[0], [output]) == {"accuracy": accuracy, "answered": answered}


def _summary(task, labels, answers):
    examples = [tasks.Example(str(i), "", label, facts={"label": label}) for i, label in enumerate(labels)]
    return task.summarise(examples, [task.score(*pair) for pair in zip(examples, ([a] for a in answers), strict=True)])


@pytest.mark.parametrize(
    ("name", "measures"),
    [
        ("mnli", ("accuracy", "answered")),
        ("cola", ("accuracy", "mcc", "answered")),
        ("mrpc", ("accuracy", "f1", "answered")),
    ],
)
def test_each_set_has_its_measures(name, measures):
    task = tasks.get(name)
    label = HUB[name][2]
    assert task.measures == measures
    assert tuple(_summary(task, [label], [label])) == measures


def test_measures_over_all_answers_use_the_answers():
    yes, no = "acceptable", "unacceptable"
    summary = _summary(tasks.get("cola"), [yes, yes, yes, no, no], [yes, yes, no, no, "maybe"])
    # (right * n - agreement expected) / the root of both spreads: (3·5 − (3·2+2·2))/√((25−13)(25−9))
    assert summary == {"accuracy": 0.6, "mcc": pytest.approx(5 / (12 * 16) ** 0.5), "answered": 0.8}
    yes, no = "equivalent", "not_equivalent"
    summary = _summary(tasks.get("mrpc"), [yes, yes, yes, no, no], [yes, yes, "maybe", yes, "maybe"])
    assert summary == {"accuracy": 0.4, "f1": pytest.approx(2 * 2 / (3 + 3)), "answered": 0.6}


def test_a_constant_answer_correlates_with_nothing():
    assert mcc(["a", "b"], ["a", "a"]) == 0
    assert mcc(["a", "a"], ["a", "b"]) == 0
    assert f1(["a", "b"], ["a", "a"], "c") == 0


@pytest.mark.parametrize("seed", range(5))
def test_two_class_mcc_is_the_correlation_coefficient(seed):
    labels, answers = (random.Random(seed + shift).choices("ab", [1, 3], k=50) for shift in (0, 100))
    correlation = np.corrcoef([x == "a" for x in labels], [x == "a" for x in answers])[0, 1]
    assert mcc(labels, answers) == pytest.approx(correlation)


@pytest.mark.parametrize("seed", range(5))
def test_measures_agree_with_scikit_learn(seed):
    metrics = pytest.importorskip("sklearn.metrics")
    labels, answers = (random.Random(seed + shift).choices(words, k=60) for shift, words in ((0, "ab"), (100, "abc")))
    assert mcc(labels, answers) == pytest.approx(metrics.matthews_corrcoef(labels, answers))
    expected = metrics.f1_score(labels, answers, labels=["b"], average="macro", zero_division=0)
    assert f1(labels, answers, "b") == pytest.approx(expected)


def test_the_majority_class_is_always_reported(folder):
    task = tasks.get("mrpc", data_dir=folder)
    words = ["equivalent"] * 279 + ["not_equivalent"] * 129
    examples = [tasks.Example(str(i), "", word, facts={"label": word}) for i, word in enumerate(words)]
    assert task.chance(examples) == {"majority class (equivalent)": pytest.approx(0.6838, abs=1e-4)}
    assert (
        _summary(task, words, ["equivalent"] * 408)["accuracy"] == task.chance(examples)["majority class (equivalent)"]
    )
    assert Counter(words)["equivalent"] == 279


def test_missing_files_and_labels_are_reported(folder, monkeypatch):
    with pytest.raises(NALoRAError, match="none of glue/qnli/train.tsv"):
        tasks.get("qnli", data_dir=folder).train_examples()
    with pytest.raises(NALoRAError, match="one of t5, decoder"):
        tasks.get("qnli", prompt="chat")
    monkeypatch.setattr(sources, "hub_rows", lambda *_: [{"sentence": "?", "label": -1}])
    with pytest.raises(NALoRAError, match="row 0: found the label '-1'"):
        tasks.get("sst2").test_examples()
    with pytest.raises(NALoRAError, match="row 0: found no 'question' among sentence, label"):
        tasks.get("qnli").test_examples()
