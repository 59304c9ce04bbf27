"""Rules are judged from a file written before, on cases that they were not fitted on."""

from __future__ import annotations

import json

import pytest
from curves import GRID, case

import nalora
from nalora.studies.rate_rules import FAMILIES, GATES, Rule
from nalora.studies.rate_verdicts import Criterion, Frozen, Judged, Verdict, freeze, judge, thaw

FITTED = [case(f"fitted {place}", GRID[place], moving=["flip"]) for place in (2, 5, 7)]
UNSEEN = [case(f"unseen {place}", GRID[place], moving=["flip"]) for place in (0, 3, 6, 8, 9)]


def test_the_rules_of_a_file_are_the_fitted_ones(tmp_path):
    file = tmp_path / "rate-search" / "rules.json"
    frozen = freeze(FITTED, file)
    assert thaw(file) == frozen
    assert set(frozen.rules) == set(FAMILIES)
    assert frozen.fitted_on == {"fitted 2", "fitted 5", "fitted 7"}
    stored = json.loads(file.read_text())
    assert stored["rules"][GATES]["mean_regret_when_fitted"] == 0
    assert stored["rules"]["same rate"]["mean_regret_when_fitted"] > 0


def test_fitted_rules_are_never_replaced(tmp_path):
    file = tmp_path / "rules.json"
    freeze(FITTED, file)
    before = file.read_bytes()
    with pytest.raises(nalora.NALoRAError, match="rules that were fitted before"):
        freeze(UNSEEN, file)
    assert file.read_bytes() == before


def test_the_judged_rule_is_the_one_in_the_file(tmp_path):
    """A number that was changed in the file changes the picks: nothing is fitted again."""
    file = tmp_path / "rules.json"
    first = freeze(FITTED, file)
    assert [pick.rate for pick in judge(first, UNSEEN).judged[GATES]] == [GRID[place] for place in (0, 3, 6, 8, 9)]
    content = json.loads(file.read_text())
    content["rules"][GATES]["number"] *= 2
    file.write_text(json.dumps(content))
    second = thaw(file)
    assert second.digest != first.digest
    assert [pick.rate for pick in judge(second, UNSEEN[1:3]).judged[GATES]] == [GRID[5], GRID[8]]


def test_there_is_no_judgement_before_the_fit(tmp_path):
    with pytest.raises(nalora.NALoRAError, match="fit the rules first"):
        thaw(tmp_path / "rules.json")


def test_a_case_of_the_fit_cannot_be_judged(tmp_path):
    frozen = freeze(FITTED, tmp_path / "rules.json")
    with pytest.raises(nalora.NALoRAError, match=r"1 case that they were fitted on \(fitted 5\)"):
        judge(frozen, [*UNSEEN, FITTED[1]])
    with pytest.raises(nalora.NALoRAError, match="no case"):
        judge(frozen, [])


def test_the_rule_on_trial_succeeds_where_it_follows_the_best_rate(tmp_path):
    verdict = judge(freeze(FITTED, tmp_path / "rules.json"), UNSEEN)
    assert verdict.within(GATES) == len(UNSEEN)
    assert verdict.mean_regret(GATES) == 0
    # The early loss and the range test find the best rate of these cases too: the gates' rule is not closer.
    assert verdict.mean_regret("training loss") == 0
    assert not verdict.succeeds(GATES)
    without = [case(one.name, min(one.losses, key=one.losses.get), moving=["flip"], shift=3) for one in UNSEEN]
    frozen = freeze(FITTED, tmp_path / "again.json")
    assert judge(frozen, without).succeeds(GATES)


def picks(regrets, cost=0.1):
    return [Judged(f"case {index}", 1e-3, 1e-3, regret, cost) for index, regret in enumerate(regrets)]


RIVAL = picks([0.01] * 10)


@pytest.mark.parametrize(
    ("gates", "rival", "succeeds"),
    [
        (picks([0.003] * 8 + [0.004] * 2), RIVAL, True),
        (picks([0.003] * 7 + [0.004] * 3), RIVAL, False),
        (picks([0.0] * 8 + [0.1] * 2), RIVAL, False),
        (picks([0.003] * 10), picks([0.003] * 10), False),
        (picks([0.0] * 10, cost=0.16), RIVAL, False),
        ([*picks([0.0] * 9), Judged("dear", 1e-3, 1e-3, 0.0, 0.151)], RIVAL, False),
        (picks([0.003] * 10, cost=0.15), RIVAL, True),
    ],
    ids=["8 of 10", "7 of 10", "mean not lower", "equal to a rival", "too expensive", "one too expensive", "limits"],
)
def test_success_is_close_in_eight_of_ten_cheap_and_closer_than_every_rival(gates, rival, succeeds):
    assert Verdict({GATES: gates, "rival": rival}, Criterion()).succeeds(GATES) is succeeds


def test_a_verdict_has_the_best_rate_and_the_cost_of_every_pick():
    frozen = Frozen({"same rate": Rule("same rate", "fixed", 0, 1, GRID[4])}, frozenset(), "")
    (pick,) = judge(frozen, [case("one", GRID[6])]).judged["same rate"]
    assert pick == Judged("one", GRID[4], GRID[6], pytest.approx(0.01), 0.0)
