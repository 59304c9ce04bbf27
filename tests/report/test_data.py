"""Reading of a run's folder, and the notices for damaged, unfinished and missing files."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from nalora.errors import NALoRAError
from nalora.report.data import differences, read_run, read_runs
from nalora.report.naming import layer_labels
from nalora.report.sections import scores
from report.run_folders import LOWER, UPPER, block_names, summary, write, write_run


def test_every_file_of_a_run_is_read(tmp_path):
    run = write_run(tmp_path, steps=7, layers=3, mismatch=True)
    read = read_run(run)
    assert (read.name, read.method, read.model, read.task) == ("run", "na-lora", "smollm2-135m", "gym/chain_sum")
    assert read.result["steps"] == 7
    assert read.environment["versions"]["torch"] == "2.11.0"
    assert [row["step"] for row in read.metrics] == [1, 2, 3, 4, 5, 6, 7]
    assert set(read.evaluations["gym/chain_sum"]) == {"base", "adapted"}
    assert read.diagnosis["steps"] == [0, 5, 10, 20]
    assert read.mismatch["target"] == "runs/full"
    assert read.notices == []
    assert read.missing == {}


def test_gates_are_arrays_of_the_files_numbers(tmp_path):
    run = write_run(tmp_path, steps=5, layers=3)
    gates = read_run(run).gates
    lines = (run / "gates.jsonl").read_text().splitlines()
    assert gates.blocks == tuple(block_names(3))
    assert gates.activations == ("silu",) * 3
    assert gates.thresholds == ((LOWER, UPPER),) * 3
    for i, line in enumerate(lines[1:]):
        row = json.loads(line)
        assert gates.steps[i] == row.pop("step")
        for name, values in row.items():
            np.testing.assert_array_equal(gates.columns[name][i], values)


def test_the_newest_evaluation_counts(tmp_path):
    run = write_run(tmp_path)
    file = next(run.glob("evaluations/gym/chain_sum/adapted-*/summary.json"))
    newer = file.parent.with_name("adapted-aaaaaaaaaa") / "summary.json"
    newer.parent.mkdir()
    newer.write_text(json.dumps(json.loads(file.read_text()) | {"unfinished": 12345}))
    assert read_run(run).evaluations["gym/chain_sum"]["adapted"]["unfinished"] == 12345


def test_a_partial_evaluation_does_not_replace_a_complete_one(tmp_path):
    run = write_run(tmp_path, evaluated=False)
    place = run / "evaluations" / "gym" / "chain_sum"

    def shown():
        return read_run(run).evaluations["gym/chain_sum"]["adapted"]["examples"]

    write(place / "adapted-0" / "summary.json", summary(2, of=5) | {"questions": 100})
    assert shown() == 5
    assert "the first 5 of 100" in scores([read_run(run)])
    write(place / "adapted-1" / "summary.json", summary(31, of=100))
    for number, asked in (("2", 5), ("3", 50)):
        write(place / f"adapted-{number}" / "summary.json", summary(2, of=asked) | {"questions": 100})
        assert shown() == 100
    assert "the first" not in scores([read_run(run)])


def test_validation_questions_are_labelled(tmp_path):
    run = write_run(tmp_path, seed=0)
    for who in ("base", "adapted"):
        write(run / "evaluations" / "gym" / "chain_sum-validation" / f"{who}-0" / "summary.json", summary(90))
    for file in run.rglob("chain_sum/*/summary.json"):
        os.utime(file, (2e9, 2e9))
    read = read_run(run)
    assert list(read.evaluations) == ["gym/chain_sum", "gym/chain_sum (validation)"]
    shares = {task: asked["adapted"]["measures"]["accuracy"]["value"] for task, asked in read.evaluations.items()}
    assert shares == {"gym/chain_sum": 0.31, "gym/chain_sum (validation)": 0.9}
    assert "gym/chain_sum (validation): value" in scores([read])


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(NALoRAError, match="no such folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(NALoRAError, match="no such folder"):
        read_runs([tmp_path / "nowhere"])


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(NALoRAError, match="run.yaml"):
        read_runs([tmp_path])


def test_a_running_run_is_reported(tmp_path):
    run = write_run(tmp_path, evaluated=False)
    (run / "result.json").unlink()
    read = read_run(run)
    assert read.result is None
    assert any("still running" in notice and "before any checkpoint" in notice for notice in read.notices)
    (run / "checkpoints" / "checkpoint-5").mkdir(parents=True)
    assert any("resumed from a checkpoint" in notice for notice in read_run(run).notices)


def test_damaged_lines_are_skipped_and_counted(tmp_path):
    run = write_run(tmp_path, steps=6)
    for name in ("metrics.jsonl", "gates.jsonl"):
        lines = (run / name).read_text().split("\n")
        lines[2] = lines[2][:20]
        (run / name).write_text("\n".join([*lines[:-1], "[]", '{"no": "step"}', "\x00\xff"]), encoding="latin-1")
    read = read_run(run)
    assert "metrics.jsonl: 4 damaged lines were skipped." in read.notices
    assert "gates.jsonl: 4 damaged lines were skipped." in read.notices
    assert [row["step"] for row in read.metrics] == [1, 2, 4, 5, 6]
    assert read.gates.steps.tolist() == [1, 3, 4, 5, 6]


def test_a_row_of_gates_with_another_width_is_damaged(tmp_path):
    run = write_run(tmp_path, steps=3, layers=2)
    with (run / "gates.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "p_sup": [0.1, 0.2, 0.3]}) + "\n")
        file.write(json.dumps({"step": 5, "p_sup": ["a", "b"]}) + "\n")
        file.write(json.dumps({"step": 6, "p_sup": [0.25, None]}) + "\n")
    read = read_run(run)
    assert "gates.jsonl: 2 damaged lines were skipped." in read.notices
    assert read.gates.columns["p_sup"][-1, 0] == 0.25
    assert np.isnan(read.gates.columns["p_sup"][-1, 1])
    assert np.isnan(read.gates.columns["stability"][-1]).all()


@pytest.mark.parametrize(
    "name", ["run.yaml", "environment.json", "result.json", "diagnosis.json", "mismatch.json", "gates.jsonl"]
)
@pytest.mark.parametrize("damage", ["{]", "", "[1, 2]", "\x00\x01\x02"])
def test_a_damaged_file_is_a_notice(tmp_path, name, damage):
    run = write_run(tmp_path, mismatch=True)
    (run / name).write_text(damage)
    read = read_run(run)
    assert any(name in notice for notice in read.notices), read.notices


def test_a_diagnosis_without_its_parts_is_left_out(tmp_path):
    run = write_run(tmp_path)
    (run / "diagnosis.json").write_text('{"version": 1}')
    read = read_run(run)
    assert read.diagnosis is None
    assert any("diagnosis.json lacks" in notice for notice in read.notices)


def test_files_that_a_method_does_not_write_cause_no_notice(tmp_path):
    read = read_run(write_run(tmp_path, method="lora", gates=False, diagnosis=False))
    assert read.notices == []
    assert "lora does not steer gates" in read.missing["gates"]
    assert "nalora diagnose" in read.missing["diagnosis"]


def test_a_folder_of_runs_gives_its_runs(tmp_path):
    for name in ("b/seed-0", "a/seed-0", "a/seed-1"):
        write_run(tmp_path / name.split("/")[0], name=name.split("/")[1])
    (tmp_path / "a" / "seed-0" / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    assert [run.name for run in read_runs([tmp_path])] == ["a/seed-0", "a/seed-1", "b/seed-0"]
    assert len(read_runs([tmp_path, tmp_path / "a" / "seed-1"])) == 3


def test_runs_that_cannot_be_compared_are_named(tmp_path):
    one = write_run(tmp_path, name="one")
    other = write_run(tmp_path, name="other", model="meta-llama/Llama-2-7b", task="math/gsm8k")
    models, tasks = differences(read_runs([one, other]))
    assert "different base models" in models
    assert "smollm2-135m: one; meta-llama/Llama-2-7b: other" in models
    assert "different tasks" in tasks
    assert differences(read_runs([one])) == []


@pytest.mark.parametrize(
    ("blocks", "labels"),
    [
        (block_names(3), ["0", "1", "2"]),
        (["model.layers.7.mlp"], ["7"]),
        (["enc.block.0.layer.1.ff", "enc.block.1.layer.1.ff", "dec.block.0.layer.2.ff"], ["enc 0", "enc 1", "dec 0"]),
        (["l.0.experts.0", "l.0.experts.1", "l.1.experts.0", "l.1.experts.1"], ["0 0", "0 1", "1 0", "1 1"]),
        (["a.b", "a.b.c"], ["0", "1"]),
        ([], []),
    ],
)
def test_layers_are_named_by_their_number(blocks, labels):
    assert layer_labels(blocks) == labels
