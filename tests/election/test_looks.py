"""What a standby sees of a thousand roles is put together from little, and what has not changed is not made anew.

So each claim here is about what *has* changed, and must be seen all the same.
"""

import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from pgleaderlock import LeaderElection, key_pair
from pgleaderlock._election.ledger import Ledger, Look
from pgleaderlock._election.role import Sight
from pgleaderlock._pg.session import DedicatedSession
from support.elections import STEADY, admin, bounded, ledger_dsns, opens, reading, until
from support.server_side import holders


@pytest.fixture
def roles() -> list[str]:
    name = uuid.uuid4().hex[:12]
    return [f"look-{name}-a", f"look-{name}-b"]


async def opened(node_dsn: str, role: str) -> Ledger:
    """A ledger as an election opens it, without the election."""
    setup = LeaderElection(node_dsn, role, **STEADY)._setup
    session = await DedicatedSession.open(node_dsn, setup.connection())
    ledger = Ledger(session, setup.identity(str(uuid.uuid4())), "pgleaderlock")
    await ledger.open(gate_s=5, lease_s=6, candidate=True)
    return ledger


@pytest.fixture
def locked(node_dsn: str, roles: list[str]) -> Iterator[None]:
    """Somebody who has nothing to do with the ledger holds the locks of these roles."""
    with psycopg.connect(node_dsn, autocommit=True) as conn:
        for role in roles:
            conn.execute("SELECT pg_advisory_lock(%s, %s)", key_pair(role))
        yield


async def test_a_role_that_comes_back_with_another_key_is_tried_by_that_key(
    node_dsn: str, roles: list[str], locked: None
) -> None:
    async with LeaderElection(node_dsn, roles, **STEADY) as election:
        await until(lambda: election._roster.roles[roles[1]].look is not None)
        await election.remove_role(roles[1])
        await election.add_role(roles[1], key=uuid.uuid4().int % 2**62)
        await bounded(opens(election, roles[1]))
        assert not election.gate(roles[0]).is_leader


async def test_a_new_heartbeat_is_seen_although_nothing_else_is_new(node_dsn: str, roles: list[str]) -> None:
    async with LeaderElection(node_dsn, roles, **STEADY) as leader, LeaderElection(node_dsn, roles, **STEADY) as other:
        for role in roles:
            await bounded(opens(leader, role))
            await until(lambda role=role: other.leader(role) is not None)  # type: ignore[misc]
        for role in roles:
            seen = sight(other, role)
            await until(lambda role=role, seen=seen: sight(other, role).beat > seen.beat + 2)  # type: ignore[misc]
            assert sight(other, role).first_seen > seen.first_seen


async def test_who_leads_is_told_when_it_changes_and_not_again_with_every_heartbeat(
    node_dsn: str, roles: list[str]
) -> None:
    watcher = LeaderElection(node_dsn, roles, candidate=False, **STEADY)
    async with reading(watcher) as changes, watcher:
        for number in (1, 2):
            async with LeaderElection(node_dsn, roles, node_id=f"node-{number}", **STEADY) as leader:
                for role in roles:
                    await bounded(opens(leader, role))
                await until(lambda number=number: all(epoch_of(watcher, role) == number for role in roles))  # type: ignore[misc]
                seen = sight(watcher, roles[0])
                await until(lambda seen=seen: sight(watcher, roles[0]).beat > seen.beat)  # type: ignore[misc]
            await until(lambda: all(watcher.leader(role) is None for role in roles))
        told = [(change.role, change.epoch) for change in changes.seen]
    for role in roles:
        assert [epoch for name, epoch in told if name == role] == [None, 1, None, 2, None]
    assert holders(node_dsn, key_pair(roles[0])) == []


@pytest.mark.parametrize("place", [0, 1], ids=["by its own name", "by another"])
async def test_a_role_that_takes_the_place_of_another_is_looked_at(
    node_dsn: str, roles: list[str], locked: None, place: int
) -> None:
    """Nobody has led either: the answer reads the same, and is about another role. Who balances tries what it saw."""
    async with LeaderElection(node_dsn, roles[:1], balance=True, **STEADY) as election:
        await until(lambda: election._roster.roles[roles[0]].look is not None)
        await election.remove_role(roles[0])
        await election.add_role(roles[place])
        await until(lambda: election._roster.roles[roles[place]].look is not None)


async def test_a_lock_that_is_given_back_and_granted_again_at_once_is_noticed(
    node_dsn: str, roles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drained while it is won, resumed while it is given back: the same answer comes twice, and each means a lock."""
    role = roles[0]
    answers: list[list[bool]] = []
    look, unlock = Ledger.try_and_look, Ledger.unlock

    async def try_and_look(self: Ledger, *args: Any, **options: Any) -> list[Look]:
        answer = await look(self, *args, **options)
        answers.append([seen.granted for seen in answer])
        if len(answers) == 1:
            assert election._run.engine is not None
            election._run.engine.drain([election._roster.roles[role]], everything=False)
        return answer

    async def give_back(self: Ledger, *args: Any, **options: Any) -> set[str]:
        given_back = await unlock(self, *args, **options)
        assert election._run.engine is not None
        election._run.engine.resume([election._roster.roles[role]], everything=False)
        return given_back

    monkeypatch.setattr(Ledger, "try_and_look", try_and_look)
    monkeypatch.setattr(Ledger, "unlock", give_back)
    async with LeaderElection(node_dsn, role, **STEADY) as election:
        await bounded(opens(election, role))
        assert answers == [[True], [True]]
        monkeypatch.setattr(Ledger, "unlock", unlock)
    assert holders(node_dsn, key_pair(role)) == []


async def test_what_is_left_to_another_node_is_told_as_long_as_it_is(node_dsn: str, dsn: str, roles: list[str]) -> None:
    keys, ledger = {roles[0]: key_pair(roles[0])}, await opened(node_dsn, roles[0])
    try:
        with admin(ledger_dsns(dsn)["superuser"]) as conn:
            conn.execute(
                "INSERT INTO pgleaderlock.requests (namespace, role, kind, to_node_id, released_at)"
                " VALUES ('pgleaderlock', %s, 'step_down', 'another', clock_timestamp())",
                (roles[0],),
            )
        for _ in range(2):
            (look,) = await ledger.try_and_look(keys, keys)
            assert look.reserved
            assert not look.granted
    finally:
        await ledger.session.close()


async def test_what_is_again_as_it_was_is_told_again(node_dsn: str, roles: list[str]) -> None:
    keys, ledger = {roles[0]: key_pair(roles[0])}, await opened(node_dsn, roles[0])
    try:
        for wanted in ({}, keys, {}):
            (look,) = await ledger.try_and_look(keys, wanted)
            assert look.granted is bool(wanted)
            if look.granted:
                await ledger.unlock(keys)
    finally:
        await ledger.session.close()


def sight(election: LeaderElection, role: str) -> Sight:
    found = election._roster.roles[role].sight
    assert found is not None
    return found


def epoch_of(election: LeaderElection, role: str) -> int | None:
    leader = election.leader(role)
    return leader.epoch if leader is not None else None
