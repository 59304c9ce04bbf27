"""Values of YAML become what their settings mean."""

from __future__ import annotations

from typing import Literal

from nalora.runs.conversion import Removed, converted, key_values, without_removed


def test_off_is_a_name_where_there_is_such_a_choice():
    """YAML reads it as false."""
    problems: list[str] = []
    assert converted("kernels", False, Literal["auto", "off"], problems) == "off"
    assert not problems
    assert converted("space", False, Literal["gradient"], problems) is False
    assert len(problems) == 1


def test_an_empty_value_removes_a_setting():
    words = key_values(["rank=4", "alpha="])
    assert words == {"rank": 4, "alpha": Removed}
    assert without_removed(words) == {"rank": 4}
