"""Splits of labelled images from the hub, a folder or scikit-learn; images are decoded when they are accessed.

Copies of images are found by content without decoding: only images of equal size in bytes are read at all.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nalora.errors import NALoRAError, missing_package
from nalora.tasks.sources import hub_data
from nalora.tasks.splits import not_in_test

_IMAGE_COLUMN, _LABEL_COLUMN = "image", "label"
_IMAGE_FILES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp"})
_DIGITS_IN_TEST = 297  # of 1,797, drawn with a fixed seed


@dataclass(frozen=True)
class LabelledImage:
    """One image and its class.

    Args:
        id: names the image in files of outputs; the same in all runs and on all machines.
        image: a PIL image, or the path of a file.
        label: the index in the task's `classes`.
    """

    id: str
    image: Any
    label: int

    def rgb(self) -> Any:
        """Return the PIL image with three channels; raise a NALoRAError if the file is no image."""
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


class _Contents(NamedTuple):
    """The size in bytes of each image of a split, and a function that reads the bytes of one."""

    sizes: Sequence[int]
    read: Callable[[int], bytes]


@dataclass(frozen=True, eq=False)
class ImageSplit(Sequence[LabelledImage]):
    """A split; images from the hub are decoded on access, since the pixels of SUN397 take tens of gigabytes.

    Args:
        ids: of the images.
        images: PIL images or paths.
        labels: of the images.
        rows: the hub's data set with the encoded bytes of all images, if it has them.
        indices: for a part of a split, the indices of its images in `images`.
    """

    ids: Sequence[str]
    images: Sequence[Any]
    labels: Sequence[int]
    rows: Any = None
    indices: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        image = self.images[index if self.indices is None else self.indices[index]]
        return LabelledImage(self.ids[index], image, self.labels[index])

    def at(self, indices: Sequence[int]) -> ImageSplit:
        """Return the part of the split with these indices, without decoding it."""
        chosen = indices if self.indices is None else [self.indices[i] for i in indices]
        return ImageSplit([self.ids[i] for i in indices], self.images, [self.labels[i] for i in indices], None, chosen)

    def without_copies(self, task: str, test: ImageSplit) -> ImageSplit:
        """Return the images that are not in the test split; raise a NALoRAError if none would be left."""
        train, other = self._contents(), test._contents()
        shared = ({*train.sizes} & {*other.sizes}) - {-1}
        train_keys, test_keys = (
            [
                hashlib.sha256(contents.read(index)).hexdigest() if size in shared else key
                for index, size in enumerate(contents.sizes)
            ]
            # An image whose size the other split does not have is not in it.
            for contents, key in ((train, "of another size"), (other, ""))
        )
        indices = not_in_test(task, train_keys, test_keys)
        return self.at(indices) if len(indices) < len(self) else self

    def _contents(self) -> _Contents:
        """Return the bytes of files, the encoded bytes of the hub's data set, or the pixels of images in memory."""
        if self.rows is not None:
            import pyarrow.compute

            encoded = pyarrow.compute.struct_field(self.rows.with_format("arrow")[:][_IMAGE_COLUMN], "bytes")
            sizes = pyarrow.compute.binary_length(encoded).to_pylist()
            # A data set made from files on this machine may contain only their paths: such images have no size here.
            return _Contents([-1 if size is None else size for size in sizes], lambda i: encoded[i].as_py() or b"")
        images = [labelled.image for labelled in self]
        if all(isinstance(image, Path) for image in images):
            return _Contents([image.stat().st_size for image in images], lambda i: images[i].read_bytes())
        pixels = [image.tobytes() for image in images]
        return _Contents([len(data) for data in pixels], pixels.__getitem__)


Splits = tuple[list[str], ImageSplit, ImageSplit]


def from_folder(task: str, folder: Path) -> Splits:
    """Return (classes, training split, test split) of a folder with train/CLASS/*.png and test/CLASS/*.png."""
    names, test_names = (
        sorted(path.name for path in (folder / split).glob("*") if path.is_dir()) for split in ("train", "test")
    )
    unknown = [name for name in test_names if name not in names]
    if unknown:
        raise NALoRAError(
            f"{folder / 'test'}",
            found=f"classes that are not in train: {', '.join(unknown[:5])}",
            expected="the classes of train",
            fix="use the same folder names in both splits",
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
        splits.append(ImageSplit(ids, [file for file, _ in files], [label for _, label in files]))
    return [name.replace("_", " ") for name in names], splits[0], splits[1]


def from_hub(task: str, path: str, part: str | None) -> Splits:
    """Return (classes, training split, test split) of a data set on the hub, or of a part of it."""
    instead = "give data_dir=FOLDER with train/CLASS/*.png and test/…"
    loaded = {split: hub_data(task, path, split, part, instead) for split in ("train", "test")}
    train, test = (
        ImageSplit(
            [f"{task}/{split}/{i}" for i in range(len(rows))], rows[_IMAGE_COLUMN], list(rows[_LABEL_COLUMN]), rows
        )
        for split, rows in loaded.items()
    )
    return [name.replace("_", " ") for name in loaded["train"].features[_LABEL_COLUMN].names], train, test


def digits() -> Splits:
    """Return (classes, training split, test split) of scikit-learn's digits, split with a fixed seed."""
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise missing_package(
            "digits", error.name or "sklearn", "which contains or reads the images", "scikit-learn pillow"
        ) from error
    loaded = load_digits()
    # Pixels have integer values from 0 to 16.
    images = [Image.fromarray((pixels * (255 / 16)).astype("uint8")) for pixels in loaded.images]
    everything = ImageSplit(
        [f"digits/{i}" for i in range(len(images))], images, [int(label) for label in loaded.target]
    )
    test = set(random.Random(0).sample(range(len(images)), _DIGITS_IN_TEST))
    train = [i for i in range(len(images)) if i not in test]
    return [str(name) for name in loaded.target_names], everything.at(train), everything.at(sorted(test))
