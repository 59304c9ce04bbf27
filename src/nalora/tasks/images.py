"""Images to be classified: the seven sets of the paper's CLIP table, and scikit-learn's digits for work offline."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from nalora.errors import NALoRAError
from nalora.tasks.image_contents import Contents, contents_of_column, contents_of_images, not_in_test
from nalora.tasks.task import Example, ModelKind, Scores, Task

# The hub's data set and, where it has several parts, the part; all have a train and a test split.
_HUB = {
    "cars": ("tanganke/stanford_cars", None),
    "dtd": ("tanganke/dtd", None),
    "eurosat": ("tanganke/eurosat", None),
    "gtsrb": ("tanganke/gtsrb", None),
    "resisc45": ("tanganke/resisc45", None),
    "sun397": ("tanganke/sun397", None),
    "svhn": ("ufldl-stanford/svhn", "cropped_digits"),
}
_IMAGE_COLUMN, _LABEL_COLUMN = "image", "label"
_TITLES = {
    "cars": "Stanford Cars",
    "dtd": "Describable Textures",
    "eurosat": "EuroSAT",
    "gtsrb": "German traffic signs",
    "resisc45": "RESISC45",
    "sun397": "SUN397",
    "svhn": "Street View house numbers",
    "digits": "Handwritten digits, 8×8",
}
_PROMPT = "a photo of a {}."
_PROMPTS = {"digits": "a photo of the number {}."}

_IMAGE_FILES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp"})
_DIGITS_IN_TEST = 297  # of 1,797, drawn once for all by this seed
_DIGITS_SEED = 0


@dataclass(frozen=True)
class Picture:
    """One image and the number of its class.

    Args:
        id: names it in files of outputs; stable over runs and machines.
        image: a PIL image, or the path of a file.
        label: its place in the task's `classes`.
    """

    id: str
    image: Any
    label: int

    def rgb(self) -> Any:
        """The PIL image in three channels.

        Raises:
            NALoRAError: the file is no image.
        """
        if not isinstance(self.image, Path):
            return self.image.convert("RGB")
        from PIL import Image

        try:
            with Image.open(self.image) as image:
                return image.convert("RGB")
        except OSError as error:
            raise NALoRAError(
                str(self.image),
                found=f"no readable image ({error})",
                expected="an image file",
                fix="fetch the file again, or take it out of the folder",
            ) from error


class Pictures(Sequence[Picture]):
    """A split; images of the hub are decoded when they are asked for, since SUN397 as pixels takes tens of gigabytes.

    Args:
        ids: one for each image.
        images: PIL images or paths, in the same order.
        labels: in the same order.
        contents: gives the images' bytes, by which copies are found; from the images themselves by default.
    """

    def __init__(
        self,
        ids: Sequence[str],
        images: Sequence[Any],
        labels: Sequence[int],
        contents: Callable[[], Contents] | None = None,
    ) -> None:
        self.ids, self.images, self.labels = ids, images, labels
        self.contents = contents or functools.partial(contents_of_images, images)

    def __len__(self) -> int:
        return len(self.labels)

    @overload
    def __getitem__(self, index: int) -> Picture: ...
    @overload
    def __getitem__(self, index: slice) -> list[Picture]: ...
    def __getitem__(self, index: int | slice) -> Picture | list[Picture]:
        place = range(len(self))[index]
        if isinstance(place, range):
            return [self[each] for each in place]
        return Picture(self.ids[place], self.images[place], self.labels[place])

    def at(self, places: Sequence[int]) -> Pictures:
        """Those at these places, still not decoded."""
        return Pictures(
            [self.ids[place] for place in places], _At(self.images, places), [self.labels[place] for place in places]
        )


class _At(Sequence[Any]):
    """The items at some places of a sequence, each fetched when it is asked for."""

    def __init__(self, items: Sequence[Any], places: Sequence[int]) -> None:
        self.items, self.places = items, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        return self.items[self.places[index]]


class ImageTask(Task):
    """Classification of images by a CLIP model: `train_images` and `test_images` go to `nalora.tasks.clip`.

    As any task's, an example can be scored: what was "written" is then the name of the class that was chosen.
    """

    measures = ("accuracy",)
    models: tuple[ModelKind, ...] = ("clip",)

    def __init__(self, name: str, data_dir: str | Path | None) -> None:
        self.name = name
        self.title = _TITLES[name]
        self.data_dir = Path(data_dir).expanduser() if data_dir is not None else None

    @property
    def classes(self) -> list[str]:
        """The names of the classes; a label is a place in this list."""
        return self._data[0]

    def prompts(self) -> list[str]:
        """What CLIP's text tower reads for each class."""
        return [_PROMPTS.get(self.name, _PROMPT).format(each) for each in self.classes]

    def train_images(self) -> Pictures:
        """The training split as it is, in a fixed order; see `training_images`."""
        return self._data[1]

    def training_images(self) -> Pictures:
        """What is trained on: `train_images` without copies of test images, found by their bytes.

        Raises:
            NALoRAError: every training image is a test image too.
        """
        train = self.train_images()
        kept = not_in_test(self.name, train.contents(), self.test_images().contents())
        self.also_asked = kept.dropped
        return train.at(kept.places) if kept.dropped else train

    def training_set(self) -> Sequence[Example]:
        """`training_images` without the images."""
        return self._examples(self.training_images())

    def test_images(self) -> Pictures:
        """What is classified, in a fixed order; never seen in training."""
        return self._data[2]

    def images_of(self, examples: Sequence[Example]) -> list[Picture]:
        """The images of these examples, of whichever split they are."""
        return [pictures[place] for pictures, place in (self._split_of[each.id] for each in examples)]

    def train_examples(self) -> Sequence[Example]:
        """`train_images` without the images."""
        return self._examples(self.train_images())

    def test_examples(self) -> Sequence[Example]:
        """`test_images` without the images: the classes to be named."""
        return self._examples(self.test_images())

    def score(self, example: Example, outputs: Sequence[str]) -> Scores:
        """Whether the class was named."""
        return {"accuracy": float(outputs[0] == example.target)}

    def chance(self, examples: Sequence[Example]) -> dict[str, float]:
        """What naming the most frequent class every time scores."""
        ((name, count),) = Counter(each.target for each in examples).most_common(1)
        return {f"majority class ({name})": count / len(examples)}

    def _examples(self, pictures: Pictures) -> list[Example]:
        return [
            Example(id, prompt="", target=self.classes[label], facts={"label": label})
            for id, label in zip(pictures.ids, pictures.labels, strict=True)
        ]

    @functools.cached_property
    def _split_of(self) -> dict[str, tuple[Pictures, int]]:
        """Where each id stands; no id is in both splits."""
        splits = (self.train_images(), self.test_images())
        return {id: (pictures, place) for pictures in splits for place, id in enumerate(pictures.ids)}

    @functools.cached_property
    def _data(self) -> tuple[list[str], Pictures, Pictures]:
        """(classes, training split, test split)."""
        if self.data_dir is not None:
            return _from_folder(self.name, self.data_dir)
        return _digits() if self.name == "digits" else _from_hub(self.name)


def _from_folder(task: str, folder: Path) -> tuple[list[str], Pictures, Pictures]:
    """The splits `train` and `test`, in each a folder of images for every class."""
    names = sorted(each.name for each in (folder / "train").glob("*") if each.is_dir())
    strangers = {each.name for each in (folder / "test").glob("*") if each.is_dir()} - set(names)
    if strangers:
        raise NALoRAError(
            f"{folder / 'test'}",
            found=f"classes that train has not: {', '.join(sorted(strangers)[:5])}",
            expected="the classes of train",
            fix="name the folders of both splits alike",
        )
    splits = []
    for split in ("train", "test"):
        files = [
            (file, label)
            for label, name in enumerate(names)
            for file in sorted((folder / split / name).glob("*"))
            if file.suffix.lower() in _IMAGE_FILES
        ]
        if not files:
            raise NALoRAError(
                task,
                found=f"no images in {folder / split}",
                expected=f"{folder / split}/CLASS/*.png (or {', '.join(sorted(_IMAGE_FILES - {'.png'}))})",
                fix="give the folder that holds train and test as data_dir, or leave data_dir out",
            )
        ids = [file.relative_to(folder).as_posix() for file, _ in files]
        splits.append(Pictures(ids, [file for file, _ in files], [label for _, label in files]))
    return [_words(name) for name in names], splits[0], splits[1]


def _from_hub(task: str) -> tuple[list[str], Pictures, Pictures]:
    path, part = _HUB[task]
    try:
        import datasets

        loaded = {split: datasets.load_dataset(path, part, split=split) for split in ("train", "test")}
    except ImportError as error:
        raise NALoRAError(
            task,
            found=f"no package `{error.name}`",
            expected="datasets and pillow, to read the hub's images",
            fix="pip install datasets pillow, or give data_dir=FOLDER",
        ) from error
    except Exception as error:  # the hub's errors share no type: connection, permission, missing, damaged
        raise NALoRAError(
            task,
            found=f"no dataset {path!r} ({type(error).__name__}: {str(error).partition(chr(10))[0]})",
            expected="its splits train and test from the hub",
            fix="check the network and `hf auth login`, or give data_dir=FOLDER with train/CLASS/*.png and test/…",
        ) from error
    train, test = (
        Pictures(
            [f"{task}/{split}/{number}" for number in range(len(rows))],
            rows[_IMAGE_COLUMN],
            list(rows[_LABEL_COLUMN]),
            functools.partial(contents_of_column, rows, _IMAGE_COLUMN),
        )
        for split, rows in loaded.items()
    )
    return [_words(name) for name in loaded["train"].features[_LABEL_COLUMN].names], train, test


def _words(name: str) -> str:
    return name.replace("_", " ")


def _digits() -> tuple[list[str], Pictures, Pictures]:
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise NALoRAError(
            "digits",
            found=f"no package `{error.name}`",
            expected="scikit-learn, which carries the images, and pillow",
            fix="pip install scikit-learn pillow",
        ) from error
    digits = load_digits()
    # Ink from 0 to 16 in steps of one.
    images = [Image.fromarray((each * (255 / 16)).astype("uint8")) for each in digits.images]
    chosen = set(random.Random(_DIGITS_SEED).sample(range(len(images)), _DIGITS_IN_TEST))
    splits = [
        Pictures([f"digits/{i}" for i in places], [images[i] for i in places], [int(digits.target[i]) for i in places])
        for places in ([i for i in range(len(images)) if i not in chosen], sorted(chosen))
    ]
    return [str(name) for name in digits.target_names], splits[0], splits[1]


def make(name: str, *, data_dir: str | Path | None = None) -> ImageTask:
    """An image task.

    Args:
        name: one of cars, dtd, eurosat, gtsrb, resisc45, sun397, svhn, digits.
        data_dir: a folder with train/CLASS/*.png and test/CLASS/*.png in place of the hub's (or scikit-learn's)
            images; folders are named as CLIP shall read the class, with _ for a space.
    """
    return ImageTask(name, data_dir)
