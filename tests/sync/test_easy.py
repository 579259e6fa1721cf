"""The one-liners: what runs only on the leader, and one at a time."""

import asyncio
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import pgleaderlock
from pgleaderlock import ConfigurationError, LockNotAcquired, NotLeader, key_pair
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.errors import DatabaseError
from pgleaderlock.sync import LeaderElection, advisory_lock, easy, leader_only
from support.elections import PATIENT, ledger_dsns, until
from support.server_side import holders, terminate

WAIT_S = 60.0


@pytest.fixture
def name() -> str:
    return f"easy-{uuid.uuid4()}"


@pytest.fixture
def ledger(postgres: EmbeddedPostgres, nothing_left: None) -> str:
    return ledger_dsns(postgres.dsn)["superuser"]


@pytest.fixture
def leader(ledger: str, name: str) -> Iterator[LeaderElection]:
    with LeaderElection(ledger, name, **PATIENT) as election:
        assert election.gate(name).wait_open(WAIT_S)
        yield election


@pytest.fixture
def follower(ledger: str, name: str, leader: LeaderElection) -> Iterator[LeaderElection]:
    with LeaderElection(ledger, name, node_id="follower", **PATIENT) as election:
        yield election


# --- leader_only


def plain(**options: Any) -> Callable[[int], Any]:
    @leader_only(**options)
    def double(number: int) -> int:
        return 2 * number

    return double


def awaited(**options: Any) -> Callable[[int], Any]:
    @leader_only(**options)
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    return lambda number: asyncio.run(double(number))


@pytest.mark.parametrize("made", [plain, awaited])
def test_the_leader_runs_it_and_another_one_does_what_was_said(
    leader: LeaderElection, follower: LeaderElection, name: str, made: Callable[..., Callable[[int], Any]]
) -> None:
    assert made(role=name, election=leader)(21) == 42
    assert made(role=name, election=follower, otherwise="skip")(21) is None
    with pytest.raises(NotLeader, match=name):
        made(role=name, election=follower)(21)
    with pytest.raises(NotLeader, match=name):
        made(role=name, election=follower, otherwise="wait", timeout_s=0.01)(21)


@pytest.mark.parametrize("made", [plain, awaited])
def test_with_wait_it_runs_when_this_process_leads(
    leader: LeaderElection, follower: LeaderElection, name: str, made: Callable[..., Callable[[int], Any]]
) -> None:
    results: list[Any] = []
    call = made(role=name, election=follower, otherwise="wait")
    waiting = threading.Thread(target=lambda: results.append(call(21)))
    waiting.start()
    leader.drain(name)
    waiting.join(WAIT_S)
    assert results == [42]


def test_what_runs_is_waited_for_by_a_drain(leader: LeaderElection, name: str) -> None:
    begun, end = threading.Event(), threading.Event()

    @leader_only(name, election=leader)
    def work() -> None:
        begun.set()
        assert end.wait(WAIT_S)

    working = threading.Thread(target=work)
    working.start()
    assert begun.wait(WAIT_S)
    draining = threading.Thread(target=leader.drain, args=(name,))
    draining.start()
    while leader.gate(name).shut_because != "draining":
        assert draining.is_alive()
    assert leader.gate(name).in_flight == 1
    end.set()
    working.join(WAIT_S)
    draining.join(WAIT_S)
    assert leader.drained(name)


async def test_an_election_of_asyncio_serves_as_well(ledger: str, name: str) -> None:
    async with pgleaderlock.LeaderElection(ledger, name, **PATIENT) as election:
        assert await election.gate(name).wait_open(WAIT_S)

        @leader_only(name, election=election)
        async def work() -> str:
            return "done"

        assert await work() == "done"


def test_what_is_not_usable_is_refused_when_it_is_decorated(leader: LeaderElection, name: str) -> None:
    with pytest.raises(ConfigurationError, match="otherwise"):
        leader_only(name, election=leader, otherwise="maybe")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="name of the role"):
        leader_only(name, election=leader)("no function")  # type: ignore[arg-type]


async def test_without_an_election_the_process_has_one_and_starts_it_with_the_first_call(
    ledger: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PG_CONN_STRING", ledger)
    monkeypatch.setattr(easy, "_process", process := easy._ProcessElection())

    @leader_only(name, otherwise="wait", timeout_s=WAIT_S)
    def work() -> str:
        return "done"

    assert process._election is None
    assert await asyncio.to_thread(work) == "done"

    @leader_only(f"{name}-later", otherwise="wait", timeout_s=WAIT_S)
    async def later() -> str:
        return "done"

    assert await later() == "done"
    assert process._election is not None
    assert process._election.roles == (name, f"{name}-later")
    await asyncio.to_thread(process._election.shutdown)


# --- advisory_lock


def test_one_at_a_time_holds_it(dsn: str, name: str) -> None:
    with advisory_lock(name, dsn) as guard:
        assert guard.check()
        with pytest.raises(LockNotAcquired), advisory_lock(name, dsn, timeout_s=0):
            pytest.fail("two hold it")
    assert holders(dsn, key_pair(name)) == []


def test_it_decorates_a_function_and_takes_the_lock_for_each_call(dsn: str, name: str) -> None:
    @advisory_lock(name, dsn, timeout_s=0)
    def held() -> int:
        return len(holders(dsn, key_pair(name)))

    assert [held(), held()] == [1, 1]
    assert holders(dsn, key_pair(name)) == []


async def test_a_lock_that_is_lost_inside_the_block_is_told_at_its_end(dsn: str, name: str) -> None:
    def block() -> None:
        with advisory_lock(name, dsn) as guard:
            terminate(dsn, key_pair(name))
            assert guard.lost(WAIT_S)

    with pytest.raises(DatabaseError, match="lost before it was released"):
        await asyncio.to_thread(block)
    await until(lambda: holders(dsn, key_pair(name)) == [])


def test_the_database_comes_from_the_environment_or_is_asked_for(
    dsn: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in [*os.environ]:
        if variable.startswith("PG"):
            monkeypatch.delenv(variable)
    with pytest.raises(ConfigurationError, match="which database"), advisory_lock(name):
        pytest.fail("it was not said where")
    monkeypatch.setenv("PG_DSN", dsn)
    with advisory_lock(name):
        assert len(holders(dsn, key_pair(name))) == 1
