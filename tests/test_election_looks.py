"""What a standby sees of a thousand roles is put together from little, and what has not changed is not made anew.

So each claim here is about what *has* changed, and must be seen all the same.
"""

import uuid
from collections.abc import Iterator

import psycopg
import pytest

from pgleaderlock import LeaderElection, key_pair
from pgleaderlock._roles import Sight
from support.elections import STEADY, bounded, ledger_dsns, opens, reading, until
from support.server_side import holders


@pytest.fixture
def node_dsn(dsn: str) -> str:
    return ledger_dsns(dsn)["plain"]


@pytest.fixture
def roles() -> list[str]:
    name = uuid.uuid4().hex[:12]
    return [f"look-{name}-a", f"look-{name}-b"]


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
        await until(lambda: election._roles[roles[1]].look is not None)
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


def sight(election: LeaderElection, role: str) -> Sight:
    found = election._roles[role].sight
    assert found is not None
    return found


def epoch_of(election: LeaderElection, role: str) -> int | None:
    leader = election.leader(role)
    return leader.epoch if leader is not None else None
