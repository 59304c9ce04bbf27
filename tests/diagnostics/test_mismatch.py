"""Selection mismatch of whole runs: the same numbers however they are batched, and one clear error for wrong input."""

from __future__ import annotations

import copy
import json
import math

import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file

import nalora
from nalora.control import checkpoint
from nalora.diagnostics.decomposition import TERMS
from nalora.diagnostics.inputs import DiagnosisOptions, load_run_and_target
from nalora.diagnostics.mismatch import compare, diagnose_against
from nalora.diagnostics.mismatch_measures import in_words, measures
from nalora.runs.folder import RunFolder
from nalora.runs.saved_run import finished_run
from nalora.runs.settings import check
from nalora.training.run import train

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A full fine-tuned run, a LoRA run and an NA-LoRA run of one base."""
    place = tmp_path_factory.mktemp("runs")
    settings = {
        "model": tiny.saved_llama(place / "base"), "task": "gym/chain_sum", "settings": SUMS, "train_size": 24,
        "test_size": 8, "steps": 4, "batch_size": 8, "learning_rate": 1e-2, "device": "cpu", "max_length": 128,
    }  # fmt: skip
    told = {
        "full": {"method": "full", "learning_rate": 1e-3},
        "lora": {"method": "lora"},
        "na-lora": {"method": "na-lora", "save_every": 2},
        "snapshots": {"method": "na-lora", "snapshot_every": 3},
        "scaling-only": {"method": "na-lora", "mask": False, "save_every": 4},
    }
    for name, more in told.items():
        train(check({**settings, **more, "output": str(place / name)}))
    return place


def load_pair(folder, target):
    finished = finished_run(folder)
    return load_run_and_target(finished.run, finished.trained, target, DiagnosisOptions())


def everything(value):
    """All numbers in a result, wherever they stand."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for each in value for number in everything(each)]
    return [value] if isinstance(value, int | float) else []


def assert_close(one, other, tolerance):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_close(one[key], other[key], tolerance)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_close(*pair, tolerance)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance * 1e-3)
    else:
        assert one == other


def test_a_lora_run_against_full_fine_tuning(runs):
    result = diagnose_against(runs / "lora", str(runs / "full"))
    assert json.loads((runs / "lora" / "mismatch.json").read_text()) == result
    assert [block["name"] for block in result["blocks"]] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert result["probe"]["examples"] == 24
    for block in range(2):
        energies = [result["energy"][term][block] for term in TERMS]
        assert min(energies) > 0
        whole = sum(energies) + 2 * sum(result["cross"][pair][block] for pair in result["cross"])
        assert result["energy"]["total"][block] == pytest.approx(whole, rel=1e-9)
        assert sum(result["share"][term][block] for term in TERMS) == pytest.approx(1)
        assert [result["share"][term][block] for term in TERMS] == pytest.approx([e / sum(energies) for e in energies])
        assert 0 < result["bound"]["tightness"][block] <= 1
        assert result["bound"]["actual"][block] ** 2 <= result["energy"]["total"][block]
        shares = [share for _, share in result["top_channels"][block]]
        assert len(shares) == 10
        assert shares == sorted(shares, reverse=True)
        assert shares[0] > 1 / 64
    assert result["mask"] is None
    assert "would be the mask" in in_words(result)
    for statistic in result["statistics"].values():
        assert all(-1 <= each <= 1 for each in statistic["rank_correlation"])
        held = zip(statistic["energy_held"], result["most_held"], strict=True)
        assert all(0 < part <= most for part, most in held)


def test_an_na_lora_run_is_evaluated_with_the_mask_it_ended_with(runs):
    result = diagnose_against(runs / "na-lora", str(runs / "full"))
    assert result["mask_step"] == 4
    assert result["mask"].keys() == result["statistics"]["utility"].keys()
    # The same from the state's own tensors, by their names in the trained model.
    pair = load_pair(runs / "na-lora", str(runs / "full"))
    sites, sums = compare(pair.run, pair.target, pair.probe.batches)
    state = checkpoint.load(runs / "na-lora" / "checkpoints" / "checkpoint-4")["tensors"]
    masks = [state[f"base_model.model.{site.name}/mask"] for site in sites]
    assert all(mask.min() < mask.max() for mask in masks)
    assert_close(result["mask"], measures(sums, masks)["mask"], 1e-9)
    assert None not in result["mask"]["rank_correlation"]
    assert in_words(result).startswith("The mask ")


def test_a_mask_that_is_the_energy_agrees_wholly_and_one_of_an_unfinished_checkpoint_is_not_read(runs, tmp_path):
    folder = RunFolder(runs / "na-lora")
    pair = runs / "na-lora", str(runs / "full")
    last = folder.checkpoints / "checkpoint-4"
    kept = (last / checkpoint.FILE_NAME).read_bytes()
    try:
        (last / checkpoint.FILE_NAME).write_bytes(b"broken")
        with pytest.raises(nalora.NALoRAError, match="damaged"):
            diagnose_against(*pair)
        (last / "complete").unlink()
        assert diagnose_against(*pair)["mask_step"] == 2
    finally:
        (last / checkpoint.FILE_NAME).write_bytes(kept)
        (last / "complete").touch()
    lora, target = tiny.llama(), tiny.llama(lora_b=0.1)
    _, sums = compare(lora, target, [{"input_ids": tiny.tokens()}])
    mask = measures(sums, [sums[0].channel_energy.sqrt().float(), None])["mask"]
    assert mask["rank_correlation"] == [pytest.approx(1), None]
    assert mask["top_overlap"] == [1, None]
    assert mask["energy_held"][0] == pytest.approx(measures(sums)["most_held"][0])


def test_the_mask_of_the_last_snapshot_serves_as_well(runs):
    result = diagnose_against(runs / "snapshots", str(runs / "full"))
    assert result["mask_step"] == 4
    assert_close(result["mask"], diagnose_against(runs / "na-lora", str(runs / "full"))["mask"], 1e-3)


def test_every_channel_on_request(runs):
    result = diagnose_against(runs / "na-lora", str(runs / "full"), DiagnosisOptions(per_channel=True))
    tensors = load_file(runs / "na-lora" / result["channels"])
    for block, energy in zip(result["blocks"], result["energy"]["selection_mismatch"], strict=True):
        name = block["name"]
        assert tensors[f"{name}/energy"].sum().item() == pytest.approx(energy, rel=1e-5)
        for field in ("derivative", "utility", "selection", "mask"):
            assert tensors[f"{name}/{field}"].shape == (block["width"],)


def test_a_run_whose_mask_did_not_act_has_none(runs):
    assert diagnose_against(runs / "scaling-only", str(runs / "full"))["mask"] is None


def test_batch_size_and_padding_change_nothing(runs):
    one = diagnose_against(runs / "lora", str(runs / "full"), DiagnosisOptions(batch_size=2))
    many = diagnose_against(runs / "lora", str(runs / "full"), DiagnosisOptions(batch_size=48))
    channels = [[c for c, _ in block] for block in one.pop("top_channels")]
    assert channels == [[c for c, _ in block] for block in many.pop("top_channels")]
    # The models compute in float32, and an energy is the square of a small difference.
    assert_close(one, many, 1e-6)


def test_batch_size_and_padding_change_nothing_in_float64():
    lora, target = tiny.llama(), tiny.llama(lora_b=0.1)
    ids = tiny.tokens(6, 10)
    whole = measures(compare(lora, target, [{"input_ids": ids}])[1])
    padded = torch.cat([ids, torch.zeros(6, 7, dtype=ids.dtype)], dim=1)
    mask = torch.cat([torch.ones_like(ids), torch.zeros(6, 7, dtype=ids.dtype)], dim=1)
    parts = [{"input_ids": padded[i : i + n], "attention_mask": mask[i : i + n]} for i, n in ((0, 1), (1, 2), (3, 3))]
    assert_close(whole, measures(compare(lora, target, parts)[1]), 1e-6)


def test_a_run_against_itself(runs):
    result = diagnose_against(runs / "lora", str(runs / "lora"))
    assert everything(result["energy"]) == [0] * 8
    assert everything(result["share"]) == everything(result["top_channels"]) == []
    assert everything(result["bound"]) == [0] * 4
    assert all(math.isfinite(number) for number in everything(result))
    assert "no mismatch" in in_words(result)


@pytest.mark.parametrize("target", ["na-lora/adapter", "na-lora", "base", "full/model"])
def test_every_kind_of_target(runs, target):
    result = diagnose_against(runs / "lora", str(runs / target))
    assert min(result["energy"]["total"]) > 0


def test_a_full_run_is_evaluated_as_well(runs):
    forth = diagnose_against(runs / "full", str(runs / "lora"))
    back = diagnose_against(runs / "lora", str(runs / "full"))
    assert forth["energy"]["total"] == pytest.approx(back["energy"]["total"])


def test_two_adapters_share_one_base(runs):
    pair = load_pair(runs / "lora", str(runs / "na-lora"))
    held = {tensor.data_ptr() for model in (pair.run, pair.target) for tensor in model.parameters()}
    names = [name for name, _ in pair.run.named_parameters()]
    adapters = sum("lora_" in name for name in names)
    assert len(held) == len(names) + adapters


def test_a_fused_gate_and_one_without_a_view():
    small = dict(vocab_size=tiny.VOCABULARY, pad_token_id=0)
    phi3 = transformers.Phi3Config(
        hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **small
    )
    t5 = transformers.T5Config(d_model=32, d_ff=56, d_kv=8, num_layers=1, num_heads=4, **small)
    for model, more in (
        (transformers.Phi3ForCausalLM(phi3), {}),
        (transformers.T5ForConditionalGeneration(t5), {"decoder_input_ids": tiny.tokens(seed=1)}),
    ):
        target = copy.deepcopy(model).double()
        for parameter in target.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
        sites, sums = compare(tiny.with_lora(model.double()), target, [{"input_ids": tiny.tokens(), **more}])
        result = measures(sums)
        assert len(sites) == 2
        for block, site in enumerate(sites):
            assert sums[block].products.sum().item() == pytest.approx(sums[block].total.item(), rel=1e-12)
            assert result["energy"]["total"][block] > 0
            assert (result["energy"]["view_mismatch"][block] == 0) == (site.up is None)


def test_wrong_input_is_one_clear_error(runs, tmp_path):
    def refused(run, target):
        with pytest.raises(nalora.NALoRAError) as error:
            diagnose_against(run, str(target))
        return str(error.value)

    assert "found no run" in refused(runs / "nothing", runs / "full")
    assert "no-such-target: found no such folder" in refused(runs / "lora", runs / "no-such-target")
    assert "nobody/such-model" in refused(runs / "lora", "nobody/such-model")
    assert "without config.json" in refused(runs / "lora", tmp_path)
    other = tiny.saved_llama(tmp_path / "other", layers=3, hidden=48)
    message = refused(runs / "lora", other)
    assert "different architectures" in message
    assert "base (LlamaForCausalLM, 2 FFN blocks of width 64) against" in message
    assert "other (LlamaForCausalLM, 3 FFN blocks of width 96)" in message
    result = runs / "full" / "result.json"
    aside = result.rename(tmp_path / "result.json")
    try:
        assert "an unfinished run" in refused(runs / "lora", runs / "full")
        assert "an unfinished run" in refused(runs / "full", runs / "lora")
    finally:
        aside.rename(result)
