"""The command line: plans on stdout, mistakes as one line on stderr with exit code 2, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import peft
import pytest
import transformers
from installed import CONTROLLED_EXPERTS
from rich.console import Console

import nalora
from nalora.cli import demo, launching

SMALL = dict(hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)


@pytest.fixture
def llama(tmp_path):
    transformers.LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture
def gpt2(tmp_path):
    config = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=64, architectures=["GPT2LMHeadModel"])
    config.save_pretrained(tmp_path)
    return str(tmp_path)


def one_line(err: str) -> str:
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith(("nalora: ", "nalora inspect: "))
    return lines[0]


def test_version(run):
    assert run("--version") == (0, f"nalora {nalora.__version__}\n", "")


@pytest.mark.parametrize("arguments", [(), ("--help",), ("inspect", "--help"), ("demo", "-h")])
def test_help(run, arguments):
    code, out, err = run(*arguments)
    assert "Usage: nalora" in out
    assert err == ""
    assert code == (0 if arguments else 2)


def test_inspect_shows_one_row_for_alike_blocks(run, llama):
    code, out, err = run("inspect", llama)
    assert (code, err) == (0, "")
    (row,) = [line.split() for line in out.splitlines() if "model.layers" in line]
    assert row == ["model.layers.0–1.mlp", "gate", "gate_proj", "silu", "56", "-1.278", "…", "+1.278", "on", "on"]
    assert "up up_proj" in out
    assert "down down_proj" in out
    assert "left as plain LoRA: 8 adapters outside FFN blocks (q_proj, k_proj, v_proj, o_proj)" in out
    assert "statistics engine: " in out


def test_rank_shows_in_the_size(run, llama):
    sizes = [run("inspect", llama, "--rank", rank)[1].partition("LoRA: r = ")[2].split()[1] for rank in ("2", "4")]
    assert 2 * int(sizes[0].replace(",", "")) == int(sizes[1].replace(",", ""))


@pytest.mark.parametrize(
    "targets",
    [("--target-modules", "gate_proj,down_proj"), ("--target-modules", "gate_proj", "--target-modules", "down_proj")],
)
def test_target_modules_repeat_or_are_in_a_list(run, llama, targets):
    code, out, _ = run("inspect", llama, *targets)
    assert code == 0
    assert "up up_proj (no adapter)" in out
    assert "plain LoRA" not in out


def test_gelu_is_unscaled_in_the_paper_and_scaled_when_derived(run, gpt2):
    _, paper, _ = run("inspect", gpt2)
    assert "off [1]" in paper
    assert "[1] the paper calls gelu_tanh degenerate; regimes='derived' scales it" in paper
    _, derived, _ = run("inspect", gpt2, "--regimes", "derived")
    assert "off" not in derived
    assert "-0.752 … +0.840" in derived


def test_a_plan_reports_that_training_would_refuse_the_model(run, tmp_path, llama):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.BertConfig(**sizes).save_pretrained(tmp_path / "bert")
    code, out, _ = run("inspect", tmp_path / "bert")
    assert code == 0
    assert "`nalora train` refuses this model: found bert, an encoder without a decoder; expected a model that" in out
    assert "refuses this model" not in run("inspect", llama)[1]


def test_methods_prints_its_table_alone():
    """In a process of its own: libraries warn when they are first imported."""
    ended = subprocess.run([sys.executable, "-m", "nalora.cli", "methods"], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    assert ended.stdout.lstrip().startswith("method ")


def test_every_option_reaches_the_plan(run, llama):
    options = ["--no-mask", "--importance", "utility", "--apply-to", "update", "--thresholds", "-1", "2.5"]
    code, out, _ = run("inspect", llama, *options)
    assert code == 0
    assert "off [1]" in out
    assert "[1] switched off" in out
    assert "-1.000 … +2.500" in out
    assert "control of the update, channels ranked by utility" in out
    assert "[1] switched off" in run("inspect", llama, "--no-scaling")[1]


@CONTROLLED_EXPERTS
def test_experts_are_one_row_and_refused_adapters_are_named_with_the_reason(run, tmp_path):
    sizes = dict(moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=4)
    transformers.Qwen2MoeConfig(**SMALL, **sizes).save_pretrained(tmp_path / "base")
    parameters = ["experts.gate_up_proj", "mlp.gate.weight"]
    lora = peft.LoraConfig(target_modules=["gate_proj"], target_parameters=parameters)
    lora.base_model_name_or_path = str(tmp_path / "base")
    lora.save_pretrained(tmp_path / "adapter")
    code, out, err = run("inspect", str(tmp_path / "adapter"))
    assert (code, err) == (0, "")
    assert "model.layers.0–1.mlp.shared_expert" in out
    assert "model.layers.0–1.mlp.experts" in out
    assert "in each of 4 experts" in out
    assert "refused: model.layers.0.mlp.gate and 1 more: bare parameter Qwen2MoeTopKRouter.weight" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--target-modules", "q_proj,v_proj"], "none of them in an FFN"),
        (["--target-modules", "nothing"], "no layer called nothing"),
        (["--regimes", "mine"], "found --regimes "),
        (["--thresholds", "low", "high"], "found --thresholds "),
        (["--thresholds", "2", "1"], "finite low ≤ high"),
        (["--rank", "0"], "found --rank "),
        (["--colour", "green"], "--colour"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(run, llama, arguments, expected):
    code, out, err = run("inspect", llama, *arguments)
    assert (code, out) == (2, "")
    assert expected in one_line(err)


@pytest.mark.parametrize(("content", "expected"), [(None, "no such file"), ("{", "JSON"), ('{"a": 1}', "model_type")])
def test_a_wrong_model_is_one_line_and_exit_code_2(run, tmp_path, content, expected):
    file = tmp_path / "config.json"
    if content:
        file.write_text(content)
    code, out, err = run("inspect", str(file))
    assert (code, out) == (2, "")
    assert expected in one_line(err)


def test_a_missing_model_and_an_unknown_command(run):
    assert "MODEL" in one_line(run("inspect")[2])
    code, _, err = run("inspct")
    assert code == 2
    assert "inspct" in one_line(err)


def test_activations(run):
    code, out, _ = run("activations")
    assert code == 0
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert rows["silu"] == ["-1.278464543", "+1.278464543", "on"]
    assert rows["gelu"] == ["-0.751791525", "+0.839923676", "regimes=derived"]
    assert rows["relu"][:3] == ["–", "–", "off:"]
    assert set(rows) >= {known.name for known in nalora.activations.KNOWN}


@pytest.mark.parametrize(("finished", "code"), [(True, 0), (False, 130)])
def test_demo_passes_its_options_on(run, monkeypatch, tmp_path, finished, code):
    passed = {}

    def noted(console: Console, **options):
        passed.update(options)
        return finished

    monkeypatch.setattr(demo, "run", noted)
    assert run("demo", "--steps", "3", "--seed", "7", "--output", str(tmp_path))[0] == code
    assert passed == {"settings": ["steps=3", "seed=7"], "folder": tmp_path}


_WITH_PEAK_MEMORY = """
import atexit, resource
atexit.register(lambda: print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
from nalora.cli import main
main()
"""


def test_an_8b_model_needs_seconds_and_no_weights(tmp_path):
    config = dict(
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _WITH_PEAK_MEMORY, "inspect", str(tmp_path / "config.json")],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "model.layers.0–31.mlp" in done.stdout
    assert "20,971,520 trainable parameters" in done.stdout
    # 7 s and 0.6 GB on an idle machine, almost all of it importing; the weights would take 32 GB.
    assert time.monotonic() - before < 60
    assert int(done.stdout.split()[-1]) < 2 * 2**20  # KiB


def test_threads_sleep_while_they_wait_unless_the_user_chose_otherwise(run, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    show = "import os, sys; sys.exit('OMP_WAIT_POLICY' in os.environ)"
    assert run("launch", "--", sys.executable, "-S", "-c", show)[0] == launching.NOT_ATTACHED, "not the program's"
    run("tasks")
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    run("tasks")
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_the_command_line_is_imported_without_torch():
    """Which reads OMP_WAIT_POLICY when it is imported."""
    code = "import sys, nalora.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


_BEYOND_PEFT = """
import sys
import torch, peft
theirs = set(sys.modules)
from nalora import NALoRAConfig, attach
print(*(name for name in set(sys.modules) - theirs if name.partition(".")[0] not in sys.stdlib_module_names))
"""


def test_importing_nalora_needs_torch_and_peft_alone():
    done = subprocess.run([sys.executable, "-c", _BEYOND_PEFT], capture_output=True, text=True, check=True)
    assert {name.partition(".")[0] for name in done.stdout.split()} == {"nalora"}, done.stdout
