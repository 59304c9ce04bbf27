"""The packages of nalora in the order in which they may import each other, and the drawing of docs/architecture.md.

python docs/architecture.py        # draws docs/figures/architecture.svg from the imports themselves

`tests/test_architecture.py` holds the package to this order; the table of the README repeats it.
"""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "nalora"
DRAWING = Path(__file__).with_name("figures") / "architecture.svg"
# From the bottom to the top: a package may import those above it in this list and none below.
PACKAGES = {
    "errors": "the one exception type",
    "equations": "the paper's equations, one pure function each",
    "activations": "φ, φ′, κ, χ and characteristic points of seven activations, and of yours",
    "config": "the settings of NA-LoRA: the paper's table",
    "files": "atomic writes, and the rule that files of others are never overwritten",
    "distributed": "processes, shards, gathering, and wrappers such as DDP",
    "models": "loading models by name, hub id, folder or GGUF file; names of layers",
    "kernels": "statistics of the gates, fused layers, CUDA graphs",
    "control": "NA-LoRA: find FFN blocks, collect statistics, compute mask and scales, apply them, save the state",
    "integrations": "`transformers.Trainer` and its subclasses",
    "methods": "LoRA and its variants, full fine-tuning and controls, one file each",
    "tasks": "data sets with their scoring, one file each; the sandbox for generated code",
    "runs": "a run's settings, folder, lock and inputs, and the recipes",
    "evaluation": "evaluation on a task's test set, with confidence intervals",
    "diagnostics": "how gates changed during training, from snapshots of a run",
    "training": "training one run, from a YAML file to an adapter",
    "report": "HTML reports, figures, tables and model cards; exports for other programs",
    "studies": "many runs and one answer: methods × learning rates × seeds, with significance tests",
    "cli": "the commands",
}


def modules() -> dict[str, Path]:
    """Every module by its dotted name; the programs of the sandbox, which import nothing from nalora, are left out."""
    files = [file for file in SOURCE.rglob("*.py") if "sandboxed" not in file.parts]
    return {".".join(["nalora", *_parts(file)]): file for file in files}


def _parts(file: Path) -> tuple[str, ...]:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(file: Path, known: set[str]) -> set[str]:
    """The modules of nalora that a file imports anywhere: at its top, in functions, for type checkers alone."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names if alias.name.partition(".")[0] == "nalora"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "nalora":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                imported.add(name if name in known else str(node.module))
    return imported


def arrows() -> dict[tuple[str, str], list[str]]:
    """Which package imports which, with the modules that do."""
    known = modules()
    by_ends: dict[tuple[str, str], list[str]] = {}
    for name, file in known.items():
        for imported in imports(file, set(known)):
            ends = (_package(name), _package(imported))
            if ends[0] != ends[1] and all(end in PACKAGES for end in ends):
                by_ends.setdefault(ends, []).append(f"{name} → {imported}")
    return by_ends


def _package(module: str) -> str:
    """Return the package or module at the top of nalora that contains a module; empty for nalora itself."""
    return module.split(".")[1] if "." in module else ""


def shortest(links: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The arrows that no chain of others implies."""
    below = {name: {end for start, end in links if start == name} for name in PACKAGES}
    reach: dict[str, set[str]] = {}
    for name in PACKAGES:  # from the bottom: what is below is known
        reach[name] = below[name].union(*(reach[end] for end in below[name]))
    return {(start, end) for start, end in links if not any(end in reach[other] for other in below[start] - {end})}


def draw() -> None:
    """Packages by level, arrows from a package to what it imports."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "nalora"
    from matplotlib import pyplot

    links = shortest(set(arrows()))
    level: dict[str, int] = {}
    for name in PACKAGES:
        level[name] = max((level[end] + 1 for start, end in links if start == name), default=0)
    rows = [[name for name in PACKAGES if level[name] == height] for height in range(max(level.values()) + 1)]
    place = {name: ((i + 1) / (len(row) + 1), height) for height, row in enumerate(rows) for i, name in enumerate(row)}
    figure, axes = pyplot.subplots(figsize=(8, 0.75 * len(rows)))
    for start, end in sorted(links):
        arrow = {"arrowstyle": "->", "color": "0.55", "shrinkA": 11, "shrinkB": 11}
        axes.annotate("", place[end], place[start], arrowprops=arrow)
    box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "0.3"}
    for name, (x, y) in place.items():
        axes.text(x, y, name, ha="center", va="center", bbox=box, fontsize=10)
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.axis("off")
    figure.savefig(DRAWING, metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    draw()
