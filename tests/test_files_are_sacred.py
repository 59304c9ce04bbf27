"""No command overwrites or removes what it did not make: what each may write and remove, and random trees of files.

`MAY` states for each command, by patterns below the folder that it works in, which files it may create or change and
which it may remove. In the folder of a run these are nalora's own names; the user's files next to them stay.
"""

from __future__ import annotations

import contextlib
import fnmatch
import io
import os
import re
import shutil
import stat
import string
import sys
import tempfile
from pathlib import Path

import pytest
import tiny
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report import run_folders

import nalora
from nalora import cli
from nalora.control import checkpoint
from nalora.runs import marker
from nalora.runs.contents import LOCK
from nalora.runs.marker import MARKER

EVERYTHING_OF_A_RUN = (
    MARKER, LOCK, "run.yaml", "environment.json", "metrics.jsonl", "gates.jsonl", "result.json", "diagnosis.json",
    "adapter", "adapter/*", "snapshots", "snapshots/step-*", "snapshots/.step-*", "start", "start/*",
    "checkpoints", "checkpoints/checkpoint-[0-9]*",
)  # fmt: skip
# command: (creates or changes, removes)
MAY: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "train": (EVERYTHING_OF_A_RUN, ()),
    "train --resume": (EVERYTHING_OF_A_RUN, ("checkpoints/checkpoint-[0-9]*", "snapshots/step-*", "snapshots/.step-*")),
    "evaluate": (("evaluations", "evaluations/*"), ()),
    "evaluate --output": (("out", "out/*"), ()),
    "chat": (("talk.jsonl",), ()),
    "generate": (("answers.jsonl",), ()),
    "diagnose": (("diagnosis.json", "diagnosis_channels.safetensors"), ()),
    "diagnose --output": (("out", "out/diagnosis.json"), ()),
    "diagnose --against": (("mismatch.json", "mismatch_channels.safetensors"), ()),
    "report": (("report.html",), ()),
    "report --output": (("page.html",), ()),
    "report --figures": (("out", "out/*.png", "out/*.svg"), ()),
    "report --tables": (("out", "out/tables.md", "out/tables.tex"), ()),
    "export --to peft": (("out", "out/*"), ()),
    "export --to merged": (("out", "out/*"), ()),
    "activations --draw": (("out", "out/silu.png", "out/silu.svg"), ()),
    "study --dry-run": ((), ()),
    "suggest": (("out", "out/*"), ()),
    "suggest --dry-run": ((), ()),
    "train --dry-run": ((), ()),
    "inspect": ((), ()),
    "launch": ((), ()),
    "methods": ((), ()), "tasks": ((), ()), "models": ((), ()),
}  # fmt: skip
# The user's own, in the middle of a run's folder.
MINE = (
    "notes.txt", "model.safetensors", "weights.safetensors", "adapter.zip", "checkpoints/best/optimizer.pt",
    "checkpoints/checkpoint-1/optimizer.pt", "checkpoints/checkpoint-latest/complete", "snapshots/mine/a.bin",
    "snapshots/.step-of-mine/a.bin", "evaluations/table.csv", "mine/run.yaml",
)  # fmt: skip
STUDY = "compared"


def tree(folder: Path) -> dict[str, tuple]:
    """Everything below a folder, byte for byte; links are not followed."""
    found: dict[str, tuple] = {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            content: object = os.readlink(path)
        else:
            content = path.read_bytes() if stat.S_ISREG(mode) else None
        found[str(path.relative_to(folder))] = (stat.S_IFMT(mode), stat.S_IMODE(mode), content)
    return found


def command(*arguments: object) -> str:
    """Run a command in this process; its refusal, or nothing."""
    try:
        cli.app([str(each) for each in arguments], standalone_mode=False)
    except (nalora.NALoRAError, cli.usage_errors.UsageError) as error:
        return str(error)
    return ""


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    with pytest.MonkeyPatch.context() as patch:
        for commands in (
            cli.chatting,
            cli.diagnosing,
            cli.exporting,
            cli.generating,
            cli.inspecting,
            cli.reporting,
            cli.runs,
            cli.studying,
            cli.suggesting,
        ):
            patch.setattr(commands, "hush_libraries", lambda: None)
        patch.setenv("NALORA_CACHE", tempfile.mkdtemp())
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.saved_llama(tmp_path_factory.mktemp("base"), layers=1)


def run_file(folder: Path, base: str, **more) -> Path:
    file = folder / "run.yaml"
    content = {
        "model": base, "task": "gym/chain_sum", "train_size": 21, "test_size": 4, "max_new_tokens": 2, "steps": 4,
        "batch_size": 4, "device": "cpu", "method": "na-lora", "on": "pissa", "snapshot_every": 2, "save_every": 2,
    }  # fmt: skip
    file.write_text(yaml.safe_dump(content | more))
    return file


@pytest.fixture(scope="module")
def trained(tmp_path_factory, base):
    """A finished run, with the file that describes it next to it."""
    folder = tmp_path_factory.mktemp("trained")
    command("train", run_file(folder, base), f"output={folder / 'run'}")
    assert (folder / "run" / "result.json").is_file()
    return folder


@pytest.fixture
def place(trained, tmp_path, monkeypatch):
    """A copy of it, with the user's files in it, in which a command is started."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    for name in MINE:
        file = tmp_path / "run" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("mine")
    (tmp_path / "run" / "link").symlink_to(tmp_path / "elsewhere")
    study = {"name": STUDY, "settings": {"model": base, "task": "gym/chain_sum"}, "learning_rates": [1e-3],
             "seeds": [0], "arms": {"lora": {"method": "lora"}, "na": {"method": "na-lora"}}}  # fmt: skip
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study | {"settings": {"model": "m", "task": "gsm8k"}}))
    (tmp_path / "prompts.txt").write_text("1 + 1 =")
    monkeypatch.setattr("sys.stdin", io.StringIO("1 + 1 =\n/save talk.jsonl\n"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def arguments(name: str, base: str) -> list[str]:
    run = "run"
    return {
        "train": ["train", "run.yaml", "output=new"],
        "train --resume": ["train", "run.yaml", "output=run", "--resume"],
        "train --dry-run": ["train", "run.yaml", "output=new", "--dry-run"],
        "evaluate": ["evaluate", run, "--limit", "1"],
        "evaluate --output": ["evaluate", run, "--limit", "1", "--output", "out", "--no-base"],
        "chat": ["chat", run, "--max-tokens", "2"],
        "generate": ["generate", run, "prompts.txt", "--output", "answers.jsonl", "--max-tokens", "2"],
        "diagnose": ["diagnose", run, "--probe-size", "2", "--per-channel"],
        "diagnose --output": [
            "diagnose",
            "run/adapter",
            "--task",
            "gym/chain_sum",
            "--probe-size",
            "2",
            "--output",
            "out",
        ],
        "diagnose --against": ["diagnose", run, "--against", base, "--probe-size", "2", "--per-channel"],
        "report": ["report", run],
        "report --output": ["report", run, "--output", "page.html"],
        "report --figures": ["report", run, "--figures", "out"],
        "report --tables": ["report", run, "--tables", "out"],
        "export --to peft": ["export", run, "--to", "peft", "--output", "out"],
        "export --to merged": ["export", run, "--to", "merged", "--output", "out"],
        "activations --draw": ["activations", "silu", "--draw", "out"],
        "study --dry-run": ["study", "study.yaml", "--store", "out", "--dry-run"],
        "suggest": ["suggest", "run.yaml", "--steps", "2", "--rates", "1e-3,1e-2", "--output", "out"],
        "suggest --dry-run": ["suggest", "run.yaml", "--steps", "2", "--output", "out", "--dry-run"],
        "inspect": ["inspect", base],
        "launch": ["launch", "--", sys.executable, "-c", ""],
    }.get(name, [name])


@pytest.mark.parametrize("name", MAY)
def test_what_a_command_may_write_and_remove(place, base, name):
    if name == "train --resume":  # as a kill in the middle of the last checkpoint leaves it
        (place / "run" / "result.json").unlink()
        (place / "run" / "checkpoints" / "checkpoint-4" / "complete").unlink()
    before = tree(place)
    assert command(*arguments(name, base)) == ""
    root = {"train": "new", "evaluate --output": "", "report --output": "", "study --dry-run": "", "chat": "",
            "generate": ""}.get(name, "run")  # fmt: skip
    root = "" if "out" in arguments(name, base) else root
    check_changes(place, before, name, root)
    again = tree(place)
    if name.startswith("export"):  # others may use an exported folder, so it is not replaced
        assert "a folder with files" in command(*arguments(name, base))
        assert tree(place) == again
    elif name not in ("train", "train --resume"):  # what nalora wrote it may write once more
        assert command(*arguments(name, base)) == ""
        check_changes(place, again, name, root)


def check_changes(place: Path, before: dict[str, tuple], name: str, root: str) -> None:
    after = tree(place)
    writes, removes = ([f"{root}/{each}".lstrip("/") for each in patterns] for patterns in MAY[name])
    if root == "new":
        writes.append(root)
    changed = [path for path, now in after.items() if before.get(path) != now]
    gone = [path for path in before if path not in after]
    assert [path for path in changed if not allowed(path, writes)] == []
    assert [path for path in gone if not allowed(path, removes)] == []
    assert [path for path in (*changed, *gone) if path.removeprefix("run/") in MINE] == []


def allowed(path: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


# Names of nalora's and of others', contents that look like something, and links that lead out.
ANY_NAME = st.text(string.ascii_letters + "äß ._-", min_size=1, max_size=12).filter(lambda name: name.strip(". "))
NAMES = ANY_NAME | st.sampled_from([
    *EVERYTHING_OF_A_RUN[2:8], *MINE, "adapter/adapter_model.safetensors", "adapter/README.md", "model/config.json",
    "checkpoints/checkpoint-2/complete", "checkpoints/checkpoint-2/optimizer.pt", "snapshots/step-00000000/a",
    "start.safetensors", "start/start.safetensors", "gora.safetensors", "outputs.jsonl", "scores.jsonl",
    "losses.jsonl", "losses.json", "summary.json", "judgements.jsonl", "report.html", "tables.md", "tables.tex",
    "loss.png", "loss.svg", "silu.png", "silu.svg", f"{STUDY}.md", f"{STUDY}.json", f"{STUDY}.html",
    f"{STUDY}.failures.jsonl", "0123456789abcdef/run.yaml", "0123456789abcdef.again/old/file", "lora/run.yaml",
    "nalora_state.safetensors", MARKER, LOCK, f".{MARKER}.1", "checkpoints", "evaluations", "snapshots", "adapter",
    "mismatch.json", "config.json",
])  # fmt: skip
# An empty file has nothing to lose: a report may be written over it.
CONTENTS = st.binary(min_size=1, max_size=40) | st.sampled_from([
    b"{}", b"[]", b'{"id": 3}', b"mine\n", b"# compared by hand\n", b"<html><title>my page</title></html>",
    b"model: m\ntask: gsm8k\nmethod: lora\n", b'{"nalora": 1, "format": 1, "kind": "run"}', b"\x89PNG\r\n\x1a\n",
])  # fmt: skip
ENTRIES = st.tuples(NAMES, CONTENTS | st.sampled_from(["file", "folder", "nothing"]))
TREES = st.lists(ENTRIES, min_size=1, max_size=6)


def plant(place: Path, outside: Path, entries) -> None:
    """Write a tree of somebody's files; text contents are links to a file, a folder or nothing outside."""
    outside.mkdir(parents=True, exist_ok=True)
    (outside / "file").write_text("mine")
    (outside / "folder").mkdir(exist_ok=True)
    for name in ("run.yaml", "checkpoint-2", "outputs.jsonl"):
        (outside / "folder" / name).write_text("mine")
    place.mkdir(parents=True, exist_ok=True)
    for name, content in entries:
        path = place / name
        if os.path.lexists(path) or any(os.path.lexists(p) and not p.is_dir() for p in path.parents):
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                path.symlink_to(outside / content)
            else:
                path.write_bytes(content)
        except OSError:  # a name that this file system does not know, or a folder out there
            continue


@pytest.fixture(scope="module")
def known(tmp_path_factory, base):
    """What commands are given next to the foreign folder, and under which name they evaluate."""
    folder = tmp_path_factory.mktemp("known")
    run_folders.write_run(folder, name="recorded", gates=False, diagnosis=False)
    run_file(folder, base)
    study = {"name": STUDY, "settings": {"model": "m", "task": "gsm8k"}, "learning_rates": [1e-3], "seeds": [0],
             "arms": {"lora": {"method": "lora"}, "na": {"method": "na-lora"}}}  # fmt: skip
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    (folder / "prompts.txt").write_text("1 + 1 =")
    evaluate = ["evaluate", base, "--task", "gym/chain_sum", "--limit", "1", "--option", "max_new_tokens=1",
                "--output", folder / "e" / "p"]  # fmt: skip
    assert command(*evaluate) == ""
    (named,) = (path.parent.relative_to(folder / "e") for path in (folder / "e").rglob("outputs.jsonl"))
    return folder, named, evaluate[:-1]


ANY = settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def commands_on(place: Path, folder: Path, base: str, nowhere: Path) -> list[list[object]]:
    """Every command, pointed at a foreign folder; whatever would load a model is refused before, or finds none."""
    train = ["train", folder / "run.yaml", f"output={place}"]
    recorded = folder / "recorded"
    return [
        [*train, f"model={nowhere}"], [*train, f"model={nowhere}", "--resume"], [*train, f"model={place}"],
        [*train, f"model={nowhere}", "--resume", "--take-over"],
        ["chat", place], ["generate", place, "--prompt", "a"],
        ["generate", nowhere, folder / "prompts.txt", "--output", place],
        ["diagnose", place], ["diagnose", place, "--against", nowhere], ["evaluate", place],
        ["report", place, "--output", place / "report.html"], ["report", place], ["inspect", place],
        ["report", recorded, "--output", place / "report.html"], ["report", recorded, "--output", place],
        ["report", recorded, "--tables", place], ["report", place, "--tables", place],
        ["study", folder / "study.yaml", "--store", place, "--so-far"],
        ["study", folder / "study.yaml", "--store", place, "--dry-run"],
        ["suggest", folder / "run.yaml", "--steps", "2", f"model={nowhere}", "--output", place],
        ["report", folder / "study.yaml", "--store", place], ["export", base, "--to", "peft", "--output", place],
    ]  # fmt: skip


@ANY
@given(entries=TREES)
def test_random_trees_survive_every_command(known, base, entries):
    folder = known[0]
    with tempfile.TemporaryDirectory() as where:
        place, outside = Path(where) / "place", Path(where) / "outside"
        plant(place, outside, entries)
        before = tree(Path(where))
        for each in commands_on(place, folder, base, outside / "no model"):
            command(*each)
            assert_untouched(before, Path(where), each)
        from nalora.cli import demo

        for do in (
            lambda: demo.run(_console(), folder=place, settings=[f"model={outside / 'no model'}"]),
            lambda: checkpoint.save({"version": 1, "config": {}, "tensors": {"a": torch.zeros(1)}}, place),
        ):
            with contextlib.suppress(nalora.NALoRAError, OSError):
                do()
            assert_untouched(before, Path(where), do)


@settings(ANY, max_examples=5)
@given(entries=TREES)
def test_random_trees_survive_an_evaluation_and_figures(known, base, entries):
    folder, named, evaluate = known
    with tempfile.TemporaryDirectory() as where:
        for place in (Path(where) / named, Path(where) / "p"):
            plant(place, Path(where) / "outside", entries)
        before = tree(Path(where))
        for each in (
            [*evaluate, Path(where) / "p"],
            ["report", folder / "recorded", "--figures", Path(where) / "p"],
            ["activations", "silu", "--draw", Path(where) / "p"],
        ):
            command(*each)
            assert_untouched(before, Path(where), each)


@settings(ANY, max_examples=8)
@given(entries=TREES)
def test_random_trees_in_a_run_s_folder_survive_its_resumption(known, base, trained, entries):
    """Files of other names than nalora's stay where they are, whatever comes of the run."""
    with tempfile.TemporaryDirectory() as where:
        place = Path(where) / "run"
        shutil.copytree(trained / "run", place)
        shutil.rmtree(place / "adapter")
        (place / "result.json").unlink()
        foreign = [entry for entry in entries if not _is_a_run_s(entry[0])]
        ours = {path for path in tree(place) if not path.startswith("checkpoints/checkpoint-4")}
        plant(place, Path(where) / "outside", foreign)
        before = {path: found for path, found in tree(Path(where)).items() if path.removeprefix("run/") not in ours}
        before = {path: found for path, found in before.items() if not path.startswith("run/checkpoints/checkpoint-4")}
        command("train", trained / "run.yaml", f"output={place}", "--resume")
        assert_untouched(before, Path(where), foreign)


def _is_a_run_s(name: str) -> bool:
    first = name.partition("/")[0]
    known = first in EVERYTHING_OF_A_RUN and first not in ("checkpoints", "snapshots")
    return known or re.match(r"\.?(snapshots/\.?step-\d|nalora)|.*\.(jsonl|json\.\d+)$", name) is not None


def assert_untouched(before: dict[str, tuple], where: Path, what: object) -> None:
    after = tree(where)
    assert {path: after.get(path) for path in before} == before, what


def _console():
    from rich.console import Console

    return Console(quiet=True)


@pytest.mark.parametrize("link", [False, True], ids=["file", "link"])
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["report", "recorded"], "recorded/report.html"),
        (["report", "recorded", "--output", "out/page.html"], "out/page.html"),
        (["report", "recorded", "--tables", "out"], "out/tables.tex"),
        (["report", "recorded", "--figures", "out"], "out/loss.svg"),
        (["activations", "silu", "relu", "--draw", "out"], "out/relu.png"),
    ],
)
def test_a_file_of_another_program_is_not_written_over(known, tmp_path, monkeypatch, arguments, name, link):
    """And nothing else is written either: all files are checked first."""
    shutil.copytree(known[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "mine").write_text("mine")
    if link:
        (tmp_path / name).symlink_to(tmp_path / "mine")
    else:
        (tmp_path / name).write_text("mine")
    before = tree(tmp_path)
    told = command(*arguments)
    assert ("symbolic link" if link else "a file that is not ") in told
    assert tree(tmp_path) == before


@pytest.mark.parametrize("how", ["file", "link", "link to nothing", "the model's", "here"])
def test_an_output_that_is_no_folder_of_its_own_is_refused_before_the_model_is_loaded(place, base, how, monkeypatch):
    monkeypatch.setattr("nalora.models.loading.load", lambda *_: pytest.fail("loaded"))
    model = place / "model"
    shutil.copytree(base, model)
    (place / "file").write_text("mine")
    (place / "empty").mkdir()
    (place / "link").symlink_to(place / "empty")
    (place / "link to nothing").symlink_to(place / "nothing")
    before = tree(place)
    output = {"the model's": "model", "here": "."}.get(how, how)
    told = command("train", "run.yaml", f"output={output}", f"model={model}")
    found = {"file": "found a file;", "link": "found a symbolic link;", "link to nothing": "found a symbolic link;"}
    assert found.get(how, "with files that nalora did not write") in told
    assert tree(place) == before


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl", "evaluations", "checkpoints/checkpoint-9"])
def test_a_run_that_leads_out_of_its_folder_is_refused(place, base, name):
    (place / "run" / "result.json").unlink()
    path = place / "run" / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(place / "elsewhere")
    before = tree(place)
    assert "symbolic link" in command("train", "run.yaml", "output=run", "--resume")
    assert tree(place) == before


@pytest.mark.parametrize(("name", "arguments"), [
    ("evaluations", ["evaluate", "run"]), ("diagnosis.json", ["diagnose", "run"]),
    ("mismatch.json", ["diagnose", "run", "--against", "base"]),
])  # fmt: skip
def test_results_that_lead_out_of_a_run_s_folder_are_refused(place, base, name, arguments):
    shutil.rmtree(place / "run" / name, ignore_errors=True)
    (place / "run" / name).symlink_to(place / "elsewhere")
    before = tree(place)
    assert "symbolic link" in command(*(base if each == "base" else each for each in arguments))
    assert tree(place) == before


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_of_0_1_is_recognised_marked_and_resumed(place, trained, finished):
    run = place / "run"
    (run / MARKER).unlink()
    (run / "start" / "start.safetensors").rename(run / "start.safetensors")  # where 0.1 kept it
    (run / "start").rmdir()
    for each in run.glob("checkpoints/checkpoint-[24]"):
        (each / ".nalora-checkpoint.json").unlink()
        (each / "complete").write_bytes(b"")
    start = (run / "start.safetensors").read_bytes()
    if not finished:
        (run / "result.json").unlink()
        (run / "checkpoints" / "checkpoint-4" / "complete").unlink()
    assert command("train", "run.yaml", "output=run", "--resume") == ""
    assert marker.is_marked(run, "run")
    for file in ("adapter/adapter_model.safetensors", "result.json"):
        assert (run / file).is_file()
    assert (run / "start.safetensors").read_bytes() == start
    weights = "adapter/adapter_model.safetensors"
    assert (run / weights).read_bytes() == (trained / "run" / weights).read_bytes()
