"""A run's states compared: the numbers against the definitions, the cost that was promised, whatever is there."""

from __future__ import annotations

import json
import shutil

import peft
import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file, save_file

import nalora
from nalora import activations
from nalora.diagnostics import dynamics
from nalora.diagnostics.dynamics import CHANNELS_FILE, diagnose
from nalora.diagnostics.inputs import DiagnosisOptions
from nalora.diagnostics.lockstep import Lockstep
from nalora.diagnostics.measures import MEASURES
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.training.run import train

PROBE = DiagnosisOptions(probe_size=12, batch_size=8)


def settings(folder, **others):
    return {
        "model": tiny.saved_llama(folder / "base"), "task": "gym/chain_sum",
        "settings": {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 4},
        "train_size": 24, "test_size": 4, "output": str(folder / "run"), "steps": 6, "batch_size": 4,
        "learning_rate": 3e-2, "log_every": 2, "device": "cpu", "max_length": 128, "snapshot_every": 2,
        "method": "na-lora", "rank": 4, **others,
    }  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One run for the tests that only look."""
    folder = tmp_path_factory.mktemp("trained")
    train(check(settings(folder)))
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it for the tests that break something."""
    shutil.copytree(trained / "run", tmp_path / "run")
    return tmp_path / "run"


def by_hand(base, one, other):
    """D_sel, flips and so on of every block, from plain forward passes and the definitions, in float64."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    from nalora import tasks

    options = settings_of_task()
    examples = tasks.get("gym/chain_sum", **options).train_examples()[:12]
    silu = activations.get("silu")
    lower, upper = silu.characteristic_points
    z = []
    for folder in (one, other):
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
        model = peft.PeftModel.from_pretrained(model, folder).double().eval()
        seen = [[], []]
        for index in range(2):
            layer = model.base_model.model.model.layers[index].mlp.gate_proj
            layer.register_forward_hook(lambda m, a, out, kept=seen[index]: kept.append(out[0]))
        for example in examples:
            ids = tokenizer(example.prompt).input_ids + tokenizer(example.target).input_ids + [tokenizer.eos_token_id]
            with torch.no_grad():
                model(input_ids=torch.tensor([ids]))
        z.append([torch.cat(each) for each in seen])
    rows = []
    for before, after in zip(*z, strict=True):
        r, s = ((v > upper).int() - (v < lower).int() for v in (before, after))
        drift = silu.kappa(after) - silu.kappa(before)
        rows.append({
            "D_sel": (torch.sigmoid(after) - torch.sigmoid(before)).abs().mean(),
            "flip": (r != s).double().mean(), "kappa_drift": drift.abs().mean(),
            "suppressive": ((r < 0) != (s < 0)).double().mean(), "positive": ((r > 0) != (s > 0)).double().mean(),
            "severe": (r * s < 0).double().mean(), "chi": drift.square().mean(0), "p_sup": (s < 0).double().mean(),
            "tokens": len(before),
        })  # fmt: skip
    return rows


def settings_of_task():
    return {"settings": {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 4}, "train_size": 24,
            "test_size": 4}  # fmt: skip


def test_the_numbers_are_the_definitions(trained):
    found = diagnose(trained / "run", PROBE)
    folder = RunFolder(trained / "run")
    assert json.loads(folder.diagnosis.read_text()) == found
    assert found["steps"] == [0, 2, 4, 6]
    assert [block["name"] for block in found["blocks"]] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert found["blocks"][0] | {"lower": 0, "upper": 0} == {
        "name": "model.layers.0.mlp", "activation": "silu", "width": 64, "lower": 0, "upper": 0,
    }  # fmt: skip
    rows = [(interval, interval["from"], interval["to"]) for interval in found["intervals"]]
    rows.append((found["first_to_last"], 0, 6))
    for interval, start, end in rows:
        expected = by_hand(trained / "base", folder.snapshot(start), folder.snapshot(end))
        masks = load_file(folder.snapshot(end) / "nalora_state.safetensors")
        for block, row in enumerate(expected):
            for measure in ("D_sel", "kappa_drift"):
                assert interval[measure][block] == pytest.approx(float(row[measure]), rel=1e-4, abs=1e-9), measure
            for measure in ("flip", "suppressive", "positive", "severe"):
                # In float32 a z may fall on the other side of a threshold.
                assert interval[measure][block] == pytest.approx(float(row[measure]), abs=3 / (row["tokens"] * 64))
            mask = masks[f"base_model.model.model.layers.{block}.mlp/mask"].double()
            assert interval["D_EH"][block] == pytest.approx(float((mask * row["chi"]).sum()), rel=1e-4)
            assert found["probe"]["tokens"] == row["tokens"]
            shares = next(each for each in found["shares"] if each["step"] == end)
            assert shares["p_sup"][block] == pytest.approx(float(row["p_sup"]), abs=3 / (row["tokens"] * 64))
    assert found["cumulative"]["D_sel"][0] == pytest.approx(sum(row["D_sel"][0] for row in found["intervals"]))
    assert found["histogram"]["steps"] == [0, 6]
    assert all(sum(counts) == found["probe"]["tokens"] * 64 for step in found["histogram"]["counts"] for counts in step)


def test_identities_hold_in_the_file(trained):
    found = diagnose(trained / "run", PROBE)
    for row in (*found["intervals"], found["first_to_last"]):
        for flip, low, high, both in zip(*(row[n] for n in MEASURES[1:2] + MEASURES[3:6]), strict=True):
            assert flip == pytest.approx(low + high - both, abs=1e-15)
    for name in ("D_sel", "kappa_drift", "flip", "suppressive", "positive"):
        for way, ends in zip(found["cumulative"][name], found["first_to_last"][name], strict=True):
            assert way >= ends
    assert found["cumulative"]["D_sel"][0] > 0
    for row in found["shares"]:
        assert all(sum(each) == pytest.approx(1) for each in zip(row["p_sup"], row["p_res"], row["p_pos"], strict=True))


def test_nothing_moves_between_equal_snapshots(run):
    folder = RunFolder(run)
    shutil.rmtree(folder.snapshot(4))
    shutil.copytree(folder.snapshot(2), folder.snapshot(4))
    found = diagnose(run, PROBE)
    assert all(set(found["intervals"][1][name]) == {0.0} for name in MEASURES)
    assert found["intervals"][0]["D_sel"][0] > 0


def test_batches_and_padding_change_nothing(trained):
    results = []
    for size in (2, 6, 24):
        found = diagnose(trained / "run", DiagnosisOptions(probe_size=12, batch_size=size))
        results.append([found["first_to_last"], *found["intervals"]])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            for name in MEASURES:
                assert one[name] == pytest.approx(two[name], rel=1e-5, abs=1e-6), name


def test_two_forward_passes_a_state(trained, monkeypatch):
    begun = []

    class Counted(Lockstep):
        def run(self, batch, visit):
            begun.extend([len(batch["input_ids"])] * len(self.models))
            super().run(batch, visit)

    monkeypatch.setattr(dynamics, "Lockstep", Counted)
    heard = []
    found = diagnose(trained / "run", PROBE, report=lambda *each: heard.append(each))
    assert found["cost"]["forward_passes_per_checkpoint"] == 2.0
    assert sum(begun) == 2 * 4 * 12
    # Half of what inference would take at a time.
    assert max(begun) == 4
    assert heard[-1] == ("comparing states", 12, 12)
    two = diagnose(trained / "run", DiagnosisOptions(every=6, probe_size=4))
    assert two["steps"] == [0, 6]
    assert two["cost"]["forward_passes_per_checkpoint"] == 1.0
    assert two["first_to_last"] == two["intervals"][0]
    assert two["histogram"]["steps"] == [0, 6]


def test_every_thins_and_channels_are_written(trained):
    found = diagnose(trained / "run", DiagnosisOptions(every=4, probe_size=6, per_channel=True))
    assert found["steps"] == [0, 4, 6]
    assert found["channels"] == CHANNELS_FILE
    channels = load_file(trained / "run" / CHANNELS_FILE)
    name = "model.layers.1.mlp"
    assert channels[f"{name}/D_sel"].shape == (2, 64)
    assert channels[f"{name}/D_sel"].mean(1).tolist() == pytest.approx(
        [row["D_sel"][1] for row in found["intervals"]], rel=1e-5
    )
    assert channels[f"{name}/first_to_last/flip"].mean() == pytest.approx(found["first_to_last"]["flip"][1], rel=1e-5)
    weighted = channels[f"{name}/mask"] * channels[f"{name}/D_EH"]
    assert weighted.sum(1).tolist() == pytest.approx([row["D_EH"][1] for row in found["intervals"]], rel=1e-5)
    assert channels[f"{name}/shares"].sum(1).allclose(torch.ones(3, 64))


@pytest.mark.parametrize("method", ["pissa", "dora", "adalora"])
def test_any_method(tmp_path, method):
    train(check(settings(tmp_path, method=method, steps=4, snapshot_every=4, learning_rate=1e-3)))
    found = diagnose(tmp_path / "run", PROBE)
    assert found["steps"] == [0, 4]
    assert found["first_to_last"]["D_sel"][1] > 0
    assert not found["first_to_last"]["masked"]


def test_full_fine_tuning_with_two_models_resident(tmp_path, monkeypatch):
    train(check(settings(tmp_path, method="full", steps=4, learning_rate=1e-3)))
    import gc

    from nalora.models import loading

    most = 0
    load = loading.load

    def counted(*args, **kwargs):
        nonlocal most
        loaded = load(*args, **kwargs)
        gc.collect()
        most = max(most, sum(isinstance(each, transformers.LlamaForCausalLM) for each in gc.get_objects()))
        return loaded

    gc.collect()
    already = sum(isinstance(each, transformers.LlamaForCausalLM) for each in gc.get_objects())
    monkeypatch.setattr(loading, "load", counted)
    found = diagnose(tmp_path / "run", PROBE)
    assert most - already <= 2
    assert found["steps"] == [0, 2, 4]
    assert found["first_to_last"]["D_sel"][0] > 0
    for name in ("D_sel", "flip"):
        assert found["cumulative"][name][0] >= found["first_to_last"][name][0]
    for each in RunFolder(tmp_path / "run").snapshots.iterdir():
        shutil.rmtree(each)
    again = diagnose(tmp_path / "run", PROBE)
    assert again["steps"] == [0, 4]
    assert again["first_to_last"]["D_sel"] == pytest.approx(found["first_to_last"]["D_sel"], rel=1e-5)


def test_an_encoder_decoder_without_regimes(tmp_path):
    train(check({
        "model": tiny.saved_t5(tmp_path / "t5", feed_forward_proj="relu"), "task": "sst2", "method": "lora",
        "data_dir": tiny.saved_sst2(tmp_path), "device": "cpu", "output": str(tmp_path / "run"),
        "steps": 4, "batch_size": 4, "learning_rate": 3e-2, "snapshot_every": 2,
    }))  # fmt: skip
    found = diagnose(tmp_path / "run", PROBE)
    assert len(found["blocks"]) == 2
    assert {block["lower"] for block in found["blocks"]} == {None}
    row = found["first_to_last"]
    assert row["flip"] == row["suppressive"] == row["severe"] == [None, None]
    assert found["cumulative"]["flip"] == [None, None]
    assert min(row["D_sel"]) > 0
    assert found["shares"][0]["p_sup"] == [None, None]
    json.dumps(found, allow_nan=False)


def test_a_run_without_snapshots_is_reported(trained, run):
    shutil.rmtree(run / "snapshots")
    found = diagnose(run, PROBE)
    assert found["steps"] == [0, 6]
    assert any("no snapshots" in each and "the base model, step 6" in each for each in found["notices"])
    with_snapshots = diagnose(trained / "run", PROBE)
    assert found["first_to_last"]["D_sel"] == pytest.approx(with_snapshots["first_to_last"]["D_sel"], rel=1e-5)


@pytest.mark.parametrize(("method", "steps"), [("na-lora", [0, 2, 4]), ("pissa", [0, 4])])
def test_checkpoints_replace_snapshots(tmp_path, method, steps):
    """Where they hold what the method would save: PiSSA's adapters are of a base of its own."""
    train(check(settings(tmp_path, method=method, steps=4, snapshot_every=0, save_every=2, learning_rate=1e-3)))
    found = diagnose(tmp_path / "run", PROBE)
    assert found["steps"] == steps
    assert any("its checkpoints are left out" in each for each in found["notices"]) == (method == "pissa")
    assert found["first_to_last"]["masked"] == (method == "na-lora")
    assert found["first_to_last"]["D_sel"][1] > 0


def test_checkpoints_of_other_ranks_than_the_saved_adapter_are_compared_with_it(tmp_path):
    """GoRA trains with a rank for each layer and saves one for all; step 3 has no checkpoint."""
    more = dict(method="gora", gradient_batches=1, min_rank=2, max_rank=9, learning_rate=1e-3)
    train(check(settings(tmp_path, steps=3, snapshot_every=1, save_every=2, **more)))
    whole = diagnose(tmp_path / "run", PROBE)
    shutil.rmtree(tmp_path / "run" / "snapshots")
    config = json.loads((tmp_path / "run" / "checkpoints" / "checkpoint-2" / "adapter_config.json").read_text())
    assert len(set(config["rank_pattern"].values())) > 1
    found = diagnose(tmp_path / "run", PROBE)
    assert found["steps"] == [0, 2, 3]
    assert found["intervals"][-1]["D_sel"] == pytest.approx(whole["intervals"][-1]["D_sel"], rel=1e-4)


def test_a_mask_that_was_followed_and_never_applied_weighs_nothing(tmp_path):
    """With mask and scales off NA-LoRA is LoRA: the same way, and the same movement of homogeneity."""
    found = {}
    for name, others in (("lora", {"method": "lora"}), ("off", {"mask": False, "scaling": False})):
        folder = tmp_path / name
        train(check(settings(folder, steps=2, snapshot_every=1, learning_rate=1e-2, **others)))
        found[name] = diagnose(folder / "run", PROBE)["cumulative"]["D_EH"]
    assert found["off"] == pytest.approx(found["lora"], rel=1e-5)


def test_a_run_that_is_still_going(run):
    (run / "result.json").unlink()
    assert any("not finished" in each for each in diagnose(run, PROBE)["notices"])
    shutil.rmtree(run / "snapshots")
    with pytest.raises(nalora.NALoRAError, match="snapshot_every"):
        diagnose(run, PROBE)


def test_damaged_snapshots_are_left_out_and_named(run):
    folder = RunFolder(run)
    weights = folder.snapshot(2) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (folder.snapshot(4) / "adapter_model.safetensors").unlink()
    found = diagnose(run, PROBE)
    assert found["steps"] == [0, 6]
    assert any("step 2 is left out" in each and "damaged" in each for each in found["notices"])
    assert any("step 4 is left out" in each for each in found["notices"])


def test_a_snapshot_of_another_model_is_refused(run, tmp_path):
    file = RunFolder(run).snapshot(4) / "adapter_model.safetensors"
    save_file({name: tensor[:, :-1].contiguous() for name, tensor in load_file(file).items()}, file)
    with pytest.raises(nalora.NALoRAError, match="an adapter of another model"):
        diagnose(run, PROBE)
    with pytest.raises(nalora.NALoRAError, match="no run"):
        diagnose(tmp_path / "nothing", PROBE)


def test_a_state_that_diverged_gives_null_not_a_crash(run):
    file = RunFolder(run).snapshot(6) / "adapter_model.safetensors"
    save_file({name: tensor * torch.inf for name, tensor in load_file(file).items()}, file)
    found = diagnose(run, PROBE)
    assert found["intervals"][-1]["D_sel"] == [None, None]
    assert found["cumulative"]["D_sel"] == [None, None]
    json.dumps(found, allow_nan=False)
