"""Roles of one session that are in different states: some settled long ago, some still waiting, some won again.

A node beats once for all its roles, but each role is settled by itself: a successor waits for what that role's leader
had still to wait for. And a term counts from its own bump, however often its session has won the role before.
"""

import uuid
from pathlib import Path

import pytest

from conftest import StartServer
from pgleaderlock import LeaderElection, LockState
from pgleaderlock._base.clock import BOOT_CLOCK
from pgleaderlock.migrate import migrate
from support.counts import count
from support.election_node import SendLog
from support.election_storm import LAZY, MIDDLE, QUICK, SETTLING_KINDS, Storm
from support.elections import PATIENT, ledger_dsns, one, until
from support.fencing import take_out
from support.ledger_node import ledger_node

LONG_S, SHORT_S = 600.0, 6.0


@pytest.fixture
def ledger(dsn: str) -> str:
    return ledger_dsns(dsn)["superuser"]


@pytest.fixture
def other_role() -> str:
    return f"role-{uuid.uuid4()}"


@pytest.fixture
def log(tmp_path: Path) -> SendLog:
    return SendLog(tmp_path / "sends")


# --- By hand, with a T that no test waits for


@pytest.mark.parametrize(
    "heartbeat", ["heartbeat(%s, %s, NULL)", "tick(%s, %s, NULL)", "beat(%s, %s)"], ids=["heartbeat", "tick", "beat"]
)
def test_a_beat_settles_only_the_roles_that_it_names(ledger: str, role: str, other_role: str, heartbeat: str) -> None:
    def wait_t(name: str) -> float:
        return float(one(ledger, "SELECT wait_t FROM pgleaderlock.leaders WHERE role = %s", name)["wait_t"])

    with ledger_node(ledger, lease_s=SHORT_S, gate_s=1) as successor:
        with ledger_node(ledger, lease_s=LONG_S) as first:
            first.lead(role)
            first.lead(other_role)
        for name in (role, other_role):
            successor.wait_for_lock(name)
            successor.bump(name)
        assert (wait_t(role), wait_t(other_role)) == (LONG_S, LONG_S)
        successor.ask(f"SELECT * FROM pgleaderlock.{heartbeat}", successor.session_id, [other_role])
        assert (wait_t(role), wait_t(other_role)) == (LONG_S, SHORT_S)


async def test_a_role_that_its_leader_still_waited_for_is_waited_for_in_full_though_another_was_settled(
    ledger: str, role: str, other_role: str
) -> None:
    with ledger_node(ledger, lease_s=SHORT_S, gate_s=1) as between:
        with ledger_node(ledger, lease_s=LONG_S) as first:
            first.lead(role)
        between.wait_for_lock(role)
        between.bump(role)
        between.lead(other_role)
        last_beat_at = BOOT_CLOCK.now()
        between.tick(other_role)
    async with LeaderElection(ledger, [role, other_role], **PATIENT) as successor:
        await until(lambda: {successor.state(role), successor.state(other_role)} == {LockState.LEADER})
        assert successor.gate(role).opens_at >= last_beat_at + LONG_S
        assert successor.gate(other_role).opens_at <= BOOT_CLOCK.now() + SHORT_S


def test_a_role_won_again_on_the_same_session_is_seen_as_a_new_beat(ledger: str, role: str) -> None:
    with ledger_node(ledger) as node:
        epoch = node.lead(role)
        beat = "SELECT beat FROM pgleaderlock.sessions WHERE session_id = %s"
        seen = one(ledger, beat, node.session_id)["beat"]
        assert node.end_term(role, epoch, clean=True)
        assert node.bump(role)["outcome"] == "won"
        assert one(ledger, beat, node.session_id)["beat"] > seen


async def test_a_successor_counts_from_the_latest_term_of_a_session_that_it_saw_lead_before(
    ledger: str, role: str
) -> None:
    with ledger_node(ledger, lease_s=LONG_S) as first:
        epoch = first.lead(role)
        async with LeaderElection(ledger, role, **PATIENT) as successor:
            await until(lambda: successor._roster.roles[role].sight is not None, "the first term was seen")
            won_again_at = BOOT_CLOCK.now()
            assert first.end_term(role, epoch, clean=True)
            assert first.bump(role)["outcome"] == "won"
            first.conn.close()
            await until(lambda: successor.state(role) is LockState.LEADER)
            assert successor.gate(role).opens_at >= won_again_at + LONG_S


# --- Under faults

ROLES = ("mail", "bills", "news", "stock", "audit", "mirror")
NODES = {"quick": QUICK, "middle": MIDDLE, "lazy": LAZY}
SEVERAL_STEPS = ("relay", "win_back")


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_nobody_acts_after_a_newer_epoch_with_roles_of_different_settling_on_one_session(
    throwaway_postgres: StartServer, log: SendLog
) -> None:
    kinds = SETTLING_KINDS if (total := count(5, 200)) > len(SETTLING_KINDS) else SETTLING_KINDS[:total]
    storm = Storm(throwaway_postgres(), log, NODES, ROLES)
    async with storm.running():
        await storm.faults(kinds, total)
        await storm.calm()
        await reach(storm, at_least=count(1, 10))
        await storm.judge()
        # Against an empty proof.
        sends_per_second, changes = storm.figures()
        assert sends_per_second > 50, storm.about
        assert changes >= sum(storm.fired.values()) / 3, storm.about
        assert set(storm.fired) == set(kinds), storm.about
        assert {send.node for send in log.read()} == set(NODES), storm.about


async def reach(storm: Storm, at_least: int) -> None:
    """Repeat the faults of several steps until each has come to its end so often."""
    for _ in range(10 * at_least):
        missing = [kind for kind in SEVERAL_STEPS if storm.reached[kind] < at_least]
        if missing:
            await in_turn(storm, "scatter", *missing)
    assert min(storm.reached[kind] for kind in SEVERAL_STEPS) >= at_least, f"{storm.reached} ({storm.about})"


async def in_turn(storm: Storm, *kinds: str) -> None:
    for kind in kinds:
        await storm.fault(kind)
        await storm.calm()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("function", "taken_out", "fault"),
    [("heartbeat", "AND l.role = ANY (p_settled)", "relay"), ("bump_unleased", "beat = s.beat + 1, ", "win_back")],
    ids=["a beat that settles all roles of its session", "a bump that is no beat"],
)
async def test_the_same_faults_catch(
    throwaway_postgres: StartServer, log: SendLog, function: str, taken_out: str, fault: str
) -> None:
    server = throwaway_postgres()
    await migrate(server.dsn)
    take_out(server.dsn, function, taken_out)
    storm = Storm(server, log, NODES, ROLES)
    async with storm.running():
        for _ in range(15):
            await in_turn(storm, "scatter", fault)
            if log.violations():
                storm.figures()
                return
        pytest.fail(f"nobody was seen to act twice: the judge is blind ({storm.about})")
