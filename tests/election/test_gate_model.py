"""The protocol of the gate, as a model: no violation in thousands of schedules, and every broken rule is caught."""

import pytest

from support.counts import count
from support.gate_model import BROKEN, run

# The rarest of the broken rules shows in about one schedule of 100, so this many catch each of them surely. The first
# to show a violation ends the search.
SCHEDULES_MAX = 2000


@pytest.mark.timeout(600)
def test_the_protocol_lets_no_two_gates_act_at_a_time() -> None:
    schedules = count(60, 4000)
    outcomes = [run(seed) for seed in range(schedules)]
    assert [seed for seed, outcome in enumerate(outcomes) if outcome.violated] == []
    assert sum(outcome.actions for outcome in outcomes) > 500 * schedules, "hardly anybody acted: this shows nothing"
    assert sum(outcome.terms for outcome in outcomes) > 20 * schedules, "hardly anybody was replaced: nor does this"


@pytest.mark.parametrize("rule", BROKEN)
def test_every_broken_rule_is_caught(rule: str) -> None:
    assert any(run(seed, rule).violated for seed in range(SCHEDULES_MAX))
