"""Known defects, each with a test that fails. Not collected: run `pytest tests/_election_api_bugs.py`."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from fakes import FakeClock
from pgleaderlock import (
    ConfigurationError,
    LeaderElection,
    LeaderGate,
    LeaderToken,
    LockState,
    NotLeader,
    key_pair,
)
from pgleaderlock.errors import ConnectionError
from pgleaderlock.ledger import Bump, Ledger
from support.elections import PATIENT, STEADY, bounded, ledger_dsns, opens, until
from support.server_side import terminate

TOKEN = LeaderToken("scheduler", 7, "node-a")


def just_before_it_waits(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Something happens in another thread between a wait's look at the gate and its registration."""
    loop = asyncio.get_running_loop()
    create_future = loop.create_future
    pending = [happens]

    def create() -> "asyncio.Future[Any]":
        if pending:
            pending.pop()()
        return create_future()

    monkeypatch.setattr(loop, "create_future", create)


async def test_work_that_ends_while_a_drain_begins_to_wait_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    gate = LeaderGate("scheduler", clock=clock)
    gate.open(TOKEN, clock.now(), clock.now() + 6)
    acting = gate.acting()
    acting.__enter__()
    just_before_it_waits(monkeypatch, lambda: acting.__exit__(None, None, None))
    async with asyncio.timeout(5):
        await gate.wait_idle()


async def test_a_gate_that_opens_while_somebody_begins_to_wait_for_it_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    gate = LeaderGate("scheduler", clock=clock)
    async with asyncio.timeout(5):
        just_before_it_waits(monkeypatch, lambda: gate.open(TOKEN, clock.now(), clock.now() + 6))
        assert await gate.wait_open()


async def test_a_gate_that_shuts_while_somebody_begins_to_wait_for_it_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    gate = LeaderGate("scheduler", clock=clock)
    gate.open(TOKEN, clock.now(), clock.now() + 6)
    async with asyncio.timeout(5):
        just_before_it_waits(monkeypatch, lambda: gate.close("lost"))
        await gate.wait_closed(TOKEN)


# --- On a real server


@pytest.fixture
def superuser(dsn: str) -> str:
    return ledger_dsns(dsn)["superuser"]


@pytest.fixture
def role() -> str:
    return f"bug-{uuid.uuid4().hex[:12]}"


@contextlib.asynccontextmanager
async def a_predecessor_that_still_acts(dsn: str, role: str) -> AsyncIterator[LeaderElection]:
    """Its session was ended while its process stood still: its gate is open by its own clock, for ten minutes."""
    frozen = LeaderElection(dsn, role, node_id="frozen", **PATIENT)
    async with frozen:
        await opens(frozen, role)
        frozen._roles[role].not_before = float("inf")
        yield frozen


async def test_a_node_that_never_heard_of_its_own_bump_still_waits(
    superuser: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SAFETY. The bump is committed and its answer lost (or too late). The next session of this process finds its own
    instance as the predecessor, and `last_opens_at` knows nothing of that term."""
    waits = LeaderElection(superuser, role, node_id="waits", **PATIENT)
    real = Ledger.bump
    lost: list[bool] = []

    async def bump(self: Ledger, *args: Any, **kwargs: Any) -> list[Bump]:
        answer = await real(self, *args, **kwargs)
        if not lost and self._identity.node_id == "waits":
            lost.append(True)
            raise ConnectionError("the answer was lost on its way")
        return answer

    async with a_predecessor_that_still_acts(superuser, role):
        monkeypatch.setattr(Ledger, "bump", bump)
        async with waits:
            terminate(superuser, key_pair(role))
            await until(lambda: waits.state(role) is LockState.LEADER)
            assert lost
            assert not waits.gate(role).is_leader, "it opened at once, while the frozen one may still act"


async def test_a_start_that_is_cancelled_leaves_nothing_running(superuser: str, role: str) -> None:
    """`async with election:` never reaches `__aexit__` then."""
    election = LeaderElection(superuser, role, **STEADY)
    before = asyncio.all_tasks()
    starting = asyncio.ensure_future(election.start())
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])
    try:
        await asyncio.sleep(0.5)
        left = [task.get_name() for task in asyncio.all_tasks() - before]
        assert left == []
    finally:
        await election.shutdown()


async def test_changes_of_a_stopped_election_end(superuser: str, role: str) -> None:
    election = LeaderElection(superuser, role, **STEADY)
    async with election:
        await opens(election, role)
    async with asyncio.timeout(2):
        async for _ in election.changes():
            pass


@pytest.mark.parametrize(
    "settings",
    [
        {"stale_threshold_s": -1.0},
        {"stale_threshold_s": "soon"},
        {"hard_stop_after_s": "soon"},
        {"hard_stop_after_s": float("nan")},
        {"hard_stop_after_s": True},
        {"node_id": 5},
        {"evict_stale": "no"},
        {"enabled": "false"},
        {"standalone": "no"},
        {"candidate": None},
        {"heartbeat_thread": 1},
        {"allow_pooler": "yes"},
        {"standby_wait_s": False},
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        LeaderElection("host=x", "r", **settings)


@pytest.mark.parametrize("variable", ["HEARTBEAT_INTERVAL_MS", "EPOCH_STALE_THRESHOLD_MS"])
def test_an_infinite_number_of_milliseconds_is_refused_by_the_variables_name(variable: str) -> None:
    with pytest.raises(ConfigurationError, match=variable):
        LeaderElection.from_env(environ={"PG_CONN_STRING": "host=x", variable: "inf"})


@pytest.mark.parametrize("roles", [None, 5])
def test_roles_that_are_no_names_are_a_configuration_error(roles: Any) -> None:
    with pytest.raises(ConfigurationError):
        LeaderElection("host=x", roles)


def test_enable_takes_the_token_of_this_role_only() -> None:
    clock = FakeClock()
    gate = LeaderGate("scheduler", clock=clock)
    gate.open(TOKEN, clock.now(), clock.now() + 6)
    gate.disable()
    with pytest.raises(NotLeader):
        gate.enable(LeaderToken("another role", TOKEN.epoch, "somebody"))
    assert not gate.is_leader


async def test_a_standalone_leader_can_step_down() -> None:
    """`step_down` looks for the engine, and there is none: nothing happens, and nothing says so."""
    election = LeaderElection("", "r", standalone=True)
    async with election:
        await asyncio.sleep(0)
        await bounded(election.step_down("r"))
        assert not election.gate("r").is_leader
