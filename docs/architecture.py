"""The packages of nalora in the order in which they may import each other, and the drawing of docs/architecture.md.

python docs/architecture.py        # draws docs/figures/architecture.svg from the imports themselves

`tests/test_architecture.py` holds the package to this order; the table of the README repeats it.
"""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "nalora"
DRAWING = Path(__file__).with_name("figures") / "architecture.svg"
# From the bottom to the top: each may import those above it in this list, and none below.
PACKAGES = {
    "errors": "the one exception type",
    "equations": "the paper's equations, one pure function each",
    "activations": "φ, φ′, κ, χ and characteristic points of seven activations, and of yours",
    "config": "the settings of NA-LoRA: the paper's table",
    "files": "how files are read and written: whole or not at all, never somebody else's",
    "distributed": "ranks, shards, gathering, and the wrappers around a model",
    "models": "loading a model by name, hub id, folder or GGUF file; the names of its layers",
    "kernels": "how it is computed: statistics of gates, fused layers, CUDA graphs",
    "control": "NA-LoRA at work: find blocks, plan, observe, decide, apply, save",
    "integrations": "`transformers.Trainer` and what is built on it",
    "methods": "what can be trained, one file each",
    "tasks": "what can be learnt and asked, one file each; the sandbox for generated code",
    "runs": "a run's settings, folder, lock and inputs, and the recipes",
    "training": "one run, from a YAML file to an adapter",
    "evaluation": "asking a model a task's questions, with intervals",
    "diagnostics": "what the gates did, from snapshots of a run",
    "report": "runs as an HTML page, figures and tables",
    "studies": "many runs, one answer",
    "cli": "the commands",
}


def modules() -> dict[str, Path]:
    """Every module by its dotted name; programs of the sandbox stand by themselves and are left out."""
    files = [file for file in SOURCE.rglob("*.py") if "sandboxed" not in file.parts]
    return {".".join(["nalora", *_parts(file)]): file for file in files}


def _parts(file: Path) -> tuple[str, ...]:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(file: Path, known: set[str]) -> set[str]:
    """The modules of nalora that a file imports anywhere: at its top, in functions, for type checkers alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] == "nalora"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "nalora":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in known else str(node.module))
    return found


def arrows() -> dict[tuple[str, str], list[str]]:
    """Which package imports which, with the modules that do."""
    known = modules()
    found: dict[tuple[str, str], list[str]] = {}
    for name, file in known.items():
        for imported in imports(file, set(known)):
            ends = (_package(name), _package(imported))
            if ends[0] != ends[1] and all(end in PACKAGES for end in ends):
                found.setdefault(ends, []).append(f"{name} → {imported}")
    return found


def _package(module: str) -> str:
    """The entry at the top of nalora that a module is in; its root, which has the version alone, is none."""
    return module.split(".")[1] if "." in module else ""


def shortest(found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The arrows that no chain of others implies."""
    below = {name: {end for start, end in found if start == name} for name in PACKAGES}
    reach: dict[str, set[str]] = {}
    for name in PACKAGES:  # from the bottom: what is below is known
        reach[name] = below[name].union(*(reach[end] for end in below[name]))
    return {(start, end) for start, end in found if not any(end in reach[other] for other in below[start] - {end})}


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
    rows = [[name for name in PACKAGES if level[name] == each] for each in range(max(level.values()) + 1)]
    place = {name: ((i + 1) / (len(row) + 1), each) for each, row in enumerate(rows) for i, name in enumerate(row)}
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
