"""An election across `fork()`, as gunicorn with `--preload` and multiprocessing use it.

The child is forked from the test process.
"""

import asyncio
import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pgleaderlock import LeaderElection, LockState, NotLeader
from support.background import Background, background
from support.elections import PATIENT, WAIT_S, admin, ledger_dsns, opens, until
from support.forked import Child, forked, in_child

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


@pytest.fixture
def ledger(dsn: str) -> str:
    return ledger_dsns(dsn)["superuser"]


@pytest.fixture
def parent() -> Iterator[Background]:
    with background() as loop:
        yield loop


def reason(election: LeaderElection, role: str) -> str:
    try:
        election.gate(role).require_leader()
    except NotLeader as refused:
        return refused.reason
    return "open"


def sessions(dsn: str, election: LeaderElection) -> set[int]:
    """The backends of an election: its session, and its listener's."""
    query = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s"
    with admin(dsn) as conn:
        return {row["pid"] for row in conn.execute(query, (f"%{election.node_id}%",))}


@pytest.mark.parametrize("heartbeat_thread", [False, True])
def test_an_election_made_before_a_fork_and_started_in_the_child_leads_there_through_the_same_gates(
    ledger: str, role: str, heartbeat_thread: bool
) -> None:
    election = LeaderElection(ledger, role, **PATIENT, heartbeat_thread=heartbeat_thread)
    asyncio.run(election.add_role(f"{role}-added"))
    gates = [election.gate(name) for name in election.roles]

    async def lead(child: Child) -> None:
        child.say([reason(election, name) for name in election.roles])
        async with election:
            for gate in gates:
                await gate.wait_open(WAIT_S)
            child.say([gate.is_leader for gate in gates])

    with forked(lead) as child:
        assert child.hears() == ["forked", "forked"]
        assert child.hears() == [True, True]
    assert [reason(election, name) for name in election.roles] == ["never_led", "never_led"]


def test_a_child_has_a_name_of_its_own_and_its_parent_keeps_the_first(ledger: str, role: str) -> None:
    election = LeaderElection(ledger, role, **PATIENT)
    name = election.node_id

    async def lead(child: Child) -> None:
        async with election:
            await opens(election, role)
            child.say([election.node_id, election.gate(role).holder_identity])
            await child.released()

    with forked(lead) as child:
        childs_name, identity = child.hears()
        assert childs_name != name
        assert identity.startswith(f"{childs_name}-")
        with forked(lead_nowhere) as second:
            assert second.hears() not in (name, childs_name)
    assert election.node_id == name


async def lead_nowhere(child: Child) -> None:
    child.say(LeaderElection("host=h", "r").node_id)
    await child.released()


@pytest.mark.parametrize("heartbeat_thread", [False, True])
def test_a_running_election_is_shut_in_the_child_until_it_is_started_there_and_its_parent_leads_on(
    ledger: str, role: str, parent: Background, heartbeat_thread: bool
) -> None:
    election = LeaderElection(ledger, role, **PATIENT, heartbeat_thread=heartbeat_thread, node_id=f"node-{role}")
    gate = election.gate(role)

    async def compete(child: Child) -> None:
        await election.shutdown()
        child.say([reason(election, role), election.state(role).value])
        async with election:
            gc.collect()  # what is left of the parent's run must not be cleaned up here
            await until(lambda: election.leader(role) is not None)
            child.say([reason(election, role), election.state(role).value])
            await opens(election, role)
            child.say([gate.current_epoch, gate.holder_identity])
            await child.released()

    with parent.within(election):
        parent.do(opens(election, role))
        parent.do(until(lambda: len(sessions(ledger, election)) == 2))
        token, backends = gate.require_leader(), sessions(ledger, election)
        with forked(compete) as child:
            assert child.hears() == ["forked", LockState.STOPPED.value]
            assert child.hears() == ["never_led", LockState.FOLLOWER.value]
            assert gate.require_leader() == token
            assert backends <= sessions(ledger, election)
            parent.do(election.drain(role))
            epoch, holder = child.hears()
            assert epoch == token.epoch + 1
            assert holder != token.holder_identity
            assert reason(election, role) == "released"


@pytest.mark.parametrize("heartbeat_thread", [False, True])
async def test_a_child_that_was_forked_inside_the_running_loop_starts_the_election_on_a_loop_of_its_own(
    ledger: str, role: str, heartbeat_thread: bool
) -> None:
    election = LeaderElection(ledger, role, **PATIENT, heartbeat_thread=heartbeat_thread)

    async def compete(child: Child) -> None:
        child.say(reason(election, role))
        async with election:
            await until(lambda: election.leader(role) is not None)
            child.say(reason(election, role))

    async with election:
        await opens(election, role)
        token = election.gate(role).require_leader()
        with forked(compete) as child:
            assert await asyncio.to_thread(child.hears) == "forked"
            assert await asyncio.to_thread(child.hears) == "never_led"
        assert election.gate(role).require_leader() == token


async def test_a_child_has_no_copy_of_the_socket_through_which_its_parent_leads(
    ledger: str, role: str, hold: str
) -> None:
    """Else what it sends, or the end of its copy, could reach the server; and the server would not notice a death."""

    def copies() -> str:
        found = 0
        for number in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # of the listing itself
                found += os.path.samestat(os.fstat(int(number.name)), parents)
        return str(found)

    async with LeaderElection(ledger, role, **PATIENT) as election:
        await opens(election, role)
        assert election._run.engine is not None
        session: Any = election._run.engine._board.open_ledger().session
        parents = os.fstat(session._connection.fileno())
        assert copies() != "0"
        assert in_child(copies) == "0"
        assert election.gate(role).is_leader
