"""Names of nalora's in a run's folder that lead out of it."""

from __future__ import annotations

import pytest

import nalora
from nalora.runs import contents, marker
from nalora.runs.folder import RunFolder
from nalora.training.run import _read_result


@pytest.mark.parametrize("name", ["adapter/adapter_config.json", "adapter/deeper/README.md", "model/x", "start/x"])
def test_a_link_inside_a_folder_that_is_written_whole_is_refused(tmp_path, name):
    theirs = tmp_path / "theirs"
    theirs.write_text("mine")
    run = tmp_path / "run"
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(theirs)
    with pytest.raises(nalora.NALoRAError, match="a symbolic link"):
        contents.refuse_wrong_types(run)
    (run / name).unlink()
    contents.refuse_wrong_types(run)


@pytest.mark.parametrize("content", [b"", b"[]", b"5", b"\xff", b'{"seconds": 1}'])
def test_a_damaged_result_is_one_sentence(tmp_path, content):
    folder = RunFolder(tmp_path)
    folder.result.write_bytes(content)
    with pytest.raises(nalora.NALoRAError, match="a damaged file.*--resume"):
        _read_result(folder)


@pytest.mark.parametrize("kind", ["[]", "{}", "5", "null", '"demonstration"'])
def test_a_forged_marker_marks_nothing(tmp_path, kind):
    (tmp_path / marker.MARKER).write_text(f'{{"nalora": "x", "format": 1, "kind": {kind}}}')
    assert marker.read(tmp_path) is None
