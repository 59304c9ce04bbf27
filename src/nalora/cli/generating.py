"""`nalora generate`: answers of a run, an adapter or a model to the prompts of a file, or to one prompt."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nalora.cli.chatting import note
from nalora.cli.screen import (
    INTERRUPTED,
    BaseModel,
    Device,
    MaxTokens,
    Seed,
    Style,
    Target,
    Temperature,
    TopP,
    Trust,
    hush_libraries,
    literal,
    printable,
)
from nalora.errors import NALoRAError, counted
from nalora.runs.progress import bars


def generate(
    target: Target,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help="Prompts: a data file as for `nalora data`, whose answers are not needed, a folder, hub:owner/name, or"
            " lines of a .txt file.",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="OUT.jsonl", help="File for the answers.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Print the answer to this prompt, in place of a file.")] = None,
    model: BaseModel = None,
    system: Annotated[str, typer.Option(help="System message for prompts that have none.")] = "",
    split: Annotated[str, typer.Option(help="Split of a folder or a data set of the hub.")] = "test",
    columns: Annotated[
        list[str] | None, typer.Option(metavar="ROLE=COLUMN", help="Column of the prompts, such as prompt=body.")
    ] = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    max_tokens: MaxTokens = 512,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of prompt and answer tokens per batch.")
    ] = 32_768,
    style: Style = None,
    device: Device = None,
    trust: Trust = False,
) -> None:
    """Generate answers to the prompts of a file. Started again after Ctrl-C or a kill, it continues.

    nalora generate runs/laptop questions.jsonl --output answers.jsonl

    nalora generate my-adapter --model Qwen/Qwen3-0.6B --prompt "What is 12 + 30?"
    """
    _check(file, output, prompt)
    hush_libraries()
    notes = Console(stderr=True)
    progress = notes if notes.is_terminal else Console(quiet=True)
    from nalora.evaluation.answer_file import AnswerFile, refuse_foreign
    from nalora.evaluation.conversation import Conversation, prompt_form
    from nalora.evaluation.generate import generate_file
    from nalora.evaluation.generation import AnswerGenerator, Sampling
    from nalora.evaluation.identity import identity_of_model, key_of
    from nalora.runs import targets
    from nalora.runs.conversion import key_values
    from nalora.tasks.data_files import contents
    from nalora.tasks.prompts import PromptRows

    named = targets.resolve(target, model=model, device=device, trust=trust)
    if output is not None:
        refuse_foreign(output)
    chosen = {name: str(value) for name, value in key_values(columns or []).items()}
    # Before the model is loaded: the form of prompts comes later.
    rows = None
    if file is not None:
        with bars(progress, transient=True) as report:
            rows = PromptRows(file, split, chosen, system, report=report)
    with notes.status(literal(f"loading {target}")):
        loaded = targets.load(named).trained
        form = prompt_form(named, loaded.processor, loaded.spec.kind, style)
    if form.notice:
        note(form.notice, notes)
    sampling = Sampling(temperature, top_p, seed)
    if prompt is not None:
        conversation = Conversation(loaded, form, sampling, max_tokens, system)
        reply = conversation.answer(prompt, lambda part: print(printable(part), end="", flush=True))
        print()
        if not reply.finished:
            note(f"(cut after {counted(reply.tokens, 'token')}: --max-tokens)", notes)
        return
    assert rows is not None
    assert file is not None
    assert output is not None
    if form.before or form.after:
        rows.wrap = form.plain
    setup = {
        **identity_of_model(loaded, named.trained), "form": [form.encoder.is_chat, form.before, form.after],
        "prompts": [contents(file), split, chosen, system], "sampling": dataclasses.asdict(sampling),
        "max_tokens": max_tokens,
    }  # fmt: skip
    generator = AnswerGenerator(
        loaded.model,
        form.encoder,
        max_new_tokens=max_tokens,
        stop=form.stops,
        batch_tokens=batch_tokens,
        sampling=sampling,
    )
    with AnswerFile(output, key_of(setup)) as answers:
        known = len(answers.done)
        try:
            with bars(progress, transient=True) as report:
                added = generate_file(generator, rows, answers, report)
        except KeyboardInterrupt:
            done = f"{len(answers.done):,} of {counted(len(rows), 'answer')}"
            note(f"Stopped after {done}; the same command continues.", notes)
            raise typer.Exit(INTERRUPTED) from None
    note(f"{counted(added, 'answer')}{f', {known:,} were there already' if known else ''}: {output}", notes)


def _check(file: str | None, output: Path | None, prompt: str | None) -> None:
    """Raise NALoRAError unless there is one source of prompts, and a file for the answers to many."""
    if (file is None) == (prompt is None):
        found = "neither FILE nor --prompt" if file is None else "both FILE and --prompt"
        raise NALoRAError("nalora generate", found=found, expected="one of them", fix="see `nalora generate --help`")
    if (file is None) != (output is None):
        found, fix = (
            ("no --output for the answers", "add --output OUT.jsonl")
            if output is None
            else ("--output with --prompt", "leave --output out: the answer is printed")
        )
        raise NALoRAError("nalora generate", found=found, expected="--output with FILE", fix=fix)
