from __future__ import annotations

import peft
import pytest
import tokenizers
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

import nalora
from nalora import tasks
from nalora.models import clip as clip_module
from nalora.models.clip import CLIPClassifier, PictureCollator, zero_shot_head
from nalora.runs.folder import RunFolder, read_jsonl
from nalora.runs.settings import check
from nalora.tasks.image_splits import LabelledImage
from nalora.tasks.images import ImageTask
from nalora.training.run import train

LAYERS = ImageTask.linear_layers


def classify(*arguments, **options):
    return [label for label, _ in clip_module.classify(*arguments, **options)]


def class_losses(*arguments):
    return [loss for _, loss in clip_module.classify(*arguments)]


pytest.importorskip("sklearn")

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "a", "photo", "of", "the", "number", *"0123456789", "."]
PROMPTS = [f"a photo of the number {digit}." for digit in range(10)]
# 16 patches and the class token.
TOKENS_PER_IMAGE = 17


def tokenizer():
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def clip(dtype=torch.float32, spread: float = 3.0):
    """A small CLIP with random weights, wide enough in the text tower to distinguish the prompts."""
    torch.manual_seed(0)
    size = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    text = dict(vocab_size=len(WORDS), max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = transformers.CLIPConfig(
        text_config=size | text | dict(initializer_factor=spread),
        vision_config=size | dict(image_size=16, patch_size=4, initializer_factor=spread),
        projection_dim=24,
    )
    return transformers.CLIPModel(config).to(dtype).eval()


def processor():
    return transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})


def saved_clip(folder) -> str:
    """The small CLIP as a folder that a run can name."""
    clip().save_pretrained(folder)
    transformers.CLIPProcessor(processor(), tokenizer()).save_pretrained(folder)
    return str(folder)


def classifier(dtype=torch.float32):
    return CLIPClassifier(clip(dtype), tokenizer(), PROMPTS)


def adapted(dtype=torch.float32, target_modules=LAYERS):
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=target_modules)
    return peft.get_peft_model(classifier(dtype), config, autocast_adapter_dtype=False)


@pytest.fixture(scope="module")
def digits():
    return tasks.get("digits")


def accuracy(model, pictures):
    labels = classify(model, pictures, processor(), batch_size=99)
    return sum(label == each.label for label, each in zip(labels, pictures, strict=True)) / len(pictures)


def test_the_scores_are_clips_own(digits):
    whole = clip(torch.float64)
    pixels = PictureCollator(processor())(digits.test_images()[:7])["pixel_values"].double()
    # One prompt is shorter than the others: padding must not reach its embedding.
    prompts = ["a photo.", *PROMPTS]
    inputs = tokenizer()(prompts, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = whole(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], pixel_values=pixels
        ).logits_per_image
        found = CLIPClassifier(whole, tokenizer(), prompts)(pixels)
    assert expected.std() > 0.1
    torch.testing.assert_close(found.logits, expected, rtol=1e-12, atol=1e-12)
    assert found.loss is None


def test_the_head_is_the_same_in_any_batches_and_leaves_the_model_as_it_was():
    whole = clip().train()
    torch.testing.assert_close(
        zero_shot_head(whole, tokenizer(), PROMPTS, batch_size=3), zero_shot_head(whole, tokenizer(), PROMPTS)
    )
    assert whole.training
    torch.testing.assert_close(zero_shot_head(whole, tokenizer(), PROMPTS).norm(dim=-1), torch.ones(10))


def test_prompts_longer_than_the_text_tower_are_cut():
    head = zero_shot_head(clip(), tokenizer(), ["a photo of " * 20, *PROMPTS])
    assert head.shape == (11, 24)
    assert head.isfinite().all()


def test_only_the_vision_tower_is_trainable(digits):
    whole = clip()
    model = CLIPClassifier(whole, tokenizer(), PROMPTS)
    model(**PictureCollator(processor())(digits.train_images()[:4])).loss.backward()
    with_gradient = {name for name, each in whole.named_parameters() if each.grad is not None}
    assert with_gradient == {
        name for name, _ in whole.named_parameters() if name.startswith(("vision_model.", "visual_projection."))
    }
    assert not model.head.requires_grad
    assert not model.logit_scale.requires_grad


@pytest.mark.parametrize("target_modules", [LAYERS, ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]])
def test_adapters_are_in_the_vision_tower_only(target_modules):
    model = adapted(target_modules=target_modules)
    linear = {
        name
        for name, module in classifier().named_modules()
        if isinstance(module, torch.nn.Linear) and (target_modules is LAYERS or name != "visual_projection")
    }
    assert {name for name in model.targeted_module_names} == linear
    assert len(linear) == 12 + (target_modules is LAYERS)


def test_an_adapter_trained_here_loads_on_the_whole_clip(digits, tmp_path):
    model = adapted()
    torch.nn.init.normal_(model.base_model.model.vision_model.encoder.layers[1].mlp.fc1.lora_B["default"].weight)
    pixels = PictureCollator(processor())(digits.test_images()[:3])["pixel_values"]
    expected = model(pixel_values=pixels).logits
    model.save_pretrained(tmp_path)

    whole = peft.PeftModel.from_pretrained(clip(), tmp_path)
    assert not any("text_model" in name for name in whole.targeted_module_names)
    inputs = tokenizer()(PROMPTS, padding=True, return_tensors="pt")
    found = whole(input_ids=inputs["input_ids"], pixel_values=pixels).logits_per_image
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(expected, classifier()(pixels).logits, atol=1e-3)


def test_batches_of_any_size_give_the_same_predictions(digits):
    model = classifier(torch.float64).train()
    pictures = digits.test_images()[:50]
    predictions = [classify(model, pictures, processor(), batch_size) for batch_size in (1, 7, 50, 64)]
    assert all(each == predictions[0] for each in predictions)
    assert len(predictions[0]) == 50
    assert len(set(predictions[0])) > 1
    assert model.training


def test_losses_of_classes_equal_the_training_loss_for_any_batch_size(digits):
    model = classifier(torch.float64).train()
    pictures = digits.test_images()[:50]
    losses = class_losses(model, pictures, processor(), 7)
    assert losses == pytest.approx(class_losses(model, pictures, processor(), 50))
    whole = model.eval()(**PictureCollator(processor())(pictures)).loss.item()
    assert sum(losses) / 50 == pytest.approx(whole, rel=1e-6)


def test_images_of_any_mode_and_size_are_classified(tmp_path):
    Image.new("P", (40, 23)).save(tmp_path / "palette.png")
    modes = [LabelledImage(mode, Image.new(mode, (9, 30)), 0) for mode in ("L", "RGBA", "1", "RGB", "CMYK")]
    labels = classify(classifier(), [*modes, LabelledImage("file", tmp_path / "palette.png", 3)], processor(), 4)
    assert len(labels) == 6


def test_nalora_finds_the_vision_ffns_and_counts_their_tokens(digits):
    model = adapted()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    controller = nalora.attach(model, optimizer, nalora.NALoRAConfig(apply_to="update", regimes="derived"))
    blocks = [each.block for each in controller.plan.blocks]
    assert [block.name.removeprefix("base_model.model.") for block in blocks] == [
        f"vision_model.encoder.layers.{layer}.mlp" for layer in range(2)
    ]
    assert {(b.gate.name.split(".")[-1], b.down.name.split(".")[-1], b.activation.name) for b in blocks} == {
        ("fc1", "fc2", "quick_gelu")
    }
    assert all(each.mask and each.scaling for each in controller.plan.blocks)

    collate = PictureCollator(processor())
    before = {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}
    for step, images in enumerate((5, 8)):
        model(**collate(digits.train_images()[20 * step : 20 * step + images])).loss.backward()
        counted = [tokens for group in controller._window.groups for tokens in group.tokens.tolist()]
        assert counted == [images * TOKENS_PER_IMAGE] * 2
        optimizer.step()
        optimizer.zero_grad()
    after = dict(model.named_parameters())
    assert all(not torch.equal(before[name], after[name]) for name in before if "lora_B" in name)
    assert 0 < controller.metrics()["mask_mean"] < 1


def trainer(model, digits, folder, **settings):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=32,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        lr_scheduler_type="cosine",
        save_strategy="no",
        logging_strategy="no",
        **settings,
    )
    collator = PictureCollator(processor())
    return transformers.Trainer(model, arguments, train_dataset=digits.train_images(), data_collator=collator)


def test_lora_with_trainer_fits_the_digits(digits, tmp_path):
    model = adapted()
    frozen = {name: each.clone() for name, each in model.named_parameters() if not each.requires_grad}
    test = digits.test_images()
    before = accuracy(model, test)
    run = trainer(model, digits, tmp_path, learning_rate=1e-2, num_train_epochs=3)
    controller = nalora.attach_trainer(run)
    run.train()
    after = accuracy(model, test)
    assert before < 0.2, "one in ten is chance, with a standard error of 0.017"
    assert after > 0.3
    assert run.evaluate(test)["eval_loss"] < 2.2
    assert controller.metrics()
    assert all(torch.equal(each, dict(model.named_parameters())[name]) for name, each in frozen.items())


def test_full_fine_tuning_with_trainer_fits_and_evaluates(digits, tmp_path):
    model = classifier()
    head = model.head.clone()
    run = trainer(model, digits, tmp_path, learning_rate=2e-3, max_steps=150)
    run.train()
    assert accuracy(model, digits.test_images()) > 0.5
    assert torch.equal(model.head, head)
    assert run.evaluate(digits.test_images())["eval_loss"] < 2.0


@pytest.mark.parametrize("micro", [4, 2])
def test_a_step_is_the_same_in_any_passes(tmp_path, micro):
    """Of 11 digits the second step has 3: passes of 2 and 1, whose means are of unlike numbers."""
    settings = {
        "model": saved_clip(tmp_path / "clip"), "task": "digits", "train_limit": 11, "device": "cpu", "epochs": 2,
        "batch_size": 8, "learning_rate": 1e-2, "log_every": 1, "dtype": "float32", "max_norm": 0.1,
    }  # fmt: skip
    for size in (8, micro):
        train(check({**settings, "micro_batch_size": size, "output": str(tmp_path / str(size))}))
    whole, parts = (RunFolder(tmp_path / str(size)) for size in (8, micro))
    for name in ("loss", "grad_norm"):
        expected, found = ([row[name] for row in read_jsonl(each.metrics)] for each in (whole, parts))
        assert len(expected) == 4
        assert found == pytest.approx(expected, rel=1e-4)
    weights = load_file(whole.adapter / "adapter_model.safetensors")
    for name, found in load_file(parts.adapter / "adapter_model.safetensors").items():
        torch.testing.assert_close(found, weights[name], rtol=1e-3, atol=1e-5)


def test_the_loss_of_an_evaluation_is_a_mean_whatever_the_batches(digits, tmp_path):
    run = trainer(classifier(), digits, tmp_path, max_steps=1)
    pictures = digits.test_images()[:50]
    expected = sum(class_losses(run.model, pictures, processor())) / 50
    assert run.evaluate(pictures)["eval_loss"] == pytest.approx(expected, rel=1e-5)
