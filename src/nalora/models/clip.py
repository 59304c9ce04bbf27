"""CLIP as an image classifier: the frozen text tower's embeddings of the class names are the vision tower's head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput


class CLIPClassifier(nn.Module):
    """Class scores of images as CLIP computes them: logit scale × cosine to each prompt's embedding.

    The text tower runs once, here, and is not kept: only the vision tower can be adapted or trained. Layers keep their
    names in the CLIPModel, so that an adapter trained here loads there.

    Args:
        clip: a `transformers.CLIPModel`; its vision tower is shared, not copied.
        tokenizer: CLIP's tokenizer.
        prompts: one for each class, such as `ImageTask.prompts()`.
    """

    head: Tensor
    logit_scale: Tensor
    # Lets a Trainer pass num_items_in_batch to `forward`.
    accepts_loss_kwargs = True

    def __init__(self, clip: Any, tokenizer: Any, prompts: Sequence[str]) -> None:
        super().__init__()
        # PEFT writes this name into the adapter's configuration. With a `config` as well PEFT would take this for a
        # transformers model and look for a base_model_prefix, which a plain module does not have.
        self.name_or_path = clip.name_or_path
        self.vision_model = clip.vision_model
        self.visual_projection = clip.visual_projection
        self.register_buffer("head", zero_shot_head(clip, tokenizer, prompts))
        self.register_buffer("logit_scale", clip.logit_scale.detach().exp())

    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, num_items_in_batch: Tensor | int | None = None
    ) -> ImageClassifierOutput:
        """Return the scores as `logits`, one row per image, and with labels the cross-entropy as `loss`.

        The loss is the sum over the images divided by `num_items_in_batch`, the number of images of a whole step, or
        by the number of these images: a mean of means would weight the images of a smaller last pass more.
        """
        # CLIP's attention cannot process an empty batch, but every process has to call every layer: it then gets one
        # black image, which is dropped again. It has no label, so NA-LoRA's statistics do not count it.
        count = len(pixel_values)
        inputs = pixel_values if count else pixel_values.new_zeros(1, *pixel_values.shape[1:])
        images = self.visual_projection(self.vision_model(pixel_values=inputs).pooler_output[:count])
        logits = self.logit_scale * nn.functional.normalize(images, dim=-1) @ self.head.T
        loss = None
        if labels is not None:
            items = len(labels) if num_items_in_batch is None else num_items_in_batch
            loss = nn.functional.cross_entropy(logits.float(), labels, reduction="sum") / items
        return ImageClassifierOutput(loss=loss, logits=logits)


@torch.no_grad()
def zero_shot_head(clip: Any, tokenizer: Any, prompts: Sequence[str], batch_size: int = 64) -> Tensor:
    """Return the text tower's embeddings of the prompts, normalised, one row per prompt."""
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
    """Makes batches of pictures, which have a `label` and return their image from `rgb()`; skips None.

    Args:
        processor: CLIP's image processor.
    """

    # The dataset may contain None in place of a picture.
    accepts_none: ClassVar[bool] = True

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, pictures: Sequence[Any]) -> dict[str, Tensor]:
        """Return the arguments of `CLIPClassifier.forward`."""
        import PIL.Image

        real = [picture for picture in pictures if picture is not None]
        # For a batch without pictures the processor resizes a blank one, so that the shape of the pixels is known.
        images = [picture.rgb() for picture in real] or [PIL.Image.new("RGB", (8, 8))]
        pixels = self.processor(images=images, return_tensors="pt")["pixel_values"][: len(real)]
        return {"pixel_values": pixels, "labels": torch.tensor([picture.label for picture in real], dtype=torch.long)}


@torch.no_grad()
def classify(
    model: nn.Module, pictures: Sequence[Any], processor: Any, batch_size: int = 64
) -> list[tuple[int, float]]:
    """Return (predicted label, −log p of the correct label) of each picture, computed in evaluation mode."""
    collate = PictureCollator(processor)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    results: list[tuple[int, float]] = []
    for start in range(0, len(pictures), batch_size):
        batch = {name: tensor.to(device) for name, tensor in collate(pictures[start : start + batch_size]).items()}
        logits = model(pixel_values=batch["pixel_values"]).logits
        losses = nn.functional.cross_entropy(logits.float(), batch["labels"], reduction="none")
        results += zip(logits.argmax(-1).tolist(), losses.tolist(), strict=True)
    model.train(was_training)
    return results
