"""The protocol of leases, as a model: no violation in thousands of schedules, and the broken rules are caught."""

from typing import Any

import pytest

from support.counts import count, proof_asked
from support.lease_model import BROKEN, Node, Schedule, Sent, Under, run

# These show in one schedule of hundreds or thousands, so they are searched for at proof counts only. The first schedule
# with a violation ends a search.
RARE = ("blind_take", "lock_late", "own_session", "grant_no_beat")
RULES = [rule for rule in BROKEN if proof_asked() or rule not in RARE]
SCHEDULES_MAX = 4000


@pytest.mark.timeout(3600 if proof_asked() else 600)
def test_no_two_gates_act_at_a_time_no_epoch_is_issued_twice_and_no_role_is_stuck() -> None:
    schedules = count(30, 4000)
    outcomes = [run(seed) for seed in range(schedules)]
    assert [seed for seed, outcome in enumerate(outcomes) if outcome.violated] == []
    assert sum(outcome.actions for outcome in outcomes) > 1000 * schedules, "hardly anybody acted: this shows nothing"
    assert sum(outcome.terms for outcome in outcomes) > 8 * schedules, "hardly anybody was replaced: nor does this"
    assert sum(outcome.evictions for outcome in outcomes) > schedules, "hardly any lease was ended by others: nor this"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rule", RULES)
def test_every_broken_rule_is_caught(rule: str) -> None:
    assert any(run(seed, rule).violated for seed in range(SCHEDULES_MAX))


def test_a_late_heartbeat_that_settles_a_later_term_is_caught_by_its_number() -> None:
    """`no_seq` needs a schedule of eight messages in one order, which is written here: chance finds it hardly ever."""
    assert _third_opens_after_second_shuts("protocol")
    assert not _third_opens_after_second_shuts("no_seq")


def _third_opens_after_second_shuts(rule: str) -> bool:
    schedule = Schedule(0, rule)
    quick, slow = (2.0, 3.0, 1.0), (12.0, 13.5, 6.0)
    first, second, third = (
        Node(number, "lease", 1.0, 0.0, settings) for number, settings in enumerate([quick, slow, quick])
    )
    db = schedule.db

    def message(t: float, node: Node, statement: Any, *args: Any) -> Sent:
        node.numbered += 1
        return Sent(node, node.instance, node.session, 0, t, node.numbered, statement, args)

    def arrives(t: float, sent: Sent) -> None:
        answer = sent.statement(t, sent, *sent.args)
        if isinstance(answer, Under):
            answer = answer.commit(t, *answer.args)
        if answer is not None:
            heard, args = answer
            heard(t, sent.node, sent.sent, *args)

    def takes(t: float, node: Node, *silent: Node) -> None:
        evicted = [(other.session, db.sessions[other.session or 0].beat) for other in silent]
        arrives(t, message(t, node, schedule.db_take, evicted, ["mail"]))

    for node in (first, second, third):
        arrives(0.0, message(0.0, node, schedule.db_open, (node.instance, 1), None))
    takes(1.0, first)
    held_up = message(1.5, first, schedule.db_beat, ["mail"])
    arrives(2.0, message(2.0, first, schedule.db_release, [("mail", 1, True)]))
    takes(3.0, second)  # acts until 15, and hears nothing any more
    for node in (first, third):
        schedule.saw(3.5, node, 3.5, schedule.looks(3.5))
    takes(4.0, first, second)
    arrives(4.5, held_up)
    schedule.saw(5.0, third, 5.0, schedule.looks(5.0))
    takes(5.5, third, first)
    return third.terms["mail"].opens_at >= second.terms["mail"].deadline
