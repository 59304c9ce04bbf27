"""The output of `nalora generate`: continued wherever a kill left it, and never another program's file."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nalora
from nalora.evaluation.answer_file import AnswerFile, refuse_foreign
from nalora.evaluation.identity import key_of


def row(number):
    return {"row": number, "prompt": "a\u2028b", "output": f"answer {number} \ud83d"}


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(0, 400), order=st.permutations(range(4)))
def test_a_file_cut_after_its_first_row_is_continued_to_the_same_file(tmp_path_factory, cut, order):
    whole, part = (tmp_path_factory.mktemp("answers") / name for name in ("whole.jsonl", "part.jsonl"))
    for path in (whole, part):
        with AnswerFile(path, "key") as file:
            file.add(map(row, order))
    with AnswerFile(whole, "key") as file:
        file.sort()
    assert [json.loads(line)["row"] for line in whole.read_bytes().splitlines()] == [0, 1, 2, 3]
    content = part.read_bytes()
    first = content.index(b"\n") + 1
    part.write_bytes(content[: first + cut] if cut else b"")
    with AnswerFile(part, "key") as file:
        assert file.done <= {0, 1, 2, 3}
        file.add(row(number) for number in range(4) if number not in file.done)
        file.sort()
    assert part.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    "content",
    [b"mine\n", b'{"row": 1}\n', b"mine", b"m", b'{"key": "other", "row": 0, "output": ""}\n', b'{"key": "ot', b"\n"],
)
def test_other_files_are_refused_and_unchanged(tmp_path, content):
    path = tmp_path / "file.jsonl"
    path.write_bytes(content)
    with pytest.raises(nalora.NALoRAError, match=r"another model|did not write"):
        AnswerFile(path, "key")
    assert path.read_bytes() == content
    ours = tmp_path / "ours.jsonl"
    with AnswerFile(ours, "key") as file:
        file.add([row(0)])
    with ours.open("ab") as file:
        file.write(content)
    with pytest.raises(nalora.NALoRAError):
        AnswerFile(ours, "key")
    assert ours.read_bytes().endswith(content)


@pytest.mark.parametrize("content", [b"{", b'{"key', b'{"key": "key"', b'{"key": "key", "row": 0, "output": ""}'])
def test_the_beginning_of_a_row_may_be_anybody_s(tmp_path, content):
    path = tmp_path / "file.jsonl"
    path.write_bytes(content)
    for call in (lambda: refuse_foreign(path), lambda: AnswerFile(path, "key")):
        with pytest.raises(nalora.NALoRAError, match="did not write"):
            call()
    assert path.read_bytes() == content


KEY = key_of({"model": "smollm2-135m"})


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(0, 100))
def test_a_file_cut_in_its_first_row_is_continued_if_it_has_the_whole_key(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("answers") / "file.jsonl"
    with AnswerFile(path, KEY) as file:
        file.add(map(row, range(2)))
    whole = path.read_bytes()
    content = whole[: min(cut, whole.index(b"\n"))]
    path.write_bytes(content)
    if content and not content.startswith(f'{{"key": "{KEY}", "row": '.encode()):
        for call in (lambda: refuse_foreign(path), lambda: AnswerFile(path, KEY)):
            with pytest.raises(nalora.NALoRAError, match="did not write"):
                call()
        assert path.read_bytes() == content
        return
    refuse_foreign(path)
    with AnswerFile(path, KEY) as file:
        assert file.done == set()
        file.add(map(row, range(2)))
    assert path.read_bytes() == whole


@pytest.mark.parametrize("content", [b'{"key": "%b", "row": 0, "pro', b'{"key": "%b", "row": 0, "output": ""}'])
def test_a_first_row_of_another_setup_is_refused(tmp_path, content):
    path = tmp_path / "file.jsonl"
    path.write_bytes(content % KEY.encode())
    with pytest.raises(nalora.NALoRAError, match="answers of another model, file or setting"):
        AnswerFile(path, key_of({"model": "another"}))
    assert path.read_bytes() == content % KEY.encode()


def test_two_processes_do_not_write_the_same_file(tmp_path):
    pytest.importorskip("fcntl")
    path = tmp_path / "file.jsonl"
    with AnswerFile(path, "key") as file:
        for number in range(2):
            for call in (lambda: refuse_foreign(path), lambda: AnswerFile(path, "key")):
                with pytest.raises(nalora.NALoRAError, match="another process that is writing it"):
                    call()
            file.add([row(1 - number)])
        file.sort()
    with AnswerFile(path, "key") as file:
        assert file.done == {0, 1}


def test_links_and_folders_are_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for name in ("link", "."):
        with pytest.raises(nalora.NALoRAError, match="--output"):
            refuse_foreign(tmp_path / name)
    refuse_foreign(tmp_path / "new" / "file.jsonl")
    assert not (tmp_path / "new").exists()
