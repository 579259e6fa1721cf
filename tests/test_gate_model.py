"""The protocol of the gate, as a model: no overlap in thousands of schedules, and every broken rule is caught."""

import pytest

from gate_model import BROKEN, run
from support.counts import count

# The rarest of the broken rules shows in 17 schedules of 1,000, so this many catch each of them surely. The first to
# show an overlap ends the search: number 114 at the latest, with these seeds.
SCHEDULES_MAX = 2000


@pytest.mark.timeout(600)
def test_the_protocol_lets_no_two_gates_act_at_a_time() -> None:
    schedules = count(60, 4000)
    outcomes = [run(seed) for seed in range(schedules)]
    assert [seed for seed, outcome in enumerate(outcomes) if outcome.overlaps] == []
    assert sum(outcome.actions for outcome in outcomes) > 500 * schedules, "hardly anybody acted: this shows nothing"
    assert sum(outcome.terms for outcome in outcomes) > 10 * schedules, "hardly anybody was replaced: nor does this"


@pytest.mark.parametrize("rule", BROKEN)
def test_every_broken_rule_is_caught(rule: str) -> None:
    assert any(run(seed, rule).overlaps for seed in range(SCHEDULES_MAX))
