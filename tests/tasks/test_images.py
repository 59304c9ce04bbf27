from __future__ import annotations

import pickle
from collections import Counter

import datasets
import numpy
import pytest
from PIL import Image

from nalora import tasks
from nalora.errors import NALoRAError
from nalora.tasks.image_splits import LabelledImage

SEVEN = ["cars", "dtd", "eurosat", "gtsrb", "resisc45", "sun397", "svhn"]


def save(file, colour: int):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (3, 2), (colour, 0, 0)).save(file)


@pytest.fixture
def folder(tmp_path):
    for split, count in (("train", 3), ("test", 2)):
        for label, name in enumerate(("annual_crop_land", "forest")):
            for number in range(count):
                save(tmp_path / split / name / f"{number}.{'JPG' if number else 'png'}", 40 * label)
    (tmp_path / "train/forest/notes.txt").write_text("not an image")
    (tmp_path / "train/readme.txt").write_text("not a class")
    return tmp_path


@pytest.mark.parametrize("name", SEVEN)
def test_a_folder_of_images_is_any_of_the_seven(name, folder):
    task = tasks.get(name, data_dir=folder)
    assert (task.name, task.models, task.measures) == (name, ("clip",), ("accuracy",))
    assert task.classes == ["annual crop land", "forest"]
    assert task.prompts() == ["a photo of a annual crop land.", "a photo of a forest."]
    assert [each.label for each in task.train_images()] == [0, 0, 0, 1, 1, 1]
    assert [each.id for each in task.test_images()] == [
        "test/annual_crop_land/0.png",
        "test/annual_crop_land/1.JPG",
        "test/forest/0.png",
        "test/forest/1.JPG",
    ]
    assert task.train_images()[0].rgb().getpixel((0, 0)) == (0, 0, 0)
    assert task.train_images()[-1].rgb().size == (3, 2)


def test_a_class_may_be_missing_in_the_test_split_but_not_in_training(folder):
    for file in (folder / "test/annual_crop_land").iterdir():
        file.unlink()
    assert [each.label for each in tasks.get("eurosat", data_dir=folder).test_images()] == [1, 1]
    save(folder / "test/lake/0.png", 0)
    with pytest.raises(NALoRAError, match="test: found classes that are not in train: lake"):
        tasks.get("eurosat", data_dir=folder).test_images()


def test_the_error_of_an_empty_folder_names_the_expected_files(tmp_path):
    with pytest.raises(NALoRAError, match="dtd: found no images in .*train; expected .*train/CLASS/\\*.png"):
        tasks.get("dtd", data_dir=tmp_path).classes  # noqa: B018


def test_a_damaged_image_is_named(folder):
    (folder / "test/forest/0.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(NALoRAError, match="forest/0.png: found no readable image"):
        tasks.get("eurosat", data_dir=folder).test_images()[2].rgb()


@pytest.mark.parametrize(
    ("name", "called"),
    [
        *((name, (f"tanganke/{name}", None)) for name in ("dtd", "eurosat", "gtsrb", "resisc45", "sun397")),
        ("cars", ("tanganke/stanford_cars", None)),
        ("svhn", ("ufldl-stanford/svhn", "cropped_digits")),
    ],
)
def test_the_hub_gives_classes_and_images(name, called, monkeypatch):
    """Only the download is replaced: the result is a real data set that decodes images."""
    calls = []

    def load_dataset(path, part):
        calls.append((path, part))
        return {"train": made(4), "test": made(2)}

    def made(count):
        images = [Image.new("L", (4, 4), 50 * number) for number in range(count)]
        features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["no_entry", "stop"])}
        labels = [number % 2 for number in range(count)]
        return datasets.Dataset.from_dict({"image": images, "label": labels}, datasets.Features(features))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = tasks.get(name)
    assert calls == [], "nothing is fetched before it is needed"
    assert task.classes == ["no entry", "stop"]
    assert calls == [called, called]
    assert [(each.id, each.label) for each in task.test_images()] == [(f"{name}/test/0", 0), (f"{name}/test/1", 1)]
    assert task.train_images()[3].rgb().getpixel((0, 0)) == (150, 150, 150)
    assert task.test_examples()[1].target == "stop"
    assert len(calls) == 2


def test_an_unreachable_hub_is_reported(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("no network\nmore")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(NALoRAError, match="no dataset 'tanganke/dtd' \\(ConnectionError: no network\\).*data_dir"):
        tasks.get("dtd").train_images()


def test_digits_are_all_there_once_and_the_same_every_time():
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    task = tasks.get("digits")
    train, test = task.train_images(), task.test_images()
    assert (len(train), len(test)) == (1500, 297)
    assert len({each.id for each in train} | {each.id for each in test}) == 1797
    assert [each.id for each in test] == [each.id for each in tasks.get("digits").test_images()]
    assert [each.id for each in test[:3]] == ["digits/2", "digits/3", "digits/25"]
    assert set(Counter(each.label for each in test)) == set(range(10))
    assert task.classes == list("0123456789")
    assert task.prompts()[3] == "a photo of the number 3."

    original = sklearn_datasets.load_digits()
    for each in test[:5]:
        number = int(each.id.removeprefix("digits/"))
        assert each.label == original.target[number]
        ink = numpy.asarray(each.rgb())[..., 0].astype(float) * 16 / 255
        numpy.testing.assert_allclose(ink, original.images[number], atol=0.07)


def test_digits_too_can_be_read_from_a_folder(tmp_path):
    for split in ("train", "test"):
        for digit in "01":
            save(tmp_path / split / digit / "a.png", 9)
    assert tasks.get("digits", data_dir=tmp_path).prompts() == ["a photo of the number 0.", "a photo of the number 1."]


def test_examples_are_scored_by_the_name_of_the_class(folder):
    task = tasks.get("eurosat", data_dir=folder)
    (folder / "test/forest/1.JPG").unlink()
    examples = task.test_examples()
    assert [each.id for each in examples] == [each.id for each in task.test_images()]
    assert [each.facts["label"] for each in examples] == [0, 0, 1]
    scores = [task.score(each, ["annual crop land"]) for each in examples]
    assert task.summarise(examples, scores) == {"accuracy": pytest.approx(2 / 3)}
    assert task.chance(examples) == {"majority class (annual crop land)": pytest.approx(2 / 3)}
    assert [each.target for each in task.train_examples()] == ["annual crop land"] * 3 + ["forest"] * 3


def test_splits_are_sequences(folder):
    pictures = tasks.get("eurosat", data_dir=folder).train_images()
    assert pictures[-1] == pictures[5]
    assert pictures[4:] == [pictures[4], pictures[5]]
    assert isinstance(pictures[0], LabelledImage)
    assert len(list(pictures)) == 6
    with pytest.raises(IndexError):
        pictures[6]
    # Workers that load data get a copy.
    assert pickle.loads(pickle.dumps(pictures))[0] == pictures[0]
