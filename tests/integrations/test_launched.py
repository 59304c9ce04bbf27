"""Programs that do not know nalora train with it, and are otherwise left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_training
import torch
from safetensors.torch import load_file

import nalora
from nalora.control.checkpoint import FILE_NAME
from nalora.integrations import launched

HERE = Path(__file__).parent
SCRIPT = HERE / "tiny_training.py"
VARIABLES = {
    **{name: value for name, value in os.environ.items() if not name.startswith("NALORA_")},
    "PYTHONPATH": os.pathsep.join([str(Path(nalora.__file__).parents[1]), str(HERE.parent), str(HERE)]),
    "OMP_NUM_THREADS": "1",
}
ADAPTER = "adapter_model.safetensors"


def launch(*words: object, settings: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "nalora", "launch", *settings, "--", *map(str, words)]
    return subprocess.run(command, env=VARIABLES | variables, capture_output=True, text=True, timeout=600)


def start(tmp_path, *words: object, **variables: str) -> tuple[subprocess.CompletedProcess, dict[str, list[str]]]:
    """Run a command as the launcher does, and return what it reported."""
    report = tmp_path / "events"
    report.touch()
    environment = launched.environment({"apply_to": "update"}, report, VARIABLES | variables)
    done = subprocess.run([*map(str, words)], env=environment, capture_output=True, text=True, timeout=600)
    return done, launched.events(report)


def same(one: Path, other: Path) -> bool:
    first, second = load_file(one), load_file(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A launched training, with its output; and the same one with `attach_trainer` and as plain LoRA."""
    folder = tmp_path_factory.mktemp("trained")
    done = launch(
        sys.executable, SCRIPT, folder / "ours", "lora", settings=("keep_ratio=0.2",), NALORA_APPLY_TO="update"
    )
    assert done.returncode == 0, done.stderr
    for name in ("attached", "plain"):
        trainer = tiny_training.make_trainer(folder / name)
        if name == "attached":
            nalora.attach_trainer(trainer, apply_to="update", keep_ratio=0.2)
        trainer.train()
        trainer.save_model(folder / name)
    return folder, done


def test_a_launched_training_is_that_of_attach_trainer_bit_for_bit(trained):
    folder, done = trained
    assert same(folder / "ours" / ADAPTER, folder / "attached" / ADAPTER)
    assert not same(folder / "ours" / ADAPTER, folder / "plain" / ADAPTER)
    assert done.stdout.count("nalora: NA-LoRA is attached to Trainer") == 1
    assert "NA-LoRA plan: 2 FFN block(s), control of the update" in done.stdout
    assert "  settings other than the defaults: keep_ratio=0.2, apply_to=update\n" in done.stdout
    assert "nalora" not in done.stderr


def test_the_state_is_in_its_checkpoints(trained):
    folder, _ = trained
    for checkpoint in ("checkpoint-2", "checkpoint-4"):
        assert same(folder / "ours" / checkpoint / FILE_NAME, folder / "attached" / checkpoint / FILE_NAME)
        assert not (folder / "plain" / checkpoint / FILE_NAME).exists()


@pytest.mark.slow
def test_a_launched_training_is_resumed_bit_for_bit(trained, tmp_path):
    folder, _ = trained
    settings = ("keep_ratio=0.2", "apply_to=update")
    done = launch(sys.executable, SCRIPT, tmp_path, "lora", folder / "ours" / "checkpoint-2", settings=settings)
    assert done.returncode == 0, done.stderr
    assert same(tmp_path / ADAPTER, folder / "ours" / ADAPTER)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [("full", "Trainer trained LlamaForCausalLM without LoRA layers"), ("nothing", "ended before any Trainer trained")],
)
def test_a_program_that_trains_no_lora_is_reported(tmp_path, kind, message):
    done = launch(sys.executable, SCRIPT, tmp_path, kind)
    assert done.returncode == 3
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_refusal_ends_the_program(tmp_path):
    """A model without adapters in its FFN blocks, say: it must not be trained as plain LoRA."""
    done = launch(sys.executable, SCRIPT, tmp_path, "attention")
    assert done.returncode == 1
    assert "nalora: " in done.stderr.splitlines()[-1]
    assert "nothing was attached" not in done.stderr
    assert not (tmp_path / ADAPTER).exists()


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "ranks"), [("torchrun", 2), ("accelerate", 1)])
def test_ranks_attach_and_print_the_plan_once(tmp_path, launcher, ranks):
    words = {
        "torchrun": ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"],
        "accelerate": ["-m", "accelerate.commands.launch", "--cpu", f"--num_processes={ranks}", "--num_machines=1",
                       "--mixed_precision=no", "--dynamo_backend=no"],
    }[launcher]  # fmt: skip
    done, events = start(tmp_path, sys.executable, *words, SCRIPT, tmp_path / "ours", "lora")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("NA-LoRA is attached") == 1
    assert (tmp_path / "events").read_text().count(f'"{launched.ATTACHED}"') == ranks
    assert events[launched.ATTACHED] == ["Trainer"]
    assert (tmp_path / "ours" / "checkpoint-2" / FILE_NAME).is_file()


# ---- what the program sees -------------------------------------------------------------------------------------------

SHOW = "import json, os, sys; print(json.dumps([sys.path, sorted(os.environ), 'torch' in sys.modules]))"


def test_path_and_environment_are_the_program_s_own(tmp_path):
    plain = subprocess.run([sys.executable, "-c", SHOW], env=VARIABLES, capture_output=True, text=True, check=True)
    done, events = start(tmp_path, sys.executable, "-c", SHOW)
    path, names, heavy = json.loads(done.stdout)
    before, names_before, _ = json.loads(plain.stdout)
    assert path == before
    assert {*names} - {*names_before} == {launched.VARIABLE}
    assert not heavy
    assert not done.stderr
    assert [*events] == [launched.STARTED]


def test_a_child_process_is_reached_too(tmp_path):
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; print(sys.path)'])"
    done, _ = start(tmp_path, sys.executable, "-c", child)
    assert "startup" not in done.stdout
    assert len((tmp_path / "events").read_text().splitlines()) == 2


@pytest.mark.parametrize("own", ["", "\n1 / 0"], ids=["works", "fails"])
def test_the_environment_s_own_sitecustomize_runs_as_without_nalora(tmp_path, own):
    (tmp_path / "sitecustomize.py").write_text(f"import os\nos.environ['MINE'] = __file__{own}")
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), VARIABLES["PYTHONPATH"]])}
    code = "import os; print(os.environ['MINE'])" + ("" if own else "; import sitecustomize as s; print(s.__file__)")
    done, events = start(tmp_path, sys.executable, "-c", code, **variables)
    assert done.stdout.split() == [str(tmp_path / "sitecustomize.py")] * (1 if own else 2)
    assert ("ZeroDivisionError" in done.stderr) == bool(own), "reported by Python as without nalora"
    assert done.returncode == 0
    assert launched.STARTED in events


def test_an_environment_without_nalora_is_reported(tmp_path):
    done, events = start(tmp_path, sys.executable, "-S", "-c", "import site; site.execsitecustomize()", PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    (detail,) = events[launched.NOT_INSTALLED]
    assert "No module named 'nalora'" in detail


@pytest.fixture
def stand_in(tmp_path):
    """The PYTHONPATH of a package transformers with nothing but a Trainer, which is imported at once."""
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "trainer.py").write_text("class Trainer:\n    def train(self):\n        'Train.'\n")
    return os.pathsep.join([str(tmp_path), VARIABLES["PYTHONPATH"]])


def test_looking_for_the_trainer_does_not_change_or_lose_it(tmp_path, stand_in):
    """Programs ask for the specification of a module to know whether it is installed."""
    code = (
        "import importlib.util, inspect\nassert importlib.util.find_spec('transformers.trainer')\n"
        "from transformers.trainer import Trainer\n"
        "print(Trainer.train.__doc__, 'Train.' in inspect.getsource(Trainer.train))"
    )
    done, events = start(tmp_path, sys.executable, "-c", code, PYTHONPATH=stand_in)
    assert done.stdout == "Train. True\n", done.stderr
    assert launched.IMPORTED in events


def test_a_program_may_remove_the_variables_of_nalora(tmp_path, stand_in):
    code = (
        "import os\nfor name in [*os.environ]:\n    if name.startswith('NALORA_'):\n        del os.environ[name]\n"
        "from transformers.trainer import Trainer\n"
        "trainer = Trainer()\ntrainer.model = trainer.nalora_controller = 1\n"
        "trainer.is_world_process_zero = lambda: True\ntrainer.train()"
    )
    done, events = start(tmp_path, sys.executable, "-c", code, PYTHONPATH=stand_in)
    assert (done.returncode, done.stderr) == (0, "")
    assert events[launched.ATTACHED] == ["Trainer"]
