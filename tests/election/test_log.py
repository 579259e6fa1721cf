"""The log of an election: each transition is one line that says role, scope key, holder, epoch and reason."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from pgleaderlock import LeaderElection, LeaderGate, LeaderToken, key_pair
from pgleaderlock._base.logging import get_logger
from pgleaderlock._election.roster import TransitionLog
from support.elections import HASTY, PATIENT, Story, ledger_dsns, one, opens, until
from support.fakes import FakeClock, captured_log
from support.server_side import terminate

TRANSITIONS = ("leadership_acquired", "leadership_lost", "leadership_released", "gate_opened", "gate_closed")


@pytest.fixture
def ledger(dsn: str) -> str:
    return ledger_dsns(dsn)["superuser"]


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    with captured_log() as found:
        yield found


def transitions(records: list[logging.LogRecord]) -> list[dict[str, Any]]:
    return [vars(record) for record in records if vars(record).get("event") in TRANSITIONS]


def told(records: list[logging.LogRecord]) -> list[tuple[str, int, str]]:
    return [(line["event"], line["epoch"], line["reason"]) for line in transitions(records)]


def beat_of(dsn: str, holder: str | None) -> int:
    beat: int = one(dsn, "SELECT beat FROM pgleaderlock.sessions WHERE holder_identity = %s", holder)["beat"]
    return beat


def shut_by_its_deadline(election: LeaderElection, role: str) -> None:
    """As if no heartbeat had been acknowledged for G; the next one opens the gate again."""
    gate = election.gate(role)
    with gate._lock:
        gate._term = gate._term._replace(deadline=gate._now())
        gate._publish()


@pytest.mark.parametrize("heartbeat_thread", [False, True])
async def test_a_term_and_its_gate_are_logged_once_from_beginning_to_end_and_nothing_at_each_tick(
    ledger: str, role: str, records: list[logging.LogRecord], heartbeat_thread: bool
) -> None:
    election = LeaderElection(ledger, role, **PATIENT, heartbeat_thread=heartbeat_thread)
    async with election:
        await opens(election, role)
        holder = election.gate(role).holder_identity
        await until(lambda: "gate_opened" in [event for event, _, _ in told(records)])
        beats = beat_of(ledger, holder)
        before = len(records)
        await until(lambda: beat_of(ledger, holder) > beats + 3)
        assert len(records) == before, "a tick is no transition"
        scope_key = one(ledger, "SELECT scope_key FROM pgleaderlock.leader_state WHERE role = %s", role)["scope_key"]
    lines = transitions(records)
    assert {(line["role"], line["scope_key"], line["holder_identity"]) for line in lines} == {(role, scope_key, holder)}
    acquired, opened, *ended = told(records)
    assert (acquired, opened) == (("leadership_acquired", 1, "free"), ("gate_opened", 1, "term_began"))
    assert ("leadership_released", 1, "released") in ended
    assert [(event, epoch) for event, epoch, _ in ended if event == "gate_closed"] == [("gate_closed", 1)]
    assert len(ended) == 2


async def test_a_loss_is_logged_with_its_reason_and_the_next_term_with_its_own_epoch(
    ledger: str, role: str, records: list[logging.LogRecord]
) -> None:
    election = LeaderElection(ledger, role, **HASTY)
    story = Story(election)
    async with election:
        await opens(election, role)
        await until(lambda: len(told(records)) == 2)
        terminate(ledger, key_pair(role))
        await story.heard("on_acquired", role, times=2)
        await opens(election, role)
        await until(lambda: told(records)[-1][0] == "gate_opened")
        assert sorted(told(records)[2:4]) == [("gate_closed", 1, "lost"), ("leadership_lost", 1, "lost")]
        assert told(records)[4:] == [("leadership_acquired", 2, "free"), ("gate_opened", 2, "term_began")]
    levels = {line["levelname"] for line in transitions(records) if line["reason"] == "lost"}
    assert levels == {"WARNING"}


async def test_a_gate_that_shuts_by_itself_and_opens_again_is_logged_both_times(
    ledger: str, role: str, records: list[logging.LogRecord]
) -> None:
    election = LeaderElection(ledger, role, **PATIENT)
    async with election:
        await opens(election, role)
        for times in (1, 2):
            await until(lambda times=times: len(told(records)) == 2 * times)  # type: ignore[misc]
            shut_by_its_deadline(election, role)
        await until(lambda: len(told(records)) == 6)
        assert told(records)[2:] == [
            ("gate_closed", 1, "late_heartbeat"),
            ("gate_opened", 1, "heartbeat_resumed"),
        ] * 2  # fmt: skip


def test_a_gate_that_was_shut_between_two_looks_is_logged_all_the_same(records: list[logging.LogRecord]) -> None:
    """A blocked loop, or a statement that takes long: the heartbeat comes after the deadline, and nobody has looked."""
    clock = FakeClock()
    gate = LeaderGate("billing", clock=clock)
    transitions_of = TransitionLog(get_logger("pgleaderlock"), lambda: {"billing": (7, -11)})
    transitions_of.begin(get_logger("pgleaderlock"), "node-1")
    gate.open(LeaderToken("billing", 5, "node-1"), clock.now(), clock.now() + 10)
    transitions_of.look_at(gate)
    for late_s, looks in ((9, 1), (11, 3)):
        clock.advance(late_s)
        gate.renew(clock.now() + 10)
        transitions_of.look_at(gate)
        assert len(told(records)) == looks
    gate.close("lost")
    gate.open(LeaderToken("billing", 6, "node-1"), clock.now(), clock.now() + 10)
    transitions_of.look_at(gate)
    assert told(records)[1:] == [
        ("gate_closed", 5, "late_heartbeat"),
        ("gate_opened", 5, "heartbeat_resumed"),
        ("gate_closed", 5, "lost"),
        ("gate_opened", 6, "term_began"),
    ]
    assert {line["scope_key"] for line in transitions(records)} == {7 * 2**32 + 2**32 - 11}


async def test_a_veto_and_its_end_are_logged(ledger: str, role: str, records: list[logging.LogRecord]) -> None:
    election = LeaderElection(ledger, role, **PATIENT)
    async with election:
        await opens(election, role)
        await until(lambda: len(told(records)) == 2)
        token = election.gate(role).require_leader()
        election.gate(role).disable()
        await until(lambda: len(told(records)) == 3)
        election.gate(role).enable(token)
        await until(lambda: len(told(records)) == 4)
        assert told(records)[2:] == [("gate_closed", 1, "vetoed"), ("gate_opened", 1, "veto_lifted")]


async def test_a_role_that_is_removed_leaves_no_gate_open_in_the_log(
    ledger: str, role: str, records: list[logging.LogRecord]
) -> None:
    election = LeaderElection(ledger, [role, f"{role}-stays"], **PATIENT)
    async with election:
        await opens(election, role)
        await until(lambda: ("gate_opened", 1, "term_began") in told(records))
        await election.remove_role(role)
        events = [line["event"] for line in transitions(records) if line["role"] == role]
        assert sorted(events) == ["gate_closed", "gate_opened", "leadership_acquired", "leadership_released"]
        assert None not in {line["scope_key"] for line in transitions(records)}


async def test_a_process_that_lives_under_the_same_name_is_warned_of_and_an_earlier_run_is_not(
    ledger: str, role: str, records: list[logging.LogRecord]
) -> None:
    name, space = f"node-{role}", f"space-{role}"
    registered = (
        "INSERT INTO pgleaderlock.sessions (namespace, instance, node_id, host, os_pid, holder_identity, backend_pid,"
        " backend_start, database_role, gate_s, lease_s, candidate, library_version, last_heartbeat)"
        " VALUES (%s, gen_random_uuid(), %s, %s, 7, 'x', 1, now(), 'x', 5, 600, true, '1',"
        " now() + make_interval(secs => %s)) RETURNING session_id"
    )
    one(ledger, registered, space, name, "crashed", 0)
    one(ledger, registered, space, f"{name}-2", "elsewhere", 600)
    one(ledger, registered, space, name, "alive", 600)  # as if it was heard again and again
    options = {**HASTY, "node_id": name, "namespace": space}
    # Two elections of one process share its name on purpose.
    async with LeaderElection(ledger, role, **options), LeaderElection(ledger, f"{role}-2", **options):
        await until(lambda: len(warned(records)) == 2)
    assert [line["others"] for line in warned(records)] == ["alive/7", "alive/7"]


def warned(records: list[logging.LogRecord]) -> list[dict[str, Any]]:
    return [vars(record) for record in records if vars(record).get("event") == "node_id_shared"]
