"""GGUF files follow their header, are dequantised once per content, and load in any library afterwards."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import gguf
import peft
import pytest
import torch
import transformers
from gguf_files import SPECIAL, write_llama
from installed import needs

import nalora
from nalora.control.inspection import inspect_model
from nalora.models import gguf_cache
from nalora.models.gguf_cache import dense_folder
from nalora.models.loading import ModelSpec, load, local_source
from nalora.models.versions import GGUF_TOKENIZERS

pytestmark = needs("transformers", GGUF_TOKENIZERS)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NALORA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("gguf") / "model.gguf", add_bos=True, quantised=True)


BOS, EOS, EOT = (SPECIAL.index(name) for name in ("<s>", "</s>", "<eot>"))


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("bos", [True, False, None])
@pytest.mark.parametrize("eos", [True, False, None])
def test_bos_and_eos_follow_the_header(tmp_path, model, bos, eos):
    path = write_llama(tmp_path / "a.gguf", model=model, add_bos=bos, add_eos=eos)
    tokenizer = load(ModelSpec(str(path), device="cpu")).processor
    ids, plain = tokenizer("ab a").input_ids, tokenizer("ab a", add_special_tokens=False).input_ids
    added = ((bos is None and model == "llama") or bos) is True, eos is True
    assert ids == [BOS] * added[0] + plain + [EOS] * added[1]
    assert plain
    assert not {BOS, EOS} & {*plain}


def test_special_tokens_template_and_ends_come_from_the_header(file):
    loaded = load(ModelSpec(str(file), device="cpu"))
    tokenizer = loaded.processor
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (BOS, EOS, 0)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "ab"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<s>user: ab<eot>assistant: "
    assert loaded.model.generation_config.eos_token_id == [EOS, EOT]


def test_the_weights_are_those_of_the_file(file):
    model = load(ModelSpec(str(file), device="cpu")).model
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for theirs, ours in (("ffn_gate", "gate_proj"), ("ffn_up", "up_proj"), ("ffn_down", "down_proj")):
        tensor = tensors[f"blk.1.{theirs}.weight"]
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(getattr(model.model.layers[1].mlp, ours).weight.data, expected)


def test_it_is_dequantised_once_for_each_content(file, tmp_path, monkeypatch, capsys):
    calls = []
    dequantise = gguf_cache._dequantise
    monkeypatch.setattr(gguf_cache, "_dequantise", lambda *args: (calls.append(args[0]), dequantise(*args)))
    first = dense_folder(file)
    assert capsys.readouterr().err.count("dequantising model.gguf once") == 1
    assert dense_folder(file) == first == local_source(ModelSpec(str(file)))
    assert capsys.readouterr().err == ""
    # A copy of the file under its name elsewhere is the same content; another content under the same name is not.
    (tmp_path / "other").mkdir()
    copy = shutil.copy(file, tmp_path / "other")
    assert dense_folder(type(file)(copy)) == first
    assert len(calls) == 1
    other = write_llama(tmp_path / "model.gguf", seed=1)
    assert dense_folder(other) != first
    assert len(calls) == 2


def test_a_damaged_copy_is_made_again_and_foreign_files_stay(file):
    folder = dense_folder(file)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    content = bytearray(before["model.safetensors"])
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    (folder / "notes.md").write_text("mine")
    assert dense_folder(file) == folder
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    manifest = gguf_cache._MANIFEST
    assert {**after, manifest: b""} == {**before, manifest: b"", "notes.md": b"mine"}


def test_a_cache_that_was_copied_is_still_whole(file, monkeypatch):
    folder = dense_folder(file)
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    monkeypatch.setattr(gguf_cache, "_dequantise", lambda *_: pytest.fail("made again"))
    assert dense_folder(file) == folder


def test_a_folder_of_others_in_its_place_is_refused(file):
    folder = gguf_cache.cached_folder(file)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("mine")
    with pytest.raises(nalora.NALoRAError, match="move that folder elsewhere"):
        dense_folder(file)
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_an_interrupted_first_time_leaves_nothing_that_is_used(file, cache, monkeypatch):
    def interrupted(gguf, header, folder):
        (folder / "model.safetensors").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(gguf_cache, "_dequantise", interrupted)
        with pytest.raises(KeyboardInterrupt):
            dense_folder(file)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []
    # A killed process leaves an unfinished folder; the next one removes it.
    left = cache / f"{gguf_cache._prefix(gguf_cache.cached_folder(file))}killed"
    left.mkdir()
    assert dense_folder(file).is_dir()
    assert not left.exists()


def test_several_at_once_make_it_once(file, cache, monkeypatch):
    calls = []
    dequantise = gguf_cache._dequantise
    monkeypatch.setattr(gguf_cache, "_dequantise", lambda *args: (calls.append(args[0]), dequantise(*args)))
    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(dense_folder, [file] * 4))
    assert (folders, len(calls)) == ({gguf_cache.cached_folder(file)}, 1)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [folders.pop().name]


@pytest.mark.slow
def test_several_processes_make_it_once(file, cache):
    code = (
        "import sys, pathlib; from nalora.models import gguf_cache as g; dequantise = g._dequantise\n"
        "g._dequantise = lambda *args: (print('made', flush=True), dequantise(*args))\n"
        "print(g.dense_folder(pathlib.Path(sys.argv[1])), flush=True)"
    )
    jobs = [subprocess.Popen([sys.executable, "-c", code, file], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    lines = [line for job in jobs for line in job.communicate(timeout=120)[0].splitlines()]
    assert [job.returncode for job in jobs] == [0, 0, 0]
    assert sorted(lines) == sorted(["made", *[str(gguf_cache.cached_folder(file))] * 3])


def test_without_room_or_package_nothing_is_made(file, cache, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
        with pytest.raises(nalora.NALoRAError, match="GB free"):
            dense_folder(file)
    with monkeypatch.context() as patched:
        patched.setattr(gguf_cache.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(nalora.NALoRAError, match="pip install gguf"):
            dense_folder(file)
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_a_cache_that_cannot_be_written_is_one_sentence(file, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("a file")
    with monkeypatch.context() as patched:
        patched.setenv("NALORA_CACHE", str(tmp_path / "taken"))
        with pytest.raises(nalora.NALoRAError, match="set NALORA_CACHE") as raised:
            dense_folder(file)
    assert "\n" not in str(raised.value)


def test_a_truncated_file_is_one_sentence(file, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-2_000])
    for use in (lambda: load(ModelSpec(str(cut), device="cpu")), lambda: inspect_model(str(cut))):
        with pytest.raises(nalora.NALoRAError, match=r"truncated GGUF file .* fetch the file again") as raised:
            use()
        assert "\n" not in str(raised.value)


def test_an_architecture_that_transformers_cannot_read_is_one_sentence(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "nobodys")
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_ti_data_to_file):
        write()
    writer.close()
    for use in (lambda path: load(ModelSpec(path, device="cpu")), inspect_model):
        with pytest.raises(nalora.NALoRAError, match="architecture 'nobodys' that cannot be read"):
            use(str(tmp_path / "a.gguf"))


def test_inspecting_reads_the_header_alone(file, cache):
    seen = inspect_model(str(file))
    assert (seen.architecture, len(seen.plan.blocks)) == ("LlamaForCausalLM", 2)
    assert not cache.exists()
    dense_folder(file)
    assert inspect_model(str(file)).trainable == seen.trainable


def test_quantising_acts_on_a_gguf_file_too(file):
    pytest.importorskip("bitsandbytes")
    model = load(ModelSpec(str(file), device="cpu", quantise="4bit")).model
    assert type(model.model.layers[0].mlp.gate_proj).__name__ == "Linear4bit"


def test_a_trained_adapter_names_a_base_that_loads(file, tmp_path):
    from nalora.runs.settings import check
    from nalora.training.run import train

    run = {"model": str(file), "task": "gym/chain_sum", "train_size": 8, "test_size": 4, "steps": 1, "batch_size": 2,
           "output": str(tmp_path / "run"), "device": "cpu"}  # fmt: skip
    train(check(run))
    adapter = tmp_path / "run" / "adapter"
    base = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.PeftModel.from_pretrained(model, str(adapter))
    ids = torch.tensor([transformers.AutoTokenizer.from_pretrained(base)("ab").input_ids])
    assert ids[0, 0] == BOS
    assert torch.isfinite(adapted(ids).logits).all()


def test_a_copy_under_another_name_finds_the_same_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NALORA_CACHE", str(tmp_path / "cache"))
    first, copy, other = (tmp_path / f"{name}.gguf" for name in ("first", "copy", "other"))
    for file in (first, copy):
        file.write_bytes(b"the same content")
    other.write_bytes(b"another content!")
    place = gguf_cache.cached_folder(first)
    place.mkdir(parents=True)
    assert gguf_cache.cached_folder(copy) == place
    assert gguf_cache.cached_folder(other) != place
