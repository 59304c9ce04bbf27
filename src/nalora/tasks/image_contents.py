"""Images compared by content, without decoding them: only those of one size in bytes are read at all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nalora.tasks.overlap import Kept, not_asked


class Contents(NamedTuple):
    """The bytes of a split's images: the size of each, and a way to read one."""

    sizes: Sequence[int]
    read: Callable[[int], bytes]


def contents_of_images(images: Sequence[Any]) -> Contents:
    """Of files by their bytes, of images in memory by their pixels."""
    if all(isinstance(image, Path) for image in images):
        return Contents([image.stat().st_size for image in images], lambda place: images[place].read_bytes())
    pixels = [image.tobytes() for image in images]
    return Contents([len(each) for each in pixels], pixels.__getitem__)


def contents_of_column(rows: Any, column: str) -> Contents:
    """Of a hub's data set by the encoded bytes that it stores; sizes come from its table without reading an image."""
    import pyarrow.compute

    encoded = pyarrow.compute.struct_field(rows.with_format("arrow")[:][column], "bytes")
    sizes = pyarrow.compute.binary_length(encoded).to_pylist()
    # A data set made from files on this machine may store their paths alone: their images have no size here.
    return Contents([-1 if size is None else size for size in sizes], lambda place: encoded[place].as_py() or b"")


def not_in_test(task: str, train: Contents, test: Contents) -> Kept:
    """The training images that are no test images.

    Raises:
        NALoRAError: nothing would be left to train on.
    """
    shared = ({*train.sizes} & {*test.sizes}) - {-1}
    trained, asked = (
        [
            hashlib.sha256(split.read(place)).hexdigest() if size in shared else other
            for place, size in enumerate(split.sizes)
        ]
        # An image of a size that the other split does not have is none of its images.
        for split, other in ((train, "of another size"), (test, ""))
    )
    return not_asked(task, trained, asked)
