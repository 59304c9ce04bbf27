"""CLIP as a classifier of pictures: the frozen text tower's view of the class names is the head of the vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput


class CLIPClassifier(nn.Module):
    """Class scores of images as CLIP gives them: logit scale × cosine to each prompt's embedding.

    The text tower runs once, here, and is not kept: whatever is adapted or trained is the vision tower's. Layers
    have the names they have in the CLIPModel, so that an adapter trained here loads there.

    Args:
        clip: a `transformers.CLIPModel`; its vision tower is used as it is, not copied.
        tokenizer: the one that belongs to it.
        prompts: one for each class, such as `ImageTask.prompts()`.
    """

    head: Tensor
    logit_scale: Tensor
    # Tells a Trainer to say how many images its step has.
    accepts_loss_kwargs = True

    def __init__(self, clip: Any, tokenizer: Any, prompts: Sequence[str]) -> None:
        super().__init__()
        # PEFT writes the name into the adapter's configuration. Not the configuration too: it would take this for a
        # transformers model and look for a prefix of names that a plain module has not.
        self.name_or_path = clip.name_or_path
        self.vision_model = clip.vision_model
        self.visual_projection = clip.visual_projection
        self.register_buffer("head", zero_shot_head(clip, tokenizer, prompts))
        self.register_buffer("logit_scale", clip.logit_scale.detach().exp())

    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, num_items_in_batch: Tensor | int | None = None
    ) -> ImageClassifierOutput:
        """The scores as `logits`, one row an image, and with labels the cross-entropy as `loss`.

        The loss is the mean over these images, or this pass's share of the mean over the `num_items_in_batch` of a
        step: a mean of passes' means would count images more where the last pass has fewer.
        """
        images = self.visual_projection(self._seen(pixel_values))
        logits = self.logit_scale * nn.functional.normalize(images, dim=-1) @ self.head.T
        loss = None
        if labels is not None:
            items = len(labels) if num_items_in_batch is None else num_items_in_batch
            loss = nn.functional.cross_entropy(logits.float(), labels, reduction="sum") / items
        return ImageClassifierOutput(loss=loss, logits=logits)

    def _seen(self, pixel_values: Tensor) -> Tensor:
        """The vision tower's view of each picture, also of none: every process has to go through every layer.

        CLIP's attention cannot take no picture, so it sees a black one, which then is left out; no label says that it
        counts, so NA-LoRA's statistics leave it out as well.
        """
        count = len(pixel_values)
        shown = pixel_values if count else pixel_values.new_zeros(1, *pixel_values.shape[1:])
        pooled: Tensor = self.vision_model(pixel_values=shown).pooler_output
        return pooled[:count]


@torch.no_grad()
def zero_shot_head(clip: Any, tokenizer: Any, prompts: Sequence[str], batch_size: int = 64) -> Tensor:
    """The text tower's embeddings of the prompts at length one, a row each."""
    was_training = clip.training
    clip.eval()
    longest = clip.config.text_config.max_position_embeddings
    rows = []
    for start in range(0, len(prompts), batch_size):
        texts = list(prompts[start : start + batch_size])
        inputs = tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
        inputs = {name: inputs[name].to(clip.device) for name in ("input_ids", "attention_mask")}
        rows.append(nn.functional.normalize(clip.get_text_features(**inputs).pooler_output, dim=-1))
    clip.train(was_training)
    return torch.cat(rows)


class PictureCollator:
    """Makes a batch of pictures, each with its `label` and the image as `rgb()`.

    A blank (None) is left out: a batch of blanks alone has no picture, and nothing in it counts.

    Args:
        processor: CLIP's image processor.
    """

    # Whether None may stand in the place of a picture.
    takes_blanks: ClassVar[bool] = True

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, pictures: Sequence[Any]) -> dict[str, Tensor]:
        """The arguments of `CLIPClassifier.forward`."""
        import PIL.Image

        real = [each for each in pictures if each is not None]
        # Of any picture the processor makes pixels of the right size.
        images = [each.rgb() for each in real] or [PIL.Image.new("RGB", (8, 8))]
        pixels = self.processor(images=images, return_tensors="pt")["pixel_values"][: len(real)]
        return {"pixel_values": pixels, "labels": torch.tensor([each.label for each in real], dtype=torch.long)}


@torch.no_grad()
def classified(
    model: nn.Module, pictures: Sequence[Any], processor: Any, batch_size: int = 64
) -> list[tuple[int, float]]:
    """(the label that a `CLIPClassifier` gives, −log p of the right one) of each picture, in evaluation mode."""
    collate = PictureCollator(processor)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    found: list[tuple[int, float]] = []
    for start in range(0, len(pictures), batch_size):
        batch = {name: each.to(device) for name, each in collate(pictures[start : start + batch_size]).items()}
        logits = model(pixel_values=batch["pixel_values"]).logits
        losses = nn.functional.cross_entropy(logits.float(), batch["labels"], reduction="none")
        found += zip(logits.argmax(-1).tolist(), losses.tolist(), strict=True)
    model.train(was_training)
    return found
