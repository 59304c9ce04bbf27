"""Time and memory of a training step of LoRA: PEFT, Liger, Unsloth, Axolotl and nalora in one process.

python benchmarks/training_step.py [--rank 8] [--batch 4] [--length 1024] [--checkpointing] [--four-bit] [--peers DIR]

One model, one optimizer and one batch serve all variants; each replaces what it needs for its own steps and restores
it (patches.py). Before anything is timed, the loss and the adapter gradients of every variant are compared with PEFT's
on two layers of the same shapes; a variant beyond its tolerance (agreement.py) is reported and not timed. So is a
missing peer: prepare_peers.py fills the folder of --peers. `--check` only compares. On a CPU, with TRITON_INTERPRET=1:

python benchmarks/training_step.py --check --shape tiny --device cpu --batch 2 --length 32

A second call measures what has no row for the same commit, setting and device; PEFT is measured in every call, as the
baseline of its ratios.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path
from typing import Any

import agreement
import harness
import matrix_products
import peers
import prepare_peers
import torch
import variants
from llamas import SHAPES, build
from peers_page import QUESTION
from training import Training
from variants import BASELINE, Described

import nalora

# Loss and gradients are compared at the setting's shapes with this number of layers: 32 layers of random weights
# amplify rounding, so that two bf16 variants differ by 0.10 there (0.02 here), and no mistake could be recognised.
CHECKED_LAYERS = 2


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a setting; profile_step.py has the same."""
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="default: as the shape has")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--four-bit", action="store_true", help="a base in bitsandbytes' NF4")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peers", type=Path, default=prepare_peers.FOLDER, help="folder of prepare_peers.py")
    parser.add_argument("--rows", type=Path, default=harness.ROWS)


def setting(args: argparse.Namespace) -> str:
    base = "NF4 base" if args.four_bit else "bf16 base" if args.device == "cuda" else "float32 base"
    checkpointing = ", gradient checkpointing" if args.checkpointing else ""
    layers = args.layers or SHAPES[args.shape].layers
    shape = f"{args.shape} shapes, {layers} layers, {args.batch}x{args.length}, r={args.rank}"
    return f"{shape}, {base}{checkpointing}"


class Comparison:
    """The trainings and variants of one setting, with the missing ones and their reasons."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, args.device
        self.kernels, self.missing = peers.load(args.peers, interpreted=args.device == "cpu")
        if self.device == "cpu":
            self.missing["cuda_graphs"] = "a CPU has no CUDA graphs"
        for name, reason in self.missing.items():
            print(f"missing: {name} ({reason})", flush=True)
        self.plain = self.new_training()
        self.fp8: Training | None = None
        self.variants = variants.of_plain_base(self.plain, self.kernels)
        # GiB that each training keeps between steps; subtracted from the peaks of the other.
        self.kept = {False: 0.0, True: 0.0}

    def new_training(self) -> Training:
        args = self.args
        shape = SHAPES[args.shape]._replace(**({"layers": args.layers} if args.layers else {}))
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        model = build(
            shape, checkpointing=args.checkpointing, rank=args.rank, four_bit=args.four_bit, device=args.device,
            dtype=dtype, length=args.length,
        )  # fmt: skip
        return Training(model, args.batch, args.length)

    def add_fp8(self) -> None:
        """Convert a second model of the same weights to FP8 and add its variants."""
        self.fp8 = self.new_training()
        print(nalora.fuse(self.fp8.model, base="fp8"), flush=True)
        self.variants |= variants.of_fp8_base(self.fp8)

    def training(self, variant: Described) -> Training:
        return self.fp8 if variant.fp8 and self.fp8 is not None else self.plain

    def reason_missing(self, variant: Described) -> str | None:
        return next((f"missing: {self.missing[need]}" for need in variant.needs if need in self.missing), None)

    def tolerance(self, variant: Described) -> agreement.Tolerance:
        precision = "four-bit" if self.args.four_bit else "bf16" if self.device == "cuda" else "float32"
        return agreement.TOLERANCES["fp8" if variant.fp8 else precision]

    def compare(self, names: list[str], reference: agreement.Gradients) -> dict[str, dict[str, Any]]:
        """Return the columns of agreement of each variant; with a note if it is missing, fails or disagrees."""
        columns: dict[str, dict[str, Any]] = {}
        for name in names:
            variant, start = self.variants[name], time.monotonic()
            if note := self.reason_missing(variant):
                columns[name] = {"note": note}
            else:
                try:
                    # The first pass of a shape is not replayed yet, and the second one is the first replay.
                    passes = 3 if variant.graphed else 1
                    _, result = agreement.check(self.training(variant), variant.enter, reference, passes)
                    exceeded = result.beyond(self.tolerance(variant), variant.same_gradients)
                    columns[name] = rounded(result) | ({"note": f"not timed: {exceeded}"} if exceeded else {})
                except Exception as error:
                    columns[name] = {"note": harness.failure(error)}
            print(f"{name:44s} {describe(columns[name])}  [{time.monotonic() - start:.0f} s]", flush=True)
        return columns

    def settle(self, fp8: bool) -> None:
        """Take one step, so that the optimizer's state exists, and note what the training keeps."""
        training = self.fp8 if fp8 else self.plain
        assert training is not None
        training.step()
        training.losses.clear()
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        self.kept[fp8] = training.kept_bytes() / 2**30

    def measure(self, names: list[str], rounds: int, steps: int, limit: harness.TimeLimit) -> dict[str, dict[str, Any]]:
        """Time some variants in turn; peaks are without what the other training keeps."""
        entered = {name: self.variants[name].enter for name in names}
        results = harness.interleave(entered, rounds, steps, self.args.warmup, limit)
        for name, result in results.items():
            if "peak_gib" in result and self.device == "cuda":
                result["peak_gib"] = round(result["peak_gib"] - self.kept[not self.variants[name].fp8], 3)
        return results


def rounded(result: agreement.Agreement) -> dict[str, Any]:
    numbers = {name: float(f"{value:.4g}") for name, value in result._asdict().items() if name != "worst_layer"}
    # Close to 1, where four digits say nothing.
    return numbers | {"worst_cosine": round(result.worst_cosine, 6), "worst_layer": result.worst_layer}


def describe(columns: dict[str, Any]) -> str:
    if "gradient_error" not in columns:
        return columns["note"]
    return (f"loss differs by {columns['loss_difference']:.1e}, gradients by {columns['gradient_error']:.1e}, "
            f"worst cosine {columns['worst_cosine']:.5f}  {columns.get('note', '')}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="the variants to measure (default: all)")
    parser.add_argument("--no-compiled", action="store_true", help="leave out variants that compile layers")
    parser.add_argument("--no-fp8", action="store_true", help="leave out variants with an FP8 base")
    parser.add_argument("--check", action="store_true", help="compare losses and gradients, time nothing")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="begin no further round after this time")
    parser.add_argument("--again", action="store_true", help="measure variants that have a row, too")
    args = parser.parse_args()
    # Inductor writes what follows `--only` into the code that it generates, where an apostrophe is a syntax error.
    del sys.argv[1:]
    run(args)


def prepared(args: argparse.Namespace) -> Comparison:
    """Return the comparison of a setting; variants of an FP8 base that cannot be made are missing."""
    comparison = Comparison(args)
    if not args.no_fp8 and not args.four_bit and (not args.only or any("FP8" in name for name in args.only)):
        try:
            comparison.add_fp8()
        except Exception as error:
            comparison.fp8 = None
            comparison.missing["fp8"] = harness.failure(error)
            print(f"missing: FP8 base ({comparison.missing['fp8']})", flush=True)
            names = variants.of_fp8_base(comparison.plain)
            comparison.variants |= {name: variant._replace(needs=("fp8",)) for name, variant in names.items()}
    return comparison


def run(args: argparse.Namespace) -> None:
    limit = harness.TimeLimit(args.time_limit)
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{harness.commit()}"
    existing = set() if args.again or args.check else harness.measured(QUESTION, setting(args), args.rows)
    shallow = argparse.Namespace(**{**vars(args), "layers": CHECKED_LAYERS})
    comparison = prepared(args if args.check else shallow)

    def wanted(name: str, variant: Described) -> bool:
        chosen = not args.only or name in args.only
        return chosen and name not in existing and not (variant.compiled and args.no_compiled)

    names = [name for name, variant in comparison.variants.items() if name != BASELINE and wanted(name, variant)]
    if not names:
        print(f"All variants have a row for commit {harness.commit()}: {setting(args)}. --again measures them again.")
        return
    print(f"\n{setting(args)}", flush=True)
    reference, itself = agreement.check(comparison.plain, comparison.plain.plain, None)
    columns = {BASELINE: rounded(itself)} | comparison.compare(names, reference)
    if args.check:
        return
    del reference, comparison
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    comparison = prepared(args)
    comparison.settle(False)
    if comparison.fp8 is not None:
        comparison.settle(True)

    def append(results: dict[str, dict[str, Any]]) -> None:
        keys = {"question": QUESTION, "setting": setting(args), "unit": "ms", "run": run_id}
        rows = [keys | {"variant": name, "samples": 0} | columns[name] | result for name, result in results.items()]
        harness.append(rows, args.rows)
        print_table(results)

    untimed = [name for name in names if "note" in columns[name]]
    eager = [name for name in names if name not in untimed and not comparison.variants[name].compiled]
    append(comparison.measure([BASELINE, *eager], args.rounds, args.steps, limit) | {name: {} for name in untimed})
    for name in names:
        if comparison.variants[name].compiled and name not in untimed and not limit.reached():
            # In one go, since leaving the context discards the compiled code.
            append(comparison.measure([name], 1, args.rounds * args.steps, limit))
    floor = not args.only or matrix_products.NAME in args.only
    if not args.checkpointing and floor and args.device == "cuda" and not limit.reached():
        shape = SHAPES[args.shape]._replace(**({"layers": args.layers} if args.layers else {}))
        del comparison
        gc.collect()
        torch.cuda.empty_cache()
        products = matrix_products.matrix_products(shape, args.batch * args.length, args.length)
        columns[matrix_products.NAME] = {}
        result = harness.interleave({matrix_products.NAME: lambda: matrix_products.floor(products)}, 1, 20, 3)
        append({matrix_products.NAME: result[matrix_products.NAME] | {"peak_gib": ""}})


def print_table(results: dict[str, dict[str, Any]]) -> None:
    base = results.get(BASELINE, {}).get("p50")
    for name, result in results.items():
        if "p50" in result:
            ratio = f"{result['p50'] / base:.4f}" if base else ""
            print(f"{name:44s} {result['p50']:9.2f} ms  [{result['p20']:.2f} … {result['p80']:.2f}]  {ratio:7s} "
                  f"{result['peak_gib'] or 0:7.2f} GiB", flush=True)  # fmt: skip
        elif "note" in result:
            print(f"{name:44s} {result['note']}", flush=True)


if __name__ == "__main__":
    main()
