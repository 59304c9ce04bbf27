"""Settings of earlier versions: read under their present names, and with the keys of stored runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nalora import NALoRAConfig
from nalora.runs import old_names

OVERLONG = st.sampled_from(["drop", "truncate"])


@pytest.mark.parametrize(
    ("options", "present"),
    [
        ({"too_long": "cut"}, {"overlong": "truncate"}),
        ({"too_long": "drop"}, {"overlong": "drop"}),
        ({"overlong": "cut"}, {"overlong": "truncate"}),
        ({"too_long": "cut", "overlong": "drop"}, {"overlong": "drop"}),
        ({"kernels": "fused-activation", "diagnose_every": 5, "probe_size": 8}, {"kernels": "fused"}),
        ({"rank": 4}, {"rank": 4}),
    ],
)
def test_old_settings_are_read_under_their_present_names(options, present):
    before = dict(options)
    assert old_names.current(options) == present
    assert options == before


@given(OVERLONG, st.integers())
def test_keys_are_made_from_the_old_names(overlong, rank):
    options = {"overlong": overlong, "rank": rank}
    old = old_names.as_in_keys(options)
    assert old == {"too_long": {"drop": "drop", "truncate": "cut"}[overlong], "rank": rank}
    assert old_names.renamed(old) == options


def test_two_names_of_one_setting_are_a_problem():
    assert old_names.problems({"too_long": "cut"}) == []
    assert old_names.problems({"too_long": "cut", "overlong": "drop"}) == [
        "too_long and overlong: two names of one setting"
    ]


def test_deleted_settings_stay_in_the_key_where_they_were():
    assert old_names.in_key({"probe_size": 64}) == {}
    assert old_names.in_key({"probe_size": 8, "kernels": "fused-activation"}) == {
        "probe_size": 8, "kernels": "fused-activation",
    }  # fmt: skip


def test_settings_that_did_not_exist_are_completed_for_na_lora_only():
    assert old_names.completed({"rank": 4}) == {"rank": 4}
    completed = old_names.completed({"keep_ratio": 0.5})
    assert completed == {**NALoRAConfig().to_dict(), "keep_ratio": 0.5}
