"""Mutation testing: find changes of the code that no test detects.

python benchmarks/mutants.py                      # all mutants of the core, and a sample of the other modules
python benchmarks/mutants.py equations control/decision   # all mutants of these modules
python benchmarks/mutants.py --sample 50 control/observer --seed 1

Each mutant runs in its own process, forked from one that has imported PyTorch and Transformers; nalora is imported from
a copy with the changed module. It runs the tests that execute the changed line, fastest first, until one fails. Which
tests execute which line is measured at the start, once for each state of the code and of a test file.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from mutant_sources import Mutant, mutants

ROOT = Path(__file__).resolve().parents[1]
CORE = ("equations", "control/decision", "control/apply", "evaluation/significance")
SAMPLED = ("control/observer", "control/window", "methods/*", "diagnostics/measures", "tasks/answers")
CORE_TESTS = (
    "tests/test_equations.py", "tests/control/test_decision.py", "tests/control/test_apply.py",
    "tests/control/test_controller.py", "tests/evaluation/test_significance.py",
)  # fmt: skip
OTHER_TESTS = (
    "tests/control/test_observer.py", "tests/diagnostics/test_measures.py", "tests/tasks/test_answers.py",
    "tests/methods",
)  # fmt: skip
OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not gpu", "--hypothesis-seed=0", "--no-header")
# A surviving mutant runs all tests of its line, up to this many seconds; one that hangs counts as detected.
SECONDS_OF_TESTS = 20.0
FEWEST_TESTS = 5


class _Timed:
    """A pytest plugin that records the time of each test and switches the context of the coverage."""

    def __init__(self, coverage: Any) -> None:
        self.coverage, self.seconds = coverage, collections.defaultdict[str, float](float)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call":  # without fixtures, whose cost is part of the first test that uses them
            self.seconds[report.nodeid] = report.duration


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="paths below src/nalora, without .py (default: see above)")
    parser.add_argument("--sample", type=int, default=0, help="number of mutants, drawn from all of these modules")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the sample")
    parser.add_argument("--only", default="", help="names of mutants, separated by commas")
    parser.add_argument("--tests", nargs="+", help="the test files to run")
    parser.add_argument(
        "--output", default="build/mutants.jsonl", help="one row for each mutant; existing rows are reused"
    )
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    files = _files(options.modules or [*CORE, *SAMPLED])
    core_alone = all(file in _files(list(CORE)) for file in files)
    tests = options.tests or [*CORE_TESTS, *([] if core_alone else OTHER_TESTS)]
    covering = _covering(_files([*CORE, *SAMPLED]), [file for test in tests for file in _test_files(test)])
    chosen: list[tuple[Mutant, str]] = []
    if options.modules:
        chosen = _drawn([mutant for file in files for mutant in mutants(ROOT, file)], options.sample, options.seed)
    else:
        chosen = [mutant for file in _files(list(CORE)) for mutant in mutants(ROOT, file)]
        others = [mutant for file in _files(list(SAMPLED)) for mutant in mutants(ROOT, file)]
        chosen += _drawn(others, options.sample or 300, options.seed)
    if options.only:
        chosen = [pair for pair in chosen if pair[0].name in options.only.split(",")]
    output = ROOT / options.output
    output.parent.mkdir(parents=True, exist_ok=True)
    known = _known(output)
    for done, (mutant, text) in enumerate(chosen, start=1):
        mark = hashlib.sha256(text.encode()).hexdigest()[:16]
        if mark in known and not (options.only or options.tests):
            continue
        began = time.monotonic()
        outcome = _outcome(mutant, text, covering)
        row = {**mutant._asdict(), "name": mutant.name, "outcome": outcome, "mark": mark}
        known[mark] = row
        with output.open("a", encoding="utf-8") as rows:
            rows.write(json.dumps(row, ensure_ascii=False) + "\n")
        note = f"{mutant.change}" if outcome == "survived" else ""
        print(f"{done}/{len(chosen)} {mutant.name} {outcome} {time.monotonic() - began:.1f}s {note}", flush=True)
    rows = [known[hashlib.sha256(text.encode()).hexdigest()[:16]] for _, text in chosen]
    return _report(rows)


def _files(modules: list[str]) -> list[str]:
    matches = [sorted((ROOT / "src" / "nalora").glob(f"{module}.py")) for module in modules]
    assert all(matches), f"no such module among {modules}"
    return [str(path.relative_to(ROOT)) for paths in matches for path in paths if path.name != "__init__.py"]


def _test_files(place: str) -> list[str]:
    path = ROOT / place
    return [str(file.relative_to(ROOT)) for file in sorted(path.rglob("test_*.py"))] if path.is_dir() else [place]


def _drawn(candidates: list[tuple[Mutant, str]], count: int, seed: int) -> list[tuple[Mutant, str]]:
    if not count or count >= len(candidates):
        return candidates
    places = sorted(random.Random(seed).sample(range(len(candidates)), count))
    return [candidates[place] for place in places]


def _known(output: Path) -> dict[str, dict[str, Any]]:
    lines = output.read_text(encoding="utf-8").splitlines() if output.is_file() else []
    return {row["mark"]: row for row in map(json.loads, lines)}


class _Covering:
    """Records which tests execute which line, the time of each test, and the modules they import."""

    def __init__(self) -> None:
        self.lines: dict[str, dict[str, set[str]]] = {}
        self.seconds: dict[str, float] = {}
        self.imports: list[str] = []

    def add(self, lines: dict[str, dict[str, list[str]]], seconds: dict[str, float], imports: list[str]) -> None:
        """Add the measurements of one test file."""
        self.seconds |= seconds
        self.imports += [name for name in imports if name not in self.imports]
        for file, by_line in lines.items():
            for line, tests in by_line.items():
                self.lines.setdefault(file, {}).setdefault(line, set()).update(filter(None, tests))

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests of the mutant's lines, fastest first, and those of the whole module if there are few."""
        by_line = self.lines.get(mutant.file, {})
        own = {test for line in range(mutant.first, mutant.last + 1) for test in by_line.get(str(line), ())}
        chosen = self._fastest(own)
        if len(own) < FEWEST_TESTS:  # lines may be executed only once, when the module is imported or a cache is filled
            package = Path(mutant.file).parent.name
            of_package = {test for test in self.seconds if f"/test_{package}.py::" in test}
            chosen += self._fastest(({test for tests in by_line.values() for test in tests} | of_package) - own)
        return chosen

    def _fastest(self, tests: set[str]) -> list[str]:
        chosen, total = list[str](), 0.0
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            total += self.seconds[test]
            if total > SECONDS_OF_TESTS and chosen:
                break
            chosen.append(test)
        return chosen


def _covering(files: list[str], tests: list[str]) -> _Covering:
    """Measure in child processes, since this one must not import the modules to change; reuse stored measurements."""
    code = b"".join(path.read_bytes() for path in sorted((ROOT / "src").rglob("*.py")))
    covering = _Covering()
    (ROOT / "build").mkdir(exist_ok=True)
    for test in tests:
        state = hashlib.sha256(code + (ROOT / test).read_bytes() + " ".join(files).encode()).hexdigest()[:16]
        stored = ROOT / "build" / f"covering-{state}.json"
        if not stored.is_file():
            print(f"measuring which lines {test} executes", flush=True)
            if os.waitstatus_to_exitcode(os.waitpid(_measure(files, test, stored), 0)[1]) != 0:
                raise SystemExit(f"{test} fails without any mutant")
        covering.add(*json.loads(stored.read_text()))
        _import_all(covering.imports)
    return covering


def _measure(files: list[str], test: str, stored: Path) -> int:
    if child := os.fork():
        return child
    import coverage
    import pytest

    measured = coverage.Coverage(data_file=None, include=[str(ROOT / file) for file in files])
    measured.start()
    timed = _Timed(measured)
    code = pytest.main([*OPTIONS, test], plugins=[timed])
    measured.stop()
    data = measured.get_data()
    lines = {
        file: {str(line): tests for line, tests in data.contexts_by_lineno(str(ROOT / file)).items()} for file in files
    }
    imports = [name for name, module in sys.modules.items() if not _is_own(name, module)]
    if code in (0, 5):  # 5: all of its tests are slow
        stored.write_text(json.dumps([lines, dict(timed.seconds), imports]))
    os._exit(0 if code == 5 else int(code))


def _is_own(name: str, module: ModuleType) -> bool:
    """Return whether a module is of this repository: these must not be imported before a mutant replaces one."""
    places = tuple(str(ROOT / folder) + os.sep for folder in ("src", "tests", "benchmarks"))
    return name == "__main__" or (getattr(module, "__file__", None) or "").startswith(places)


def _import_all(names: list[str]) -> None:
    """Import modules once for all mutants; those that cannot be imported by name are imported by each mutant."""
    devnull, stderr = os.open(os.devnull, os.O_WRONLY), os.dup(2)
    os.dup2(devnull, 2)
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException:  # names in sys.modules need not be importable
            continue
    os.dup2(stderr, 2)
    os.close(devnull)
    os.close(stderr)
    if any(name.partition(".")[0] == "nalora" for name in sys.modules):
        raise SystemExit("a module that the tests import also imports nalora, so no mutant would be detected")
    import torch

    torch.set_num_threads(1)


def _outcome(mutant: Mutant, text: str, covering: _Covering) -> str:
    tests = covering.tests_of(mutant)
    if not tests:
        return "no tests"
    limit = 30 + 5 * sum(covering.seconds[test] for test in tests)
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        try:
            _run_tests(mutant, text, tests, int(limit))
        finally:
            os._exit(70)
    latest = time.monotonic() + 3 * limit  # other processes use the CPU as well
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return "survived" if code == 0 else "killed" if code in (1, 2, 3, 4, 70) else f"died ({code})"
        if time.monotonic() > latest:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "took too long"
        time.sleep(0.02)


def _run_tests(mutant: Mutant, text: str, tests: list[str], limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    os.dup2(os.open(os.environ.get("MUTANT_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    import pytest

    with tempfile.TemporaryDirectory() as place:  # a copy of the package, which subprocesses of tests import too
        shutil.copytree(ROOT / "src" / "nalora", Path(place) / "nalora")
        (Path(place) / mutant.file.removeprefix("src/")).write_text(text, encoding="utf-8")
        sys.path[sys.path.index(str(ROOT / "src"))] = place
        code = pytest.main([*OPTIONS, *tests])
    os._exit(int(code))


def _report(rows: list[dict[str, Any]]) -> int:
    """Print the score of each module; return 0 if every mutant was detected."""
    by_file: dict[str, collections.Counter[str]] = {}
    for row in rows:
        by_file.setdefault(row["file"], collections.Counter())[row["outcome"]] += 1
    survivors = 0
    for file, counts in by_file.items():
        total, alive = counts.total(), counts["survived"] + counts["no tests"]
        survivors += alive
        print(f"{file}: {total - alive} of {total} detected ({dict(counts)})")
    print(f"{len(rows) - survivors} of {len(rows)} detected, {100 * (len(rows) - survivors) / max(1, len(rows)):.1f} %")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
