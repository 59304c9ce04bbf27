"""`nalora export`: a trained model as a folder that other programs load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from nalora.cli.screen import Device, Trust, console, hush_libraries
from nalora.runs.progress import bars


def export(
    target: Annotated[
        str, typer.Argument(metavar="RUN|ADAPTER|MODEL", help="The folder of a run or an adapter, or a model.")
    ],
    to: Annotated[
        Literal["peft", "merged", "gguf", "vllm"],
        typer.Option(
            help="A PEFT adapter, merged weights for transformers, a GGUF file for llama.cpp and Ollama, or an adapter"
            " for vLLM."
        ),
    ],
    output: Annotated[Path, typer.Option(help="A new or empty folder.")],
    model: Annotated[str | None, typer.Option(help="Base model (default: the one that the adapter names).")] = None,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        typer.Option(help="Of merged weights (default: that of the base model's files)."),
    ] = None,
    precision: Annotated[
        Literal["f32", "f16", "bf16", "q8_0"], typer.Option(help="Of the matrices in a GGUF file.")
    ] = "f16",
    device: Device = None,
    trust: Trust = False,
) -> None:
    """Export a trained model with tokenizer and model card. Merged weights are compared with the adapted model.

    nalora export runs/na --to gguf --precision q8_0 --output na-gguf
    """
    hush_libraries()
    from rich.markup import escape

    from nalora.report.export import export as export_target
    from nalora.report.export import refuse_occupied
    from nalora.runs import targets

    refuse_occupied(output)
    screen = console()
    with bars(screen, transient=True) as report:
        resolved = targets.resolve(target, model=model, device=device, trust=trust)
        exported = export_target(resolved, to, output, dtype=dtype, precision=precision, report=report)
    for fact in exported.facts:
        screen.print(escape(f"{fact[:1].upper()}{fact[1:]}."), highlight=False, soft_wrap=True)
    screen.print(
        escape(f"Exported: {exported.folder} (README.md shows how to load it)"), highlight=False, soft_wrap=True
    )
