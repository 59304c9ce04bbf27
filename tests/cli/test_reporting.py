"""`nalora report`: where the page is written, what is printed, and what is refused."""

from __future__ import annotations

from report.run_folders import write_run

from nalora.cli.reporting import default_output


def test_the_path_is_printed(report, tmp_path):
    folder = write_run(tmp_path, name="na")
    code, out, _ = report(str(folder))
    assert code == 0
    assert out.strip() == f"Report: {folder / 'report.html'}"
    assert (folder / "report.html").stat().st_size > 1e6


def test_several_runs_share_a_page_in_their_common_folder(report, tmp_path):
    one, two = write_run(tmp_path, name="one"), write_run(tmp_path, name="two")
    assert report(str(one), str(two))[0] == 0
    text = (tmp_path / "report.html").read_text()
    assert "2 runs" in text


def test_a_folder_of_runs_and_a_place_of_ones_own(report, tmp_path):
    write_run(tmp_path / "study", name="one")
    write_run(tmp_path / "study", name="two")
    code, out, _ = report(str(tmp_path / "study"), "--output", str(tmp_path / "page.html"))
    assert code == 0
    assert str(tmp_path / "page.html") in out
    assert (tmp_path / "page.html").is_file()


def test_notices_are_printed_too(report, tmp_path):
    folder = write_run(tmp_path, name="na")
    (folder / "result.json").unlink()
    code, out, _ = report(str(folder))
    assert code == 0
    assert "na: The run is still running" in out


def test_no_such_run_is_one_line(report, tmp_path):
    code, out, err = report(str(tmp_path / "nowhere"))
    assert (code, out) == (2, "")
    assert err.startswith("nalora: ")
    assert len(err.splitlines()) == 1


def test_open_shows_it_in_the_browser(report, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("nalora.cli.reporting.typer.launch", opened.append)
    folder = write_run(tmp_path, name="na")
    report(str(folder), "--open")
    assert opened == [(folder / "report.html").resolve().as_uri()]


def test_runs_of_different_places_report_here(tmp_path):
    assert str(default_output([tmp_path / "a" / "one", tmp_path / "b" / "two"])) == "report.html"


def test_a_file_of_nalora_s_that_is_no_report_stays(report, tmp_path):
    folder = write_run(tmp_path, name="run")
    before = (folder / "run.yaml").read_bytes()
    code, _, err = report(folder, "--output", folder / "run.yaml")
    assert code == 2
    assert "a file that is not a report written by nalora" in err
    assert (folder / "run.yaml").read_bytes() == before
