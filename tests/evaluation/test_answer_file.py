"""The output of `nalora generate`: continued wherever a kill left it, and never another program's file."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nalora
from nalora.evaluation.answer_file import AnswerFile, refuse_foreign


def row(number):
    return {"row": number, "prompt": "a\u2028b", "output": f"answer {number} \ud83d"}


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(0, 400), order=st.permutations(range(4)))
def test_a_file_cut_anywhere_is_continued_to_the_same_file(tmp_path_factory, cut, order):
    whole, part = (tmp_path_factory.mktemp("answers") / name for name in ("whole.jsonl", "part.jsonl"))
    for path in (whole, part):
        AnswerFile(path, "key").add(map(row, order))
    AnswerFile(whole, "key").sort()
    assert [json.loads(line)["row"] for line in whole.read_bytes().splitlines()] == [0, 1, 2, 3]
    part.write_bytes(part.read_bytes()[:cut])
    file = AnswerFile(part, "key")
    assert file.done <= {0, 1, 2, 3}
    file.add(row(number) for number in range(4) if number not in file.done)
    file.sort()
    assert part.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    "content",
    [b"mine\n", b'{"row": 1}\n', b"mine", b'{"key": "other", "row": 0, "output": ""}\n', b'{"key": "ot', b"\n"],
)
def test_other_files_are_refused_and_unchanged(tmp_path, content):
    path = tmp_path / "file.jsonl"
    path.write_bytes(content)
    with pytest.raises(nalora.NALoRAError, match=r"another model|did not write"):
        AnswerFile(path, "key")
    assert path.read_bytes() == content
    ours = tmp_path / "ours.jsonl"
    AnswerFile(ours, "key").add([row(0)])
    with ours.open("ab") as file:
        file.write(content)
    with pytest.raises(nalora.NALoRAError):
        AnswerFile(ours, "key")
    assert ours.read_bytes().endswith(content)


def test_links_and_folders_are_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for name in ("link", "."):
        with pytest.raises(nalora.NALoRAError, match="--output"):
            refuse_foreign(tmp_path / name)
    refuse_foreign(tmp_path / "new" / "file.jsonl")
    assert not (tmp_path / "new").exists()
