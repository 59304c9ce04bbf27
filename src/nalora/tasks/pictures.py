"""Pictures of two splits, from the hub, a folder, or scikit-learn; each is decoded when it is needed."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError, missing_package
from nalora.tasks.image_contents import Contents, contents_of_column, contents_of_images
from nalora.tasks.sources import hub_data

_IMAGE_COLUMN, _LABEL_COLUMN = "image", "label"
_IMAGE_FILES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp"})
_DIGITS_IN_TEST = 297  # of 1,797, drawn once for all


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

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[each] for each in range(len(self))[place]]
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


def from_folder(task: str, folder: Path) -> tuple[list[str], Pictures, Pictures]:
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
    return [name.replace("_", " ") for name in names], splits[0], splits[1]


def from_hub(task: str, path: str, part: str | None) -> tuple[list[str], Pictures, Pictures]:
    """The splits `train` and `test` of a hub's data set, or of a part of it."""
    folder = "FOLDER with train/CLASS/*.png and test/…"
    loaded = {split: hub_data(task, path, split, part, folder) for split in ("train", "test")}
    train, test = (
        Pictures(
            [f"{task}/{split}/{number}" for number in range(len(rows))],
            rows[_IMAGE_COLUMN],
            list(rows[_LABEL_COLUMN]),
            functools.partial(contents_of_column, rows, _IMAGE_COLUMN),
        )
        for split, rows in loaded.items()
    )
    return [name.replace("_", " ") for name in loaded["train"].features[_LABEL_COLUMN].names], train, test


def digits() -> tuple[list[str], Pictures, Pictures]:
    """scikit-learn's, split by chance once for all."""
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise missing_package(
            "digits", error.name or "sklearn", "which carries or reads the images", "scikit-learn pillow"
        ) from error
    loaded = load_digits()
    # Ink from 0 to 16 in steps of one.
    images = [Image.fromarray((each * (255 / 16)).astype("uint8")) for each in loaded.images]
    chosen = set(random.Random(0).sample(range(len(images)), _DIGITS_IN_TEST))
    splits = [
        Pictures([f"digits/{i}" for i in places], [images[i] for i in places], [int(loaded.target[i]) for i in places])
        for places in ([i for i in range(len(images)) if i not in chosen], sorted(chosen))
    ]
    return [str(name) for name in loaded.target_names], splits[0], splits[1]
