"""The page without a browser: self-contained, with the numbers of the files and correct sentences."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import yaml

from nalora.errors import NALoRAError
from nalora.report.capacity import read_capacity
from nalora.report.data import read_run, read_runs
from nalora.report.html import page, write_report
from nalora.report.payload import payload
from nalora.report.run_tables import run_tables
from nalora.report.sentences import findings
from nalora.report.tables import markdown
from report.run_folders import summary, write, write_evaluation, write_run


class Page(HTMLParser):
    """The elements, scripts and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._in = tag

    def handle_endtag(self, tag):
        self._in = ""

    def handle_data(self, data):
        (self.scripts if self._in == "script" else self.text).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def embedded_data(text: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(found[1])


def unpacked(packed: dict) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["f32"]), "<f4").reshape(packed["shape"])


def test_nothing_is_fetched(tmp_path):
    seen = Page(page([read_run(write_run(tmp_path, mismatch=True))]))
    for tag, attributes in seen.tags:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            address = attributes.get(name) or ""
            assert not address or address.startswith(("#", "data:")), (tag, attributes)
    style = (write_report.__globals__["_own"])("page.css")
    assert "url(" not in style
    assert "@import" not in style


def test_screen_readers_and_keyboards_are_supported(tmp_path):
    seen = Page(page([read_run(write_run(tmp_path))]))
    assert seen.all("html")[0]["lang"] == "en"
    for landmark in ("header", "nav", "main", "footer", "h1"):
        assert len(seen.all(landmark)) == 1
    ids = {attributes.get("id") for _, attributes in seen.tags}
    assert seen.all("a")[0]["href"] == "#results"
    labelled = {label["for"] for label in seen.all("label")}
    for tag in ("select", "input"):
        assert {control["id"] for control in seen.all(tag)} <= labelled <= ids
    for section in seen.all("section"):
        assert section["aria-labelledby"] in ids
    assert all(cell.get("scope") for cell in seen.all("th"))


def test_sections_are_in_order(tmp_path):
    seen = Page(page([read_run(write_run(tmp_path))]))
    order = ["answer", "results", "examples", "gates", "mismatch", "capacity", "cost", "reproduce", "notices"]
    assert [section["id"] for section in seen.all("section")] == order


def test_the_numbers_equal_those_of_the_files(tmp_path):
    run = write_run(tmp_path, steps=9, layers=3, mismatch=True)
    read = read_run(run)
    (data,) = embedded_data(page([read]))["runs"]
    np.testing.assert_array_equal(data["gates"]["steps"], read.gates.steps)
    for name, packed in data["gates"]["columns"].items():
        np.testing.assert_array_equal(unpacked(packed), read.gates.columns[name].T.astype(np.float32))
    np.testing.assert_array_equal(unpacked(data["lines"]["loss"]["x"]), read.series("loss")[0])
    np.testing.assert_allclose(unpacked(data["lines"]["loss"]["y"]), read.series("loss")[1], rtol=1e-7)
    diagnosis = json.loads((run / "diagnosis.json").read_text())
    for name, packed in data["diagnosis"]["measures"].items():
        np.testing.assert_allclose(unpacked(packed).T, [each[name] for each in diagnosis["intervals"]], rtol=1e-7)
    assert data["diagnosis"]["histogram"]["counts"] == diagnosis["histogram"]["counts"]
    assert data["mismatch"]["share"] == json.loads((run / "mismatch.json").read_text())["share"]
    capacity, _ = read_capacity(read)
    norms = unpacked(data["capacity"]["norms"])
    gate = data["capacity"]["kinds"].index("gate_proj")
    assert norms[2, gate] == pytest.approx(capacity.modules["model.layers.2.mlp.gate_proj"], rel=1e-6)


def test_long_runs_are_thinned_to_steps_of_the_file(tmp_path):
    read = read_run(write_run(tmp_path, steps=2000, layers=2))
    gates = payload([read])["runs"][0]["gates"]
    assert gates["logged"] == 2000
    assert len(gates["steps"]) == 600
    assert (gates["steps"][0], gates["steps"][-1]) == (1, 2000)
    rows = [list(read.gates.steps).index(step) for step in gates["steps"]]
    np.testing.assert_array_equal(
        unpacked(gates["columns"]["p_sup"]), read.gates.columns["p_sup"][rows].T.astype(np.float32)
    )


def test_wide_layers_keep_the_channels_with_the_largest_update(tmp_path, monkeypatch):
    read = read_run(write_run(tmp_path, width=40))
    monkeypatch.setattr("nalora.report.payload.MOST_CHANNELS", 16)
    layer = payload([read])["runs"][0]["capacity"]["channels"][1]
    norms = read_capacity(read)[0].rows["model.layers.1.mlp.gate_proj"]
    assert layer["width"] == 40
    assert set(layer["numbers"]) == set(np.argsort(-norms)[:16].tolist())
    np.testing.assert_allclose(unpacked(layer["norms"]), norms[layer["numbers"]], rtol=1e-6)


def test_channels_of_a_diagnosis_are_kept(tmp_path):
    read = read_run(write_run(tmp_path, channels=True, width=24))
    layers = payload([read])["runs"][0]["diagnosis"]["channels"]["layers"]
    assert len(layers) == 4
    assert layers[0]["numbers"] == list(range(24))
    assert unpacked(layers[0]["measures"]["flip"]).shape == (24, 3)


def test_damaged_channels_are_a_notice(tmp_path):
    run = write_run(tmp_path, channels=True)
    (run / "diagnosis_channels.safetensors").write_bytes(b"nothing")
    assert "diagnosis_channels.safetensors is damaged" in page([read_run(run)])


def test_no_text_of_a_run_can_inject_elements(tmp_path):
    evil = '</script><script>alert(1)</script><img src=x onerror="alert(1)">{{css}}'
    run = write_run(tmp_path, model=evil, task=evil)
    text = page([read_run(run)])
    seen = Page(text)
    assert not seen.all("img")
    assert len(seen.all("script")) == 4
    assert "{{css}}" in "".join(seen.text)


def test_numbers_that_json_lacks_do_not_break_the_page(tmp_path):
    run = write_run(tmp_path)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "loss": NaN, "seconds": Infinity}\n')
    scores = summary(10) | {"target_loss": {"value": float("nan"), "bootstrap": [float("nan"), float("inf")]}}
    write(next(run.glob("evaluations/**/adapted-*/summary.json")), scores)
    (data,) = embedded_data(page([read_run(run)]))["runs"]
    assert len(unpacked(data["lines"]["loss"]["y"])) == 20, "the row without a finite loss is left out"
    assert data["evaluations"]["gym/chain_sum"]["adapted"]["loss of the answers"]["value"] is None


@pytest.mark.parametrize("lost", ["result.json", "environment.json", "run.yaml", "metrics.jsonl", "gates.jsonl"])
def test_a_page_is_made_without_any_one_file(tmp_path, lost):
    run = write_run(tmp_path)
    (run / lost).unlink()
    text = page([read_run(run)])
    assert embedded_data(text)["runs"][0]["name"] == "run"


@pytest.mark.parametrize("damage", [[], {}, None, "x", [None], {"a": 1}, [[1], 2]])
@pytest.mark.parametrize("key", ["blocks", "steps", "intervals", "histogram", "first_to_last", "channels"])
def test_a_diagnosis_of_any_shape_makes_a_page(tmp_path, key, damage):
    run = write_run(tmp_path)
    diagnosis = json.loads((run / "diagnosis.json").read_text())
    write(run / "diagnosis.json", diagnosis | {key: damage})
    page([read_run(run)])


@pytest.mark.parametrize("damage", [[], {}, None, "x", {"accuracy": 3}, {"accuracy": {"value": "x"}}])
def test_a_summary_of_any_shape_makes_a_page(tmp_path, damage):
    run = write_run(tmp_path)
    file = next(run.glob("evaluations/**/adapted-*/summary.json"))
    write(file, json.loads(file.read_text()) | {"measures": damage})
    page([read_run(run)])


def test_findings_follow_the_paired_tests(tmp_path):
    runs = [write_run(tmp_path, name=name) for name in ("good", "bad", "same")]
    for run, right in zip(runs, (60, 1, 5), strict=True):
        write_evaluation(next(run.glob("evaluations/**/adapted-*")), right)
    said = findings(read_runs(runs))
    accuracy = [sentence for sentence in said if "ccuracy on gym/chain_sum" in sentence]
    assert any(
        sentence.startswith("Accuracy on gym/chain_sum rose from 4 % to 60 % (95 % CI ") for sentence in accuracy
    )
    assert any("5 % (" in sentence and sentence.startswith("No significant change") for sentence in accuracy)
    assert any("good is better than bad, same; no other difference is significant" in sentence for sentence in accuracy)
    assert "one seed" in said[-1]


def test_equal_and_unknown_results_are_reported_as_such(tmp_path):
    runs = [write_run(tmp_path, name=name) for name in ("one", "two")]
    said = findings(read_runs(runs))
    assert "The runs have the same accuracy on gym/chain_sum, question by question." in said
    for run in runs:
        write_evaluation(next(run.glob("evaluations/**/adapted-*")), 4)
    said = findings(read_runs(runs))
    assert said[0].startswith("Accuracy on gym/chain_sum did not change: 4 % (95 % CI 0–14) before, 4 % (95 % CI 0–14)")
    for run in runs:
        for file in run.rglob("scores.jsonl"):
            file.unlink()
    said = findings(read_runs(runs))
    assert said[0].startswith("The answers are not stored, so the significance of the change is not known: accuracy")
    assert any(sentence.startswith("The runs are not compared") for sentence in said)


def test_a_measure_of_own_data_has_a_title_in_sentences_tables_and_axes(tmp_path):
    run = write_run(tmp_path, name="one")
    for name in ("summary.json", "scores.jsonl", "outputs.jsonl"):
        for file in run.glob(f"evaluations/**/{name}"):
            file.write_text(file.read_text().replace('"accuracy"', '"number"'))
    runs = read_runs([run])
    assert findings(runs)[0].startswith("Right number on gym/chain_sum rose from")
    assert "sum: right number, % ↑" in markdown(run_tables(runs)["Results"])
    text = page(runs)
    assert {"right number", "right number, compared with base"} <= set(Page(text).text)
    (shown,) = embedded_data(text)["runs"]
    assert list(shown["evaluations"]["gym/chain_sum"]["adapted"]) == ["right number", "loss of the answers"]


def test_runs_are_compared_by_the_same_questions_and_not_by_their_intervals(tmp_path):
    """52 % and 60 % of 100 questions: the intervals overlap widely, but one run is right wherever the other is."""
    runs = [write_run(tmp_path, name=name) for name in ("one", "two")]
    for run, right in zip(runs, (52, 60), strict=True):
        write_evaluation(next(run.glob("evaluations/**/adapted-*")), right)
    (sentence,) = [text for text in findings(read_runs(runs)) if "accuracy" in text and "Comparison" in text]
    assert "two is better than one" in sentence
    assert sentence.endswith("(one higher on 0 questions, lower on 8; McNemar's exact test, p = 0.0078).")
    text = "".join(Page(page(read_runs(runs))).text)
    assert "accuracy, compared with base" in text
    assert "better: 48 higher, 0 lower, p < 0.0001" in text
    assert "questions compared by McNemar's exact test" in text


def test_a_lower_loss_is_better(tmp_path):
    runs = [write_run(tmp_path, name=name) for name in ("low", "high")]
    for run, right in zip(runs, (90, 20), strict=True):
        write_evaluation(next(run.glob("evaluations/**/adapted-*")), right)
    said = [sentence for sentence in findings(read_runs(runs)) if "loss of the answers" in sentence]
    assert any("low is better than high" in sentence for sentence in said)


def test_settings_with_several_seeds_are_compared_over_them_as_in_the_tables(tmp_path):
    """By their questions alone, 60 and 80 of 100 differ significantly; over these seeds they do not."""
    values = {"lora": (60, 60, 60), "na-lora": (80, 62, 57)}
    runs = []
    for method, shares in values.items():
        for seed, right in enumerate(shares):
            runs.append(write_run(tmp_path, name=f"{method}-{seed}", seed=seed, method=method))
            write_evaluation(next(runs[-1].glob("evaluations/**/adapted-*")), right)
    read = read_runs(runs)
    expected = "No significant difference between the settings over their seeds: accuracy on gym/chain_sum."
    assert expected in findings(read)
    assert not any(cell.mark for cells in run_tables(read)["Results"].rows.values() for cell in cells)
    for seed, right in enumerate((80, 81, 79)):
        write_evaluation(next(runs[3 + seed].glob("evaluations/**/adapted-*")), right)
    read = read_runs(runs)
    assert any("accuracy on gym/chain_sum: na-lora is better than lora" in sentence for sentence in findings(read))
    assert run_tables(read)["Results"].rows["na-lora"][0].mark == "best"


def test_several_seeds_are_not_called_one(tmp_path):
    runs = [write_run(tmp_path, name=f"seed-{seed}", seed=seed) for seed in (0, 1)]
    assert not any("one seed" in sentence for sentence in findings(read_runs(runs)))


def test_the_command_reproduces_the_run(tmp_path):
    run = write_run(tmp_path)
    seen = "".join(Page(page([read_run(run)])).text)
    assert f"nalora train {run}/run.yaml output={run}-again" in seen
    for key in yaml.safe_load((run / "run.yaml").read_text()):
        assert key in seen


def test_the_file_is_written_to_the_given_path(tmp_path):
    read = read_run(write_run(tmp_path))
    path = write_report([read], tmp_path / "deep" / "er" / "report.html")
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    (tmp_path / "taken").write_text("")
    with pytest.raises(NALoRAError, match="another --output"):
        write_report([read], tmp_path / "taken" / "report.html")
    with pytest.raises(NALoRAError, match="no runs"):
        write_report([], tmp_path / "x.html")


def test_without_plotly_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("nalora.report.html.util.find_spec", lambda name: None)
    with pytest.raises(NALoRAError, match=re.escape("pip install 'nalora[report]'")):
        page([read_run(write_run(tmp_path))])
