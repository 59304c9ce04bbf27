"""Images to be classified: the seven sets of the paper's CLIP table, and scikit-learn's digits for work offline."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nalora.errors import NALoRAError
from nalora.models.file_digest import digest_of_file
from nalora.tasks.image_contents import not_in_test
from nalora.tasks.pictures import Picture, Pictures, digits, from_folder, from_hub
from nalora.tasks.task import Answer, Example, ModelKind, Scores, Task, TrainingInputs
from nalora.tasks.validation import split_places

if TYPE_CHECKING:
    from nalora.models.loading import Loaded

# The hub's data set and, where it has several parts, the part; all have a train and a test split.
_HUB = {
    "cars": ("Stanford Cars", "tanganke/stanford_cars", None),
    "dtd": ("Describable Textures", "tanganke/dtd", None),
    "eurosat": ("EuroSAT", "tanganke/eurosat", None),
    "gtsrb": ("German traffic signs", "tanganke/gtsrb", None),
    "resisc45": ("RESISC45", "tanganke/resisc45", None),
    "sun397": ("SUN397", "tanganke/sun397", None),
    "svhn": ("Street View house numbers", "ufldl-stanford/svhn", "cropped_digits"),
}
# How many pictures are classified between two writes of a file of answers.
_BATCH = 512


class ImageTask(Task):
    """Classification of images by a CLIP model (`nalora.models.clip`); an answer is the name of a class.

    Args:
        data_dir: a folder with train/CLASS/*.png and test/CLASS/*.png in place of the hub's (or scikit-learn's)
            images; folders are named as CLIP shall read the class, with _ for a space.
    """

    models: tuple[ModelKind, ...] = ("clip",)
    # Every linear layer of the vision tower and the projection after it; in a whole CLIPModel the same and no more.
    linear_layers = r"vision_model\..*\.(q_proj|k_proj|v_proj|out_proj|fc1|fc2)|visual_projection"
    prompt = "a photo of a {}."

    def __init__(self, data_dir: str | Path | None = None) -> None:
        self.data_dir: Path | None = Path(data_dir).expanduser() if data_dir is not None else None

    @property
    def classes(self) -> list[str]:
        """The names of the classes; a label is a place in this list."""
        return self._data[0]

    def prompts(self) -> list[str]:
        """What CLIP's text tower reads for each class."""
        return [self.prompt.format(name) for name in self.classes]

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
        return from_folder(self.name, self.data_dir) if self.data_dir is not None else self._download()

    def _download(self) -> tuple[list[str], Pictures, Pictures]:
        return from_hub(self.name, *_HUB[self.name][1:])

    def prepare_model(self, loaded: Loaded) -> Loaded:
        """The CLIP as a classifier of the task's classes, on the same weights.

        Raises:
            NALoRAError: a model that sees no pictures.
        """
        from nalora.models.clip import CLIPClassifier

        if not hasattr(loaded.processor, "image_processor"):
            raise NALoRAError(
                f"task {self.name!r}",
                found=f"{loaded.spec.name}, a model that sees no pictures",
                expected="a CLIP model",
                fix="give one with model=, or choose a task of texts (see `nalora tasks`)",
            )
        model = CLIPClassifier(loaded.model, loaded.processor.tokenizer, self.prompts())
        return replace(loaded, model=model.eval())

    def training_inputs(
        self, loaded: Loaded, validation_size: int, limit: int | None, encode: Any = None
    ) -> TrainingInputs:
        """The training images without those held out for validation; the processor makes pixels of them in batches."""
        from nalora.models.clip import PictureCollator

        images = self.training_images()
        places = split_places(images.ids, validation_size)[0]
        return TrainingInputs(images.at(places[: limit or None]), PictureCollator(loaded.processor.image_processor))

    def answers(self, loaded: Loaded, examples: Sequence[Example], generate: Any = None) -> Iterator[list[Answer]]:
        """The class of each image."""
        for start in range(0, len(examples), _BATCH):
            part = examples[start : start + _BATCH]
            labels = [label for label, _ in self._classified(loaded, part)]
            yield [Answer(each, [self.classes[label]], 0, True) for each, label in zip(part, labels, strict=True)]

    def losses(self, loaded: Loaded, examples: Sequence[Example], text_losses: Any = None) -> list[tuple[float, int]]:
        """(−log p of the class, 1) of each image."""
        return [(loss, 1) for _, loss in self._classified(loaded, examples)]

    def _classified(self, loaded: Loaded, examples: Sequence[Example]) -> list[tuple[int, float]]:
        from nalora.models.clip import classify

        return classify(loaded.model, self.images_of(examples), loaded.processor.image_processor)

    def content(self, examples: Sequence[Example]) -> list[Any]:
        """With the prompts of the classes and the files' own content, which examples only name."""
        files = [each.image for each in self.images_of(examples)] if self.data_dir is not None else []
        return [*super().content(examples), self.prompts(), [digest_of_file(file) for file in files]]


class Digits(ImageTask):
    """scikit-learn's handwritten digits."""

    name, title = "digits", "scikit-learn's digits, 8×8 pictures for a CLIP; no network"
    prompt = "a photo of the number {}."

    def _download(self) -> tuple[list[str], Pictures, Pictures]:
        return digits()


TASKS = (
    *(type(name, (ImageTask,), {"name": name, "title": f"{_HUB[name][0]}, pictures for a CLIP"}) for name in _HUB),
    Digits,
)
