"""Image classification: the seven data sets of the paper's CLIP table, and scikit-learn's digits for work offline."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nalora.errors import NALoRAError
from nalora.files import expanded
from nalora.models.file_digest import digest_of_file
from nalora.tasks.image_splits import ImageSplit, LabelledImage, Splits, digits, from_folder, from_hub
from nalora.tasks.splits import hold_out_indices
from nalora.tasks.task import Answer, Example, ModelKind, Scores, Task, TrainingInputs

if TYPE_CHECKING:
    from nalora.models.loading import Loaded

# Title, name on the hub and, if it has several, the configuration; all have a train and a test split.
_HUB = {
    "cars": ("Stanford Cars", "tanganke/stanford_cars", None),
    "dtd": ("Describable Textures", "tanganke/dtd", None),
    "eurosat": ("EuroSAT", "tanganke/eurosat", None),
    "gtsrb": ("German traffic signs", "tanganke/gtsrb", None),
    "resisc45": ("RESISC45", "tanganke/resisc45", None),
    "sun397": ("SUN397", "tanganke/sun397", None),
    "svhn": ("Street View house numbers", "ufldl-stanford/svhn", "cropped_digits"),
}
# The number of images classified between two writes of the outputs.
_BATCH = 512


class ImageTask(Task):
    """Classification of images by a CLIP model (`nalora.models.clip`); an answer is the name of a class.

    Args:
        data_dir: a folder with train/CLASS/*.png and test/CLASS/*.png in place of the hub's (or scikit-learn's)
            images; a folder has the class name that CLIP reads, with _ for a space.
    """

    models: tuple[ModelKind, ...] = ("clip",)
    # Every linear layer of the vision tower and the projection after it, also within a complete CLIPModel.
    linear_layers = r"vision_model\..*\.(q_proj|k_proj|v_proj|out_proj|fc1|fc2)|visual_projection"
    prompt = "a photo of a {}."

    def __init__(self, data_dir: str | Path | None = None) -> None:
        self.data_dir: Path | None = expanded(data_dir) if data_dir is not None else None

    @functools.cached_property
    def _data(self) -> Splits:
        return from_folder(self.name, self.data_dir) if self.data_dir is not None else self._download()

    def _download(self) -> Splits:
        return from_hub(self.name, *_HUB[self.name][1:])

    @property
    def classes(self) -> list[str]:
        """The names of the classes; a label is an index of this list."""
        return self._data[0]

    def prompts(self) -> list[str]:
        """Return the input of CLIP's text tower for each class."""
        return [self.prompt.format(name) for name in self.classes]

    def train_images(self) -> ImageSplit:
        """Return the complete training split, in a fixed order; see `training_images`."""
        return self._data[1]

    def training_images(self) -> ImageSplit:
        """Return `train_images` without copies of test images; raise a NALoRAError if none is left."""
        train = self.train_images()
        distinct = train.without_copies(self.name, self.test_images())
        self.dropped_test_questions = len(train) - len(distinct)
        return distinct

    def test_images(self) -> ImageSplit:
        """Return the test split, in a fixed order."""
        return self._data[2]

    def train_examples(self) -> Sequence[Example]:
        """Return `train_images` as examples, which contain no image."""
        return self._examples(self.train_images())

    def training_set(self) -> Sequence[Example]:
        """Return `training_images` as examples, which contain no image."""
        return self._examples(self.training_images())

    def test_examples(self) -> Sequence[Example]:
        """Return `test_images` as examples, which contain no image."""
        return self._examples(self.test_images())

    def _examples(self, split: ImageSplit) -> list[Example]:
        return [
            Example(id, prompt="", target=self.classes[label], facts={"label": label})
            for id, label in zip(split.ids, split.labels, strict=True)
        ]

    def score(self, example: Example, outputs: Sequence[str]) -> Scores:
        """Return whether the predicted class is right."""
        return {"accuracy": float(outputs[0] == example.target)}

    def chance(self, examples: Sequence[Example]) -> dict[str, float]:
        """Return the accuracy of always predicting the most frequent class."""
        ((name, count),) = Counter(example.target for example in examples).most_common(1)
        return {f"majority class ({name})": count / len(examples)}

    def prepare_model(self, loaded: Loaded) -> Loaded:
        """Return the CLIP model as a classifier of the task's classes; raise a NALoRAError for a model of text."""
        from nalora.models.clip import CLIPClassifier

        if not hasattr(loaded.processor, "image_processor"):
            raise NALoRAError(
                f"task {self.name!r}",
                found=f"{loaded.spec.name}, a model without image inputs",
                expected="a CLIP model",
                fix="give one with model=, or choose a task of texts (see `nalora tasks`)",
            )
        model = CLIPClassifier(loaded.model, loaded.processor.tokenizer, self.prompts())
        return replace(loaded, model=model.eval())

    def training_inputs(
        self, loaded: Loaded, validation_size: int, limit: int | None, encode: Any = None
    ) -> TrainingInputs:
        """Return the training images without those held out; the collator makes batches of pixels."""
        from nalora.models.clip import PictureCollator

        images = self.training_images()
        indices = hold_out_indices(images.ids, validation_size)[0]
        return TrainingInputs(images.at(indices[: limit or None]), PictureCollator(loaded.processor.image_processor))

    def answers(self, loaded: Loaded, examples: Sequence[Example], generate: Any = None) -> Iterator[list[Answer]]:
        """Yield the predicted class of each image, in batches."""
        for start in range(0, len(examples), _BATCH):
            batch = examples[start : start + _BATCH]
            labels = [label for label, _ in self._classified(loaded, batch)]
            yield [Answer(e, [self.classes[label]], 0, True) for e, label in zip(batch, labels, strict=True)]

    def losses(self, loaded: Loaded, examples: Sequence[Example], text_losses: Any = None) -> list[tuple[float, int]]:
        """Return (−log p of the class, 1) of each image."""
        return [(loss, 1) for _, loss in self._classified(loaded, examples)]

    def _classified(self, loaded: Loaded, examples: Sequence[Example]) -> list[tuple[int, float]]:
        from nalora.models.clip import classify

        return classify(loaded.model, self._images_of(examples), loaded.processor.image_processor)

    def content(self, examples: Sequence[Example]) -> list[Any]:
        """Return the examples with the prompts of the classes and digests of the image files."""
        files = [labelled.image for labelled in self._images_of(examples)] if self.data_dir is not None else []
        return [*super().content(examples), self.prompts(), [digest_of_file(file) for file in files]]

    def _images_of(self, examples: Sequence[Example]) -> list[LabelledImage]:
        return [split[index] for split, index in (self._by_id[example.id] for example in examples)]

    @functools.cached_property
    def _by_id(self) -> dict[str, tuple[ImageSplit, int]]:
        """Split and index of each id; no id is in both splits."""
        splits = (self.train_images(), self.test_images())
        return {id: (split, index) for split in splits for index, id in enumerate(split.ids)}


class Digits(ImageTask):
    """scikit-learn's handwritten digits."""

    name, title = "digits", "scikit-learn's digits, 8×8 images for CLIP; no network"
    prompt = "a photo of the number {}."

    def _download(self) -> Splits:
        return digits()


TASKS = (
    *(type(name, (ImageTask,), {"name": name, "title": f"{_HUB[name][0]}, images for CLIP"}) for name in _HUB),
    Digits,
)
