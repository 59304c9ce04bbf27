"""Rows are kept, continued and stopped in time."""

from __future__ import annotations

import contextlib
import csv

import harness
import lease
import peers
import training_step
import variants

OLD = (
    "question,setting,variant,unit,p20,p50,p80,samples,peak_gib,device,torch,triton,transformers,peft,liger,commit,date"
)


def test_old_rows_stay_when_columns_are_added(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(f'{OLD}\ngrowth,"8 layers, 1x8",PEFT LoRA,ms,1,2,3,4,5,GPU,2,3,5,0,none,abc,2026-11-01\n')
    harness.append([{"question": "q", "setting": "s", "variant": "v", "p50": 7, "note": "n"}], path)
    with path.open(newline="") as file:
        header, old, new = csv.reader(file)
    assert header[: len(OLD.split(","))] == OLD.split(",")
    assert header == harness.COLUMNS
    assert old[1:8] == ["8 layers, 1x8", "PEFT LoRA", "ms", "1", "2", "3", "4"]
    assert len(old) == len(new) == len(header)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]


def test_a_second_call_measures_what_is_missing(tiny_step, monkeypatch, capsys):
    monkeypatch.setattr(harness, "commit", lambda: "abc")
    first, second = "NA-LoRA, model untouched", "paper's hooks"
    training_step.run(tiny_step(first))
    args = tiny_step(first, second)
    training_step.run(args)
    assert [row["variant"] for row in harness.read(args.rows)] == ["PEFT LoRA", first, "PEFT LoRA", second]
    training_step.run(args)
    assert len(harness.read(args.rows)) == 4
    assert "All variants have a row" in capsys.readouterr().out
    training_step.run(tiny_step(first, again=True))
    assert len(harness.read(args.rows)) == 6
    monkeypatch.setattr(harness, "commit", lambda: "another")
    assert harness.measured(training_step.QUESTION, training_step.setting(args), args.rows) == set()


def test_a_check_writes_no_rows(tiny_step):
    args = tiny_step("NA-LoRA, model untouched", check=True)
    training_step.run(args)
    assert not args.rows.exists()


def test_rounds_end_at_the_time_limit_and_failures_are_notes():
    calls = []

    @contextlib.contextmanager
    def good():
        yield lambda: calls.append(1)

    @contextlib.contextmanager
    def bad():
        raise RuntimeError("out of memory\nmore")
        yield

    both = {"good": good, "bad": bad}
    stopped = harness.interleave(both, 5, 2, 1, harness.TimeLimit(0))
    assert stopped["good"]["samples"] == 2
    assert stopped["bad"]["note"] == "failed: RuntimeError: out of memory"
    assert harness.interleave(both, 5, 2, 1, harness.TimeLimit(None))["good"]["samples"] == 10


def test_the_lease_names_variants_that_exist(training):
    known = {*variants.of_plain_base(training, peers.Kernels()), *variants.of_fp8_base(training)}
    assert {*lease.MAIN, *lease.LONG, *lease.COMPILED} <= known
    profiled = [name for command in lease.COMMANDS if command.arguments[0] == "profile_step.py"
                for name in command.arguments[1:]]  # fmt: skip
    assert profiled
    assert set(profiled) <= known


def test_a_lease_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "commit", lambda: "abc")
    script = tmp_path / "script.py"
    script.write_text("import sys; print('measured', sys.argv[1:]); sys.exit('--fail' in sys.argv)")
    monkeypatch.setattr(lease, "HERE", tmp_path)
    assert lease.perform(lease.Command("good", 9, ("script.py",)), tmp_path, 9) == "finished"
    assert lease.perform(lease.Command("bad", 9, ("script.py", "--fail")), tmp_path, 9) == "failed"
    assert lease.finished(tmp_path) == {"good"}
    assert f"--rows', '{tmp_path / 'rows.csv'}'" in (tmp_path / "log.txt").read_text()
    monkeypatch.setattr(harness, "commit", lambda: "another")
    assert lease.finished(tmp_path) == set()
