"""`nalora data`: how a data file is read, before anything is trained on it."""

from __future__ import annotations

import itertools
from typing import Annotated

import typer

from nalora.cli.screen import console, hush_libraries, table


def data(
    source: Annotated[str, typer.Argument(metavar="DATA", help="A data file, a folder of them, or hub:owner/name.")],
    model: Annotated[str | None, typer.Option(help="Model whose tokenizer counts the tokens.")] = None,
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings: columns, format, test, measure, …")
    ] = None,
    max_length: Annotated[int, typer.Option(help="Rows of more tokens than this would be dropped.")] = 1024,
    style: Annotated[str, typer.Option(help="auto, plain or chat.")] = "auto",
) -> None:
    """Show how a data file is read: its format, its rows, lengths in tokens, and an example with the trained tokens.

    nalora data sums.jsonl --model smollm2-135m
    """
    from rich.markup import escape
    from rich.text import Text

    from nalora import tasks
    from nalora.errors import NALoRAError, SettingsError, require
    from nalora.runs.settings import key_values, without_removed
    from nalora.runs.values import converted
    from nalora.tasks.data_files import SUFFIXES, is_data
    from nalora.tasks.own_data import OwnData

    require(style in ("auto", "plain", "chat"), "--style", style, "auto, plain or chat")
    if not is_data(source):
        raise NALoRAError(
            f"nalora data {source}",
            found="no data file",
            expected=f"a file with one of {', '.join(SUFFIXES)}, a folder, or hub:owner/name",
            fix="check the path",
        )
    values, problems = without_removed(key_values(options or [])), list[str]()
    known = tasks.option_types(source)
    for name, value in values.items():
        if name in known:
            converted(name, value, known[name], problems)
    if problems:
        raise SettingsError(f"nalora data {source}", problems)
    task = tasks.get(source, **values)
    assert isinstance(task, OwnData)
    train = task.training_set()
    screen = console()
    rows = table("", "", show_header=False)
    rows.add_row("format", task.reader.format.name)
    columns = ", ".join(f"{role}: {column}" for role, column in task.reader.columns.items())
    rows.add_row("columns", escape(columns))
    rows.add_row("training rows", f"{len(train):,}")
    rows.add_row("left out", f"{task.dropped_test_questions:,} whose question is in the test set")
    rows.add_row("test rows", f"{len(task.test_examples()):,}")
    rows.add_row("measure", ", ".join(task.measures))
    if model is not None:
        hush_libraries()
        from nalora.models.loading import ModelSpec, load_processor
        from nalora.runs.encoding import Encoder

        encoder = Encoder(load_processor(ModelSpec(model)), style=style)
        lengths = sorted(len(encoder.row(example)["input_ids"]) for example in train)
        quantiles = [lengths[int(q * (len(lengths) - 1))] for q in (0, 0.5, 0.9, 1)]
        rows.add_row(
            "tokens per row", "minimum {:,}, median {:,}, 90th percentile {:,}, maximum {:,}".format(*quantiles)
        )
        longer = sum(length > max_length for length in lengths)
        rows.add_row("too long", f"{longer:,} rows of more than {max_length:,} tokens (--max-length)")
    screen.print(rows)
    first = train[0]
    pieces = [(first.prompt, False), (first.target, True)]
    count = ""
    if model is not None:
        row = encoder.row(first)
        pieces = [
            (encoder.tokenizer.decode([token]), label == token)
            for token, label in zip(row["input_ids"], row["labels"], strict=True)
        ]
        count = f": {sum(trained for _, trained in pieces)} of {len(pieces)} tokens"
    example = Text()
    for trained, group in itertools.groupby(pieces, key=lambda piece: piece[1]):
        text = "".join(piece for piece, _ in group)
        # Without colours, brackets mark what is trained on.
        example.append(text if screen.is_terminal or not trained else f"⟦{text}⟧", "bold green" if trained else "dim")
    screen.print(example)
    mark = "bold" if screen.is_terminal else "in ⟦⟧"
    screen.print(f"{mark}: trained on{count or ' (give --model for tokens)'}", style="dim", highlight=False)
