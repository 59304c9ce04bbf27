"""`nalora data`: how a data file is read, before anything is trained on it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nalora.cli.screen import console, hush_libraries, literal, table

if TYPE_CHECKING:
    from rich.text import Text

    from nalora.runs.data_summary import LeftOut, Part
    from nalora.runs.encoding import Encoder
    from nalora.tasks.own_data import OwnData


def data(
    source: Annotated[str, typer.Argument(metavar="DATA", help="A data file, a folder of them, or hub:owner/name.")],
    model: Annotated[str | None, typer.Option(help="Model whose tokenizer counts the tokens.")] = None,
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings: columns, format, test, measure, …")
    ] = None,
    max_length: Annotated[int, typer.Option(min=1, help="Rows of more tokens than this would be left out.")] = 1024,
    style: Annotated[str, typer.Option(help="auto, plain or chat.")] = "auto",
) -> None:
    """Show how a data file is read: its format, its rows, those that would be left out and why, their lengths in
    tokens, and an example with the trained tokens.

    nalora data sums.jsonl --model smollm2-135m
    """
    from nalora.errors import require
    from nalora.runs.data_summary import also_tested, count_tokens, example_parts
    from nalora.runs.progress import bars

    require(style in ("auto", "plain", "chat"), "--style", style, "auto, plain or chat")
    screen = console()
    with bars(screen, transient=True, after=1) as report:
        task = _task(source, options or [], report)
        train = task.training_set()
        left_out, quantiles, encoder = [also_tested(task.also_tested)], dict[str, list[int]](), None
        if model is not None:
            hush_libraries()
            encoder = _encoder(task, model, style)
            quantiles, too_long = count_tokens(task, train, encoder, max_length, report)
            left_out.append(too_long)
    rows = table("", "", show_header=False)
    rows.add_row("format", task.reader.format.name)
    optional = {role: " (optional)" for role in task.reader.columns if f"{role}?" in task.reader.format.roles}
    columns = ", ".join(f"{role}: {column}{optional.get(role, '')}" for role, column in task.reader.columns.items())
    rows.add_row("columns", literal(columns))
    rows.add_row("training rows", f"{len(train) - sum(reason.rows for reason in left_out[1:]):,}")
    rows.add_row("test rows", f"{len(task.test_examples()):,}")
    rows.add_row("measure", ", ".join(task.measures))
    for name, values in quantiles.items():
        rows.add_row(name, "minimum {:,}, median {:,}, 90th percentile {:,}, maximum {:,}".format(*values))
    screen.print(rows)
    screen.print(_left_out_table(left_out))
    parts = example_parts(train[0], encoder)
    if encoder is None or encoder.kind == "causal":
        screen.print(_marked("", parts, brackets=not screen.is_terminal))
    else:
        for name, part in zip(("input", "target"), parts, strict=True):
            screen.print(_marked(f"{name}: ", [part], brackets=not screen.is_terminal))
    trained, total = sum(part.tokens for part in parts if part.trained), sum(part.tokens for part in parts)
    count = f": {trained} of {total} tokens" if encoder else ""
    mark = "bold" if screen.is_terminal else "in ⟦⟧"
    screen.print(f"{mark}: trained on{count or ' (give --model for tokens)'}", style="dim", highlight=False)


def _task(source: str, options: list[str], report: Any) -> OwnData:
    from nalora import tasks
    from nalora.errors import NALoRAError, SettingsError
    from nalora.runs.conversion import converted, key_values, without_removed
    from nalora.tasks.data_files import SUFFIXES, is_data
    from nalora.tasks.own_data import OwnData

    if not is_data(source):
        raise NALoRAError(
            f"nalora data {source}",
            found="no data file",
            expected=f"a file with one of {', '.join(SUFFIXES)}, a folder, or hub:owner/name",
            fix="check the path",
        )
    values, problems = without_removed(key_values(options)), list[str]()
    known = tasks.option_types(source)
    for name, value in values.items():
        if name in known:
            converted(name, value, known[name], problems)
    if problems:
        raise SettingsError(f"nalora data {source}", problems)
    task = tasks.get(source, report=report, **values)
    assert isinstance(task, OwnData)
    return task


def _encoder(task: OwnData, model: str, style: str) -> Encoder:
    """Return what makes rows of tokens for this model: a decoder, or an encoder-decoder."""
    from nalora.models.loading import ModelSpec, load_processor
    from nalora.runs.encoding import Encoder
    from nalora.runs.inputs import kind_of
    from nalora.runs.targets import near_names

    spec = ModelSpec(model)
    with near_names(model):
        return Encoder(load_processor(spec), kind_of(task, spec), style)


def _left_out_table(reasons: Iterable[LeftOut]) -> Any:
    rows = table("left out, because", "rows", "such as")
    for reason in reasons:
        named = ", ".join(reason.first) + (", …" if reason.rows > len(reason.first) else "")
        rows.add_row(reason.reason, f"{reason.rows:,}", literal(named))
    return rows


def _marked(name: str, parts: list[Part], *, brackets: bool) -> Text:
    """Return the parts with those that are trained on in bold; in brackets where there are no colours."""
    example = literal(name)
    for part in parts:
        text = f"⟦{part.text}⟧" if brackets and part.trained else part.text
        example.append_text(literal(text, "bold green" if part.trained else "dim"))
    return example
