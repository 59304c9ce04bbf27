"""Export a run, an adapter or a model as a folder that stock libraries load: `nalora export`."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from nalora.errors import NALoRAError, missing_package
from nalora.files import atomic
from nalora.methods import merging
from nalora.methods.served_form import refuse_unserved, save_served
from nalora.models import loading
from nalora.models.adapters import adapter_config, with_adapter
from nalora.models.gguf_architectures import Architecture
from nalora.models.gguf_vocabulary import vocabulary_of
from nalora.models.gguf_writer import BYTES, Precision, write_gguf
from nalora.models.loading import Loaded
from nalora.report.model_card import Card, base_name, is_dequantised
from nalora.runs import targets
from nalora.runs.progress import Report
from nalora.runs.targets import Target
from nalora.runs.writable import refuse_unwritable

Form = Literal["peft", "merged", "gguf", "vllm"]
Dtype = Literal["float32", "float16", "bfloat16"]
# Adapter, tokenizer and card, in bytes, with room to spare.
_BESIDES_WEIGHTS = 100_000_000


@dataclass(frozen=True)
class Exported:
    """The folder that was written, and sentences about it: the check, and what differs."""

    folder: Path
    facts: list[str]


def export(
    target: Target,
    form: Form,
    output: Path,
    *,
    dtype: Dtype | None = None,
    precision: Precision = "f16",
    report: Report = lambda what, done, total: None,
) -> Exported:
    """Write the folder, complete or not at all.

    Args:
        target: what to export.
        form: of the result.
        output: a folder that does not exist or is empty.
        dtype: of merged weights; by default that of the base model's files.
        precision: of a GGUF file's matrices.
        report: called with (description, done, total) during long work.

    Raises:
        NALoRAError: a folder with files, too little space, a target without an adapter where the form needs one, what
            the form cannot represent, or a merged model that differs from the adapted one.
    """
    refuse_occupied(output)
    spec = replace(target.spec, kind=loading.model_kind(target.spec))
    target = replace(target, spec=spec)
    if form in ("peft", "vllm"):
        with _complete_folder(output) as folder:
            facts = _export_adapter(target, form, folder, output.name)
    else:
        facts = _export_model(target, form, output, dtype, precision, report)
    return Exported(output, facts)


def refuse_occupied(output: Path) -> None:
    """Raise NALoRAError unless the folder can be created, or is empty: an export replaces nothing."""
    refuse_unwritable(output, "give another --output")
    if output.is_symlink() or (output.exists() and any(output.iterdir())):
        found = "a symbolic link" if output.is_symlink() else "a folder with files"
        raise NALoRAError(
            str(output), found=found, expected="a new or an empty folder", fix="give another --output, or move it away"
        )


def _export_adapter(target: Target, form: Form, folder: Path, name: str) -> list[str]:
    adapter = target.adapter
    if adapter is None:
        raise NALoRAError(
            target.name,
            found="a fully fine-tuned model" if target.trained else "a model without an adapter",
            expected=f"an adapter for the form {form}",
            fix="export --to merged or --to gguf",
        )
    config = adapter_config(adapter)
    facts: list[str] = []
    rank = 0
    if form == "vllm":
        refuse_unserved(config, adapter)
        models = targets.load(target)
        rank = save_served(models.trained.model, folder)
        before = merging.answer(models.trained.model, models.trained.processor)
        processor, dtype = models.trained.processor, next(models.trained.model.parameters()).dtype
        del models
        gc.collect()
        after = merging.answer(_on_base(target, folder).model, processor)
        facts.append(_checked(merging.compare(before, after, dtype), "the exported adapter", "the trained one"))
    else:
        for file in adapter.iterdir():
            if file.is_file() and file.name.startswith(("adapter_model.", "adapter_config.")):
                shutil.copyfile(file, folder / file.name)
        processor = targets.load_processor(target, target.spec.kind)
    _name_base(folder, base_name(target))
    _finish(
        Card(target, form, name, base_name(target), _is_chat(target, processor), facts, rank=rank), processor, folder
    )
    return facts


def _export_model(
    target: Target, form: Form, output: Path, dtype: Dtype | None, precision: Precision, report: Report
) -> list[str]:
    if target.spec.kind == "clip":
        raise NALoRAError(target.name, found="a CLIP", expected="a language model", fix="export --to peft")
    config = loading.read_config(target.trained_spec)
    if config is None:
        with targets.near_names(target.name):
            loading.load_skeleton(target.trained_spec)  # raises the reason
    own = getattr(config, "dtype", None) or torch.float32
    method = _stored_quantisation(target, config)
    if form == "gguf":
        if importlib.util.find_spec("gguf") is None:
            raise missing_package("--to gguf", "gguf", "to write the file", "'nalora[export]'")
        architecture = Architecture(config)
        # A tokenizer that cannot be written is refused before the model is loaded.
        tokenizer = targets.load_processor(target, target.spec.kind)
        vocabulary_of(tokenizer, max(len(tokenizer), architecture.config.vocab_size))
        wanted = own if (own, precision) in ((torch.bfloat16, "bf16"), (torch.bfloat16, "q8_0")) else torch.float32
    else:
        wanted = getattr(torch, dtype) if dtype else own
    loaded = torch.promote_types(own, wanted)
    facts = []
    if method:
        facts.append(f"the base model was trained on quantised to 4 bits ({method}); its weights were dequantised")
    if is_dequantised(target.spec.name):
        facts.append("the base model is a GGUF file; its weights were dequantised to float32")
    with _complete_folder(output) as folder:
        model, before = _merged(target, str(loaded).removeprefix("torch."), wanted, bool(method), report)
        trained, processor = model.model, model.processor
        parameters = sum(parameter.numel() for parameter in trained.parameters())
        size = BYTES[precision] if form == "gguf" else wanted.itemsize
        _refuse_full_disk(output, int(size * parameters) + _BESIDES_WEIGHTS)
        file = ""
        if form == "gguf":
            file = f"{output.name}-{precision}.gguf"
            notices = _write_gguf(trained, processor, architecture, folder / file, precision, report)
            facts += [f"matrices are stored as {precision}", *notices]
        else:
            saved: Any = trained
            saved.save_pretrained(folder, max_shard_size="5GB")
            facts.append(f"weights are stored as {str(wanted).removeprefix('torch.')}")
        if before is not None:
            if form == "merged":
                # What was written is compared, not what was in memory.
                processor.save_pretrained(folder)
                spec = replace(target.trained_spec, name=str(folder), revision=None, quantise=None)
                del trained, model
                gc.collect()
                spec = replace(spec, dtype=str(wanted).removeprefix("torch."))
                trained = loading.load(spec, processor=processor).model
            # 4-bit layers compute in bfloat16 on a CPU, whatever their dtype.
            rounding = torch.bfloat16 if method else wanted
            agreement = merging.compare(before, merging.answer(trained, processor), rounding)
            facts.append(_checked(agreement, "the merged model", "the adapted one"))
        card = Card(target, form, output.name, base_name(target), _is_chat(target, processor), facts, file=file)
        _finish(card, processor, folder)
    return facts


def _merged(
    target: Target, dtype: str, wanted: torch.dtype, dequantise: bool, report: Report
) -> tuple[Loaded, merging.Answers | None]:
    """Return the model to write, and what the adapted model answered before its adapter was merged."""
    target = replace(target, spec=replace(target.spec, dtype=dtype))
    models = targets.load(target)
    if target.adapter is None:
        return replace(models.trained, model=models.trained.model.to(wanted)), None
    before = merging.answer(models.trained.model, models.trained.processor)
    adapted = models.trained
    if dequantise:
        # Merging into 4-bit layers would round the sum to 4 bits again.
        del models, adapted
        gc.collect()
        adapted = _on_base(target, target.adapter, dequantise=True)
    return replace(adapted, model=merging.merge(adapted.model, wanted, report)), before


def _on_base(target: Target, adapter: Path, *, dequantise: bool = False) -> Loaded:
    """Load the base model again, with the adapter of a folder."""
    processor = targets.load_processor(target, target.spec.kind)
    base = loading.load(target.spec, processor=processor)
    model = merging.dequantised(base.model) if dequantise else base.model
    return replace(base, model=with_adapter(model, adapter))


def _stored_quantisation(target: Target, config: Any) -> str | None:
    """Return the 4-bit format of the base model if it has dense weights that compute the same; None without one.

    Raises:
        NALoRAError: a format without such weights.
    """
    stored = getattr(config, "quantization_config", None)
    options = stored if isinstance(stored, dict) else stored.to_dict() if stored is not None else {}
    method = str(options.get("quant_method", "")).rpartition(".")[2].lower()
    four_bits = target.spec.quantise == "4bit" or ("bitsandbytes" in method and options.get("load_in_4bit"))
    if target.trained is not None and target.adapter is None:
        return None  # a fully fine-tuned model has weights of its own
    if four_bits:
        return "NF4 of bitsandbytes"
    if target.spec.quantise or options:
        raise NALoRAError(
            target.spec.name,
            found=f"a base model quantised by {target.spec.quantise or method}",
            expected="dense weights, or 4 bits of bitsandbytes, which have dense weights that compute the same",
            fix="export --to peft; or give the dense model with --model, which then differs from the one trained on",
        )
    return None


def _write_gguf(
    model: Any, processor: Any, architecture: Architecture, path: Path, precision: Precision, report: Report
) -> list[str]:
    # Adapters may have untied the output layer since the configuration was read.
    ends = model.generation_config.eos_token_id if model.generation_config else None
    rows = model.get_input_embeddings().weight.shape[0]
    vocabulary = vocabulary_of(processor, rows, ends if isinstance(ends, list) else [])
    template = processor.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    write_gguf(
        path, architecture, vocabulary, model.state_dict(), precision=precision, name=path.stem, chat_template=template,
        report=report,
    )  # fmt: skip
    return vocabulary.notices


def _checked(agreement: merging.Agreement, one: str, other: str) -> str:
    if not agreement.holds:
        what = "answers other than those of" if agreement.is_finite else "logits that are not finite, here or in"
        raise NALoRAError(
            one,
            found=f"{what} {other}: {agreement}",
            expected="the same up to rounding",
            fix="give --dtype float32, or export --to peft and report it",
        )
    return f"{one} compared with {other} on {len(merging.PROMPTS)} prompts: {agreement}"


def _name_base(folder: Path, base: str) -> None:
    """Let the adapter's configuration name the base model by what stock libraries load it from."""
    config = adapter_config(folder)
    config["base_model_name_or_path"] = base
    atomic.write(folder / "adapter_config.json", atomic.json_text(config, indent=2) + "\n")


def _finish(card: Card, processor: Any, folder: Path) -> None:
    processor.save_pretrained(folder)
    atomic.write(folder / "README.md", card.text())


def _is_chat(target: Target, processor: Any) -> bool:
    """Return whether the model expects the tokenizer's chat template: a run with plain prompts was trained without."""
    plain = target.run is not None and target.run.run.settings.prompt_style == "plain"
    return not plain and bool(getattr(processor, "chat_template", None))


def _refuse_full_disk(output: Path, needed: int) -> None:
    place = next(folder for folder in output.absolute().parents if folder.is_dir())
    if (free := shutil.disk_usage(place).free) < needed:
        raise NALoRAError(
            str(output),
            found=f"{free / 1e9:.1f} GB free",
            expected=f"{needed / 1e9:.1f} GB for the exported model",
            fix="make room, or give an --output on another disk",
        )


@contextlib.contextmanager
def _complete_folder(output: Path) -> Iterator[Path]:
    """Yield a folder under a temporary name, which gets its own after the block and is removed on any error."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.partial-", dir=output.parent))
    try:
        yield partial
        partial.chmod(0o755)  # mkdtemp gives access to its owner alone
        for file in partial.iterdir():
            atomic.sync(file)
        if output.exists():
            output.rmdir()  # raises if another program has written into it since
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
