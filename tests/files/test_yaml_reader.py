"""YAML that cannot be settings is refused in one sentence before its values are built."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from nalora.errors import NALoRAError
from nalora.files.yaml_reader import MOST_LEVELS, read, value
from nalora.runs import settings as runs
from nalora.studies import study

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 5_000))
MERGED = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 10))
HOSTILE = {
    "bomb": (BOMB, "aliases that expand to more than 100,000 values"),
    "merged": (MERGED, "aliases that expand to more than 100,000 values"),
    "chain": (CHAIN, f"more than {MOST_LEVELS} levels"),
    "brackets": ("[" * 5_000 + "]" * 5_000, f"more than {MOST_LEVELS} levels"),
    "braces": ("a: " + "{b: " * 5_000 + "1" + "}" * 5_000, f"more than {MOST_LEVELS} levels"),
    "indented": ("".join(" " * i + "a:\n" for i in range(1_000)), f"more than {MOST_LEVELS} levels"),
    "itself": ("a: &a [*a]", "a value that contains itself"),
    "twice": ("model: a\nrank: 8\nmodel: b\nrank: 4\n", "model: given twice, in lines 1 and 3; rank: given twice"),
    "twice below": ("settings:\n  a: 1\n  a: 2\n", "a: given twice, in lines 2 and 3"),
    "date": ("a: 2024-13-45", "a value that YAML cannot read"),
    "empty int": ('a: !!int ""', "a value that YAML cannot read"),
    "no bool": ("a: !!bool maybe", "a value that YAML cannot read"),
    "digits": ("a: " + "9" * 5_000, "a value that YAML cannot read"),
    "object": ("a: !!python/object/apply:os.system [true]", "no YAML (could not determine a constructor"),
    "two documents": ("a: 1\n---\nb: 2\n", "no YAML"),
    "nul": ('a: "b\\0c"', "a NUL or half a surrogate pair in line 1"),
    "surrogate": ('a: "\\ud800"', "a NUL or half a surrogate pair in line 1"),
    "escape": ("a: \x1b[31m", "no YAML"),
    "large": ("a: " + "x" * (1 << 20), "more than 1 MiB"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("reader", [runs.read, study.read], ids=["run", "study"])
def test_hostile_files_are_refused_quickly_in_one_sentence(tmp_path, name, reader):
    text, said = HOSTILE[name]
    file = tmp_path / "hostile.yaml"
    file.write_text(text)
    began = time.perf_counter()
    with pytest.raises(NALoRAError) as error:
        reader(file)
    assert time.perf_counter() - began < 20
    assert said in str(error.value)
    assert len(str(error.value)) < 600 + len(str(file))


@pytest.mark.parametrize("reader", [runs.read, study.read], ids=["run", "study"])
def test_a_byte_that_is_not_utf_8_is_named_with_its_line(tmp_path, reader):
    file = tmp_path / "latin.yaml"
    file.write_bytes(b"# fine\nmodel: caf\xe9\n")
    with pytest.raises(NALoRAError, match="byte 0xe9 in line 2, which is not UTF-8.*Fix: save the file as UTF-8"):
        reader(file)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\udcff", "."])
def test_invalid_file_names_are_refused(name):
    for reader in (runs.read, study.read):
        with pytest.raises(NALoRAError):
            reader(name)


def test_values_of_the_command_line_are_read_the_same_way():
    assert runs.key_values(["a=[1, 2]", "b=", "c=x=y"]) == {"a": [1, 2], "b": runs.Removed, "c": "x=y"}
    for argument in ("a=[", "a={b: 1, b: 2}", f"a={'[' * 5_000}", "=5", "a"):
        with pytest.raises(NALoRAError):
            runs.key_values([argument])


def test_a_byte_order_mark_and_merge_keys_are_fine(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("base: &base {rank: 8}\nother: {<<: *base, rank: 4}\n", encoding="utf-8-sig")
    assert read(file, "", "") == {"base": {"rank": 8}, "other": {"rank": 4}}


def test_the_setting_on_is_a_name_and_not_true():
    assert value("method: na-lora\non: pissa\nmask: on", "here") == {"method": "na-lora", "on": "pissa", "mask": True}


_TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
_SCALARS = st.none() | st.booleans() | st.integers() | _TEXTS | st.floats(allow_nan=False)
_VALUES = st.recursive(_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(_TEXTS, inner), max_leaves=12)


@given(_VALUES)
@settings(max_examples=60, deadline=None)
def test_values_equal_those_of_pyyaml(content):
    text = yaml.safe_dump(content, allow_unicode=True)
    assert value(text, "here") == yaml.safe_load(text)


@given(st.text(st.characters(codec="utf-8"), max_size=80) | st.text("&*[]{}:,-?!|>'\"%@` a0\n#<", max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_gives_a_value_or_a_nalora_error(text):
    with contextlib.suppress(NALoRAError):
        value(text, "here")


def test_all_yaml_files_of_the_project_are_read():
    folder = Path(runs.__file__).parents[1] / "runs" / "recipes"
    files = sorted(folder.rglob("*.yaml"))
    assert len(files) > 20
    for file in files:
        assert read(file, "", "") == yaml.safe_load(file.read_text(encoding="utf-8"))
