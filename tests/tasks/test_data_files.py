"""Data files: every row is read as it was written, broken ones are reported with file and line."""

from __future__ import annotations

import csv
import json
import pickle
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nalora.errors import NALoRAError
from nalora.tasks.data_files import NoSplitError, files_of, is_data, open_rows
from nalora.tasks.example_rows import checked_rows
from nalora.tasks.prompts import PromptRows

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\x00"), max_size=30)
ROWS = st.lists(st.fixed_dictionaries({"question": TEXTS, "answer": TEXTS}), min_size=1, max_size=6)
anything = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@anything
@given(ROWS, st.booleans(), st.booleans())
def test_json_lines_are_read_in_any_order(tmp_path, rows, mark, blank_lines):
    file = tmp_path / "data.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    text = ("\n\n" if blank_lines else "\n").join(lines)
    file.write_text(text, encoding="utf-8-sig" if mark else "utf-8", newline="\n")
    opened = open_rows(file)
    assert [opened[i] for i in reversed(range(len(opened)))] == rows[::-1]
    assert opened.where(len(rows) - 1) == f"{file}:{len(rows) + (len(rows) - 1) * blank_lines}"
    assert pickle.loads(pickle.dumps(opened))[0] == rows[0]


@anything
@given(ROWS, st.sampled_from([(".csv", ","), (".tsv", "\t")]))
def test_tables_with_line_breaks_in_fields_are_read(tmp_path, rows, kind):
    suffix, delimiter = kind
    file = tmp_path / f"data{suffix}"
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, ["question", "answer"], delimiter=delimiter, quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(rows)
    opened = open_rows(file)
    assert [opened[i] for i in range(len(opened))] == rows


def test_a_json_list_and_objects_in_a_json_file(tmp_path):
    rows = [{"a": "1"}, {"a": "2"}]
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, rows)))
    for name in ("list.json", "lines.json"):
        opened = open_rows(tmp_path / name)
        assert [opened[0], opened[1]] == rows
        assert len(opened) == 2


def test_parquet_files_are_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"question": "1 + 1", "answer": "2"}] * 3).to_parquet(tmp_path / "data.parquet")
    opened = open_rows(tmp_path / "data.parquet")
    assert len(opened) == 3
    assert opened[2] == {"question": "1 + 1", "answer": "2"}
    assert opened.where(2).endswith("data.parquet, row 2")


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        (
            "a.jsonl",
            '{"a": 1}\n{"a": \n\n[1]\n"x"',
            "line 2: no JSON (Expecting value, column 6); line 4: list instead",
        ),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}', "line 2: the byte 0xff, which is not UTF-8"),
        ("a.jsonl", "\n \n", "no rows"),
        ("a.jsonl", "1\n" * 7, "7 in total"),
        ("a.csv", "q,a\n1,2\n1\n1,2,3\n", "line 3: 1 fields instead of 2; line 4: 3 fields instead of 2"),
        ("a.csv", "q,a\n", "no rows"),
        ("a.json", "[1, 2]", "element 0 of 2 is no object"),
        ("a.json", "[{]", "no JSON"),
        ("a.txt", "x", "the suffix '.txt'"),
    ],
)
def test_broken_files_are_refused_with_their_lines(tmp_path, name, content, found):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(NALoRAError) as error:
        open_rows(file)
    assert found in error.value.found
    assert str(file) in error.value.where


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        ('{"question": "1?", "answr": "2"}\n{"q\n', "the columns question, answr (name them with columns"),
        ('{"question": "1?", "answer": ""}\n{"q\n', "a.jsonl:1: 'answer' is empty (correct or remove them"),
    ],
)
def test_bad_lines_and_bad_columns_are_in_one_error(tmp_path, content, columns):
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    with pytest.raises(NALoRAError) as error:
        checked_rows(str(file), "train", None, None, lambda *progress: None)
    assert error.value.found.startswith("2 problems: line 2: no JSON (")
    assert columns in error.value.found
    assert error.value.expected.startswith("one JSON object per line, and ")


def test_rows_of_the_wrong_length_and_empty_cells_are_in_one_error(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("question,answer\n1?\n2?,\n3?,4\n")
    with pytest.raises(NALoRAError, match=r"line 2: 1 fields instead of 2 .*a\.csv:3: 'answer' is empty"):
        checked_rows(str(file), "train", None, None, lambda *progress: None)


def test_bad_lines_alone_have_no_other_problem(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"question": "1?", "answer": "2"}\n{"q\n')
    with pytest.raises(
        NALoRAError, match=r"found line 2: no JSON .*; expected one JSON object per line\. Fix: correct"
    ):
        checked_rows(str(file), "train", None, None, lambda *progress: None)


def test_prompts_have_one_error_too(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"question": " "}\n{"q\n')
    with pytest.raises(NALoRAError, match=r"2 problems: line 2: no JSON .*a\.jsonl:1: 'question' is empty"):
        PromptRows(str(file))


def test_the_bad_lines_of_all_files_of_a_folder_are_in_one_error(tmp_path):
    for name, content in (("a.jsonl", "{"), ("b.jsonl", '{"text": ""}'), ("c.csv", "text\n1,2\n")):
        (tmp_path / name).write_text(content)
    with pytest.raises(NALoRAError) as error:
        checked_rows(str(tmp_path), "train", None, None, lambda *progress: None)
    for found in ("a.jsonl: line 1: no JSON", "c.csv: line 2: 2 fields instead of 1", "b.jsonl:1: 'text' is empty"):
        assert found in error.value.found
    assert error.value.where == str(tmp_path)


def test_a_missing_file_is_answered_with_the_nearest_name(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(NALoRAError, match=r"did you mean train\.jsonl"):
        open_rows(tmp_path / "trian.jsonl")
    (tmp_path / "long.jsonl").write_text("{}")
    with pytest.raises(NALoRAError, match="Fix: check the path"):  # only the suffix is the same
        open_rows(tmp_path / "missing.jsonl")
    with pytest.raises(NALoRAError, match=r"did you mean train\.jsonl"):
        open_rows(tmp_path / "train.csv")


def test_a_folder_has_splits_by_name(tmp_path):
    for name in ("train-0.jsonl", "train-1.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}))
    assert [open_rows(tmp_path)[i]["text"] for i in range(2)] == ["train-0.jsonl", "train-1.jsonl"]
    assert open_rows(tmp_path).where(1) == f"{tmp_path / 'train-1.jsonl'}:1"
    assert [file.name for file in files_of(tmp_path, "test")] == ["test.jsonl"]
    with pytest.raises(NALoRAError, match=r"no file for 'validation' among test\.jsonl"):
        files_of(tmp_path, "validation")


def test_a_folder_without_names_of_splits_is_for_training(tmp_path):
    (tmp_path / "sums.jsonl").write_text("{}")
    assert len(open_rows(tmp_path)) == 1


@pytest.mark.parametrize("name", ["a.jsonl", "x/a.CSV", "hub:openai/gsm8k", "a.parquet"])
def test_names_of_data(name):
    assert is_data(name)
    assert not is_data("gsm8k")


def test_a_large_file_takes_little_memory(tmp_path):
    file = tmp_path / "data.jsonl"
    line = json.dumps({"prompt": "x" * 900, "completion": "y"}) + "\n"
    with file.open("w") as out:
        for _ in range(20_000):
            out.write(line)
    tracemalloc.start()
    rows = open_rows(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(rows) == 20_000
    assert peak < 2_000_000  # the file has 18 MB


def test_a_data_set_of_the_hub_has_splits(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    # A folder takes the place of the download; the library reads it as it reads a data set of the hub.
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    opened = open_rows(f"hub:{tmp_path / 'set'}")
    assert opened[0] == {"question": "1 + 1", "answer": "2"}
    assert opened.where(0).endswith("set, train, row 0")
    with pytest.raises(NoSplitError, match="no split 'test'; expected one of train"):
        open_rows(f"hub:{tmp_path / 'set'}", "test")
    with pytest.raises(NALoRAError, match="no dataset") as error:
        open_rows(f"hub:{tmp_path / 'nothing'}", "test")
    assert not isinstance(error.value, NoSplitError)


def test_a_file_that_is_edited_while_it_is_read_is_reported(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"a": 1}\n{"a": 2}\n')
    opened = open_rows(file)
    with file.open("r+") as edited:
        edited.write('{"longer": 1}\n')
    with pytest.raises(NALoRAError, match="another content than when the file was opened"):
        opened[1]
