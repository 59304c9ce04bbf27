"""Mistakes in options and arguments are reported as all others: what was found, what was expected, and the fix."""

from __future__ import annotations

import pytest
import typer

from nalora import cli
from nalora.cli import usage_errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "train --resum x",
            "nalora train: found the unknown option --resum; expected one of --resume, --take-over, --dry-run,"
            " --measure, --trust, --help. Fix: did you mean --resume?",
        ),
        (
            "train x --output runs/y",
            "nalora train: found the unknown option --output; expected one of --resume, --take-over, --dry-run,"
            " --measure, --trust, --help. Fix: write output=runs/y, without dashes, as it is a setting",
        ),
        ("train x --task=mine.jsonl", "Fix: write task=mine.jsonl, without dashes"),
        ("train x --learning-rate 1e-3", "Fix: write learning_rate=1e-3, without dashes"),
        ("train --gradient-checkpointing x", "Fix: write gradient_checkpointing=true, without dashes"),
        ("train x --cuda-graphs=False", "Fix: write cuda_graphs=False, without dashes"),
        ("train x --packing no", "Fix: write packing=no, without dashes"),
        ("train x --model", "Fix: write model=VALUE, without dashes"),
        ("train x --rank --dry-run", "Fix: write rank=VALUE, without dashes"),
        ("suggest x --blocks 4", "Fix: write blocks=4, without dashes"),
        ("suggest x --test-share 0.2", "Fix: write test_share=0.2, without dashes"),
        ("data x.jsonl --measure f1", "Fix: write measure=f1, without dashes"),
        ("launch --apply-to update -- python x.py", "Fix: write apply_to=update, without dashes"),
        ("evaluate x --learning-rate 1", "Fix: see `nalora evaluate --help`"),
        (
            "chat x --colour green",
            "nalora chat: found the unknown option --colour; expected one of --model, --base, --system, --temperature,"
            " --top-p, --seed, --max-tokens, --style, --device, --trust, --help. Fix: see `nalora chat --help`",
        ),
        ("launch -z", "found the unknown option -z; expected one of --config, --help. Fix: see `nalora launch --help`"),
        ("--versio", "nalora: found the unknown option --versio; expected one of --version, --help. Fix: did you mean"),
        ("trian x", "nalora: found the unknown command trian; expected one of demo, data, suggest, train, "),
        ("trian x", "Fix: did you mean train?"),
        ("inspect", "nalora inspect: found no MODEL; expected a model folder, "),
        ("inspect", "or smollm2-135m. Fix: add MODEL after `nalora inspect`"),
        ("export x", "nalora export: found no --to; expected one of peft, merged, gguf, vllm. Fix: add --to VALUE"),
        (
            "chat x --temperature low",
            "found --temperature low; expected a number of at least 0. Fix: give such a value;",
        ),
        ("chat x --temperature=-1", "found --temperature -1; expected a number of at least 0. Fix: give such a value;"),
        ("chat x --top-p 3", "found --top-p 3; expected a number from 0.01 to 1. Fix: give such a value;"),
        ("inspect x --rank 1.5", "found --rank 1.5; expected a whole number of at least 1. Fix: give such a value;"),
        ("inspect x --regimes papr", "found --regimes papr; expected one of paper, derived. Fix: did you mean paper?"),
        ("inspect x --thresholds low high", "found --thresholds low high; expected 2 numbers. Fix: give such a value;"),
        ("inspect x --thresholds 1", "found too few values after --thresholds; expected 2 numbers. Fix: write"),
        (
            "chat x --max-tokens",
            "nalora chat: found no value after --max-tokens; expected a whole number of at least 1.",
        ),
        ("generate x y --columns", "found no value after --columns; expected a text. Fix: write --columns VALUE"),
        ("train x --dry-run=5", "found a value for --dry-run; expected the option alone. Fix: write --dry-run"),
        (
            "methods lora dora x",
            "nalora methods: found more arguments: dora x; expected only NAME. Fix: remove dora x, ",
        ),
        ("tasks x", "nalora tasks: found more arguments: x; expected no arguments. Fix: remove x, "),
    ],
)
def test_a_mistake_is_one_sentence_with_its_fix(run, arguments, message):
    code, out, err = run(*arguments.split())
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


def test_an_error_of_another_kind_keeps_its_message():
    error = typer.BadParameter("no such moon")
    message = usage_errors.message_of(error, cli.app)
    assert "found Invalid value: no such moon; expected options and arguments of the command." in message
