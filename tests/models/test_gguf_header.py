"""A GGUF file's header is read without its weights, and an incomplete file is refused in one sentence."""

from __future__ import annotations

import contextlib

import gguf
import pytest
from gguf_files import CHAT, SPECIAL, write_llama
from hypothesis import given, settings
from hypothesis import strategies as st

import nalora
from nalora.models.gguf_header import read_header


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("gguf") / "model.gguf", add_bos=True, add_eos=False)


def test_single_values_are_those_of_the_package_that_wrote_them(file):
    header = read_header(file)
    theirs = {
        key: field.contents()
        for key, field in gguf.GGUFReader(file).fields.items()
        if not key.startswith("GGUF.") and field.types[0] != gguf.GGUFValueType.ARRAY
    }
    assert header.values == pytest.approx(theirs)
    assert (header.architecture, header.chat_template) == ("llama", CHAT)
    assert [header.token_id(name) for name in ("bos", "eos", "eot")] == [
        SPECIAL.index(f"<{n}>") for n in ("s", "/s", "eot")
    ]
    assert (header.adds("bos"), header.adds("eos"), header.token_id("sep")) == (True, False, None)


def test_the_size_and_the_number_of_weights_are_those_of_the_file(file, tmp_path):
    for path in (file, write_llama(tmp_path / "q8.gguf", quantised=True)):
        header = read_header(path)
        assert header.weights == sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(path).tensors)
        # Writers pad the last tensor to the alignment.
        assert 0 <= path.stat().st_size - header.size < 32


@pytest.mark.parametrize(
    ("model", "added", "expected"),
    [("llama", None, (True, False)), ("gpt2", None, (None, None)), ("llama", False, (False, False))],
)
def test_without_the_keys_llama_cpp_s_own_rule_holds(tmp_path, model, added, expected):
    header = read_header(write_llama(tmp_path / "a.gguf", model=model, add_bos=added))
    assert (header.adds("bos"), header.adds("eos")) == expected


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 0.999))
def test_every_truncation_is_one_sentence(file, tmp_path_factory, share):
    whole = file.read_bytes()
    cut = tmp_path_factory.mktemp("cut") / "model.gguf"
    # The last bytes are padding that no tensor needs.
    cut.write_bytes(whole[: int(share * (read_header(file).size - 1))])
    with pytest.raises(nalora.NALoRAError, match="truncated GGUF file|no GGUF file") as raised:
        read_header(cut)
    assert "\n" not in str(raised.value)


@settings(max_examples=60, deadline=None)
@given(position=st.integers(4, 4_000), value=st.integers(0, 255))
def test_damage_is_read_or_refused_and_never_a_traceback(file, tmp_path_factory, position, value):
    content = bytearray(file.read_bytes())
    content[position] = value
    damaged = tmp_path_factory.mktemp("damaged") / "model.gguf"
    damaged.write_bytes(content)
    with contextlib.suppress(nalora.NALoRAError):
        read_header(damaged)


def test_other_files_and_parts_are_refused(tmp_path):
    (tmp_path / "text.gguf").write_text("no model at all")
    with pytest.raises(nalora.NALoRAError, match="no GGUF file"):
        read_header(tmp_path / "text.gguf")
    with pytest.raises(nalora.NALoRAError, match="no such file"):
        read_header(tmp_path / "none.gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "part.gguf"), "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with pytest.raises(nalora.NALoRAError, match="one of 3 parts"):
        read_header(tmp_path / "part.gguf")
