"""Roles that come and go while an election runs: with a heartbeat thread or without, with a session or without."""

import asyncio
import gc
import threading
import uuid
from typing import Any

import pytest

from pgleaderlock import (
    ConfigurationError,
    ElectionObserver,
    LeaderElection,
    LeaderToken,
    LockError,
    LockState,
    NotLeader,
)
from pgleaderlock._election import winning
from pgleaderlock._election.ledger import Ledger, Look
from pgleaderlock.keys import KeyPair, key_pair_from_bigint
from support.elections import (
    HASTY,
    PATIENT,
    STEADY,
    WAIT_S,
    Story,
    bounded,
    holding,
    one,
    opens,
    reading,
    until,
)
from support.server_side import holders

pytestmark = pytest.mark.usefixtures("hold")


class Away:
    """A database that is away until it is told to be there: a DSN that does not resolve."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.there = asyncio.Event()

    def __call__(self) -> str:
        if not self.there.is_set():
            raise OSError("away")
        return self.dsn


class Roles(ElectionObserver):
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def role_added(self, role: str) -> None:
        self.calls.append(("added", role))

    def role_removed(self, role: str) -> None:
        self.calls.append(("removed", role))

    def state_changed(self, role: str, old: LockState, new: LockState) -> None:
        self.calls.append((new.value, role))


# --- Adding


@pytest.mark.parametrize("threaded", [False, True])
async def test_a_role_that_is_added_is_led_on_the_same_session(
    node_dsn: str, superuser: str, role: str, threaded: bool
) -> None:
    second = f"{role}-second"
    election = LeaderElection(node_dsn, role, heartbeat_thread=threaded, **STEADY)
    seen = Roles()
    election.observe(seen)
    async with election, reading(election) as changes:
        await opens(election, role)
        await bounded(election.add_role(second))
        assert election.roles == (role, second)
        await opens(election, second)
        await changes.until(lambda change: change.role == second and change.is_leader)
        sessions = {
            one(superuser, "SELECT session_id FROM pgleaderlock.leaders WHERE role = %s", name)["session_id"]
            for name in (role, second)
        }
        assert len(sessions) == 1
        assert election.gate(role).current_epoch == 1, "the first was led throughout"
    assert [name for what, name in seen.calls if what == "added"] == [role, second]
    assert seen.calls.index(("added", second)) < seen.calls.index(("follower", second))


async def test_a_role_that_is_added_before_the_start_is_led_after_it(node_dsn: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, **STEADY)
    await election.add_role(f"{role}-b", key=uuid.uuid4().int % 2**62)
    assert election.state(f"{role}-b") is LockState.STOPPED
    async with election:
        await opens(election, role)
        await opens(election, f"{role}-b")


@pytest.mark.parametrize("threaded", [False, True])
async def test_roles_come_and_go_while_the_database_is_away(node_dsn: str, role: str, threaded: bool) -> None:
    away = Away(node_dsn)
    election = LeaderElection(away, [role, f"{role}-goes"], heartbeat_thread=threaded, **STEADY)
    async with election:
        await bounded(election.add_role(f"{role}-comes"))
        await bounded(election.remove_role(f"{role}-goes"))
        away.there.set()
        await opens(election, role)
        await opens(election, f"{role}-comes")
        assert holding(node_dsn, f"{role}-goes") == 0


async def test_a_name_or_a_key_that_is_taken_is_refused_and_nothing_changes(node_dsn: str, role: str) -> None:
    async with LeaderElection(node_dsn, {role: 77}, **STEADY) as election:
        for name, key, text in (
            (role, None, "already"),
            ("other", 77, "same key"),
            ("", None, "name"),
            (5, None, "name"),
            ("other", "7", "key"),
        ):
            with pytest.raises(ConfigurationError, match=text):
                await election.add_role(name, key)  # type: ignore[arg-type]
        assert election.roles == (role,)
        await opens(election, role)


@pytest.mark.of_sessions
async def test_a_second_role_beside_a_wait_at_the_server_is_refused(node_dsn: str, role: str) -> None:
    async with LeaderElection(node_dsn, role, standby_wait_s=0.2, **STEADY) as election:
        with pytest.raises(ConfigurationError, match="standby_wait_s"):
            await election.add_role("second")
        await opens(election, role)
        await bounded(election.remove_role(role))
        await bounded(election.add_role(f"{role}-instead"))
        await opens(election, f"{role}-instead")


# --- One name under two keys: two locks, which exclude nobody


def beats(superuser: str, role: str) -> int:
    """How often the leader of a role has been heard."""
    query = "SELECT beat FROM pgleaderlock.sessions JOIN pgleaderlock.leaders USING (session_id) WHERE role = %s"
    return int(one(superuser, query, role)["beat"])


@pytest.fixture
def two_keys() -> tuple[int, int]:
    return uuid.uuid4().int % 2**62, uuid.uuid4().int % 2**62


def recorded_keys(superuser: str, role: str) -> KeyPair:
    row = one(superuser, "SELECT key1, key2 FROM pgleaderlock.leaders WHERE role = %s", role)
    return row["key1"], row["key2"]


async def test_while_the_recorded_key_is_held_another_key_wins_nothing_and_says_why(
    node_dsn: str, superuser: str, role: str, two_keys: tuple[int, int]
) -> None:
    first, second = two_keys
    async with LeaderElection(node_dsn, {role: first}, **HASTY) as leader:
        await opens(leader, role)
        other = LeaderElection(node_dsn, {role: second}, **HASTY)
        story = Story(other)
        async with other:
            await story.heard("on_error")
            assert "under another key" in str(story.errors[0])
            await until(lambda: holders(node_dsn, key_pair_from_bigint(second)) == [])  # between two tries
            assert (other.gate(role).token, other.state(role)) == (None, LockState.FOLLOWER)
            assert leader.gate(role).require_leader().epoch == 1
        assert recorded_keys(superuser, role) == key_pair_from_bigint(first)


@pytest.mark.parametrize("others", ["session", "lease"])
async def test_whatever_holds_under_another_key_wins_nothing_and_says_once_why_and_by_whom(
    node_dsn: str, superuser: str, role: str, two_keys: tuple[int, int], *, hold: str, others: Any
) -> None:
    """Of a session beside a session, the ledger says only that one of the two keys is wrong."""
    first, second = two_keys
    async with LeaderElection(node_dsn, {role: first}, node_id="leads", **PATIENT) as leader:
        await opens(leader, role)
        other = LeaderElection(node_dsn, {role: second}, hold=others, **PATIENT)
        story = Story(other)
        async with other:
            await story.heard("on_error")
            assert isinstance(story.errors[0], LockError)
            by_whom = "" if (hold, others) == ("session", "session") else "by leads "
            assert f"led {by_whom}under another key" in str(story.errors[0])
            assert other.last_error is story.errors[0]
            seen = beats(superuser, role)
            await until(lambda: beats(superuser, role) > seen + 5, "the leader beats, and is looked at")
            assert (len(story.errors), other.gate(role).token) == (1, None)


@pytest.mark.of_sessions
async def test_a_key_that_nobody_holds_any_more_is_written_anew(
    node_dsn: str, superuser: str, role: str, two_keys: tuple[int, int]
) -> None:
    """And whoever comes with the old one then is the one who is refused."""
    first, second = two_keys
    async with LeaderElection(node_dsn, {role: first}, **STEADY) as before:
        await opens(before, role)
    async with LeaderElection(node_dsn, {role: second}, **STEADY) as leader:
        await opens(leader, role)
        assert recorded_keys(superuser, role) == key_pair_from_bigint(second)
        story = Story(before)
        async with before:
            await story.heard("on_error")
            assert before.gate(role).token is None
            assert leader.gate(role).require_leader().epoch == 2


@pytest.mark.of_sessions
async def test_whose_key_was_refused_leads_when_the_other_is_gone(
    node_dsn: str, role: str, two_keys: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winning, "COLLISION_RETRY_S", 0.05)
    first, second = two_keys
    other = LeaderElection(node_dsn, {role: second}, **STEADY)
    story = Story(other)
    async with LeaderElection(node_dsn, {role: first}, **STEADY) as leader:
        await opens(leader, role)
        await other.start()
        await story.heard("on_error")
    await opens(other, role)
    await other.shutdown()


# --- Removing


@pytest.mark.parametrize("threaded", [False, True])
async def test_a_role_that_is_removed_is_released_cleanly_and_forgotten(
    node_dsn: str, superuser: str, role: str, threaded: bool
) -> None:
    """T is ten minutes: the other opens at once, because the release was clean."""
    kept = f"{role}-kept"
    election = LeaderElection(node_dsn, [role, kept], heartbeat_thread=threaded, **PATIENT)
    seen, story = Roles(), Story(election)
    election.observe(seen)
    async with election:
        await opens(election, role)
        await opens(election, kept)
        gate = election.gate(role)
        async with LeaderElection(node_dsn, role, **PATIENT) as other:
            await bounded(election.remove_role(role))
            await opens(other, role)
        with pytest.raises(ConfigurationError, match="not one of this election's"):
            election.gate(role)
        with pytest.raises(NotLeader):
            gate.require_leader()
        assert election.roles == (kept,)
        assert election.gate(kept).current_epoch == 1
        await story.heard("on_released", role)
    assert seen.calls[-1] != ("removed", role)
    assert [call for call in seen.calls if call[1] == role][-2:] == [("stopped", role), ("removed", role)]


async def test_removing_what_is_not_there_is_an_error(node_dsn: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, **STEADY)
    with pytest.raises(ConfigurationError, match="it has"):
        await election.remove_role("unknown")
    await election.remove_role(role)
    with pytest.raises(ConfigurationError, match="it has none"):
        await election.remove_role(role)


async def test_a_work_of_a_role_that_is_removed_ends_and_lead_returns_none(node_dsn: str, role: str) -> None:
    ended: list[str] = []
    began = asyncio.Event()

    async def work(token: LeaderToken) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    async with LeaderElection(node_dsn, [role, f"{role}-never"], **STEADY) as election:
        election._roster.roles[f"{role}-never"].not_before = float("inf")
        leading = asyncio.ensure_future(election.lead(role, work))
        waiting = asyncio.ensure_future(election.lead(f"{role}-never", work))
        await bounded(began.wait())
        await bounded(election.remove_role(role))
        assert ended == ["work"]
        assert await bounded(leading) is None
        await bounded(election.remove_role(f"{role}-never"))
        assert await bounded(waiting) is None, "it was waiting for the gate"
        with pytest.raises(ConfigurationError):
            await election.lead(role, work)


async def test_a_removal_that_is_cancelled_leaves_a_drained_role_that_can_be_removed_again(
    node_dsn: str, role: str
) -> None:
    async with LeaderElection(node_dsn, role, **STEADY) as election:
        await opens(election, role)
        with election.gate(role).acting():
            removing = asyncio.ensure_future(election.remove_role(role))
            await until(lambda: election.draining(role))
            removing.cancel()
            await asyncio.wait([removing])
            assert removing.cancelled()
            assert election.roles == (role,)
            assert holding(node_dsn, role) == 1, "its work goes on"
        await until(lambda: holding(node_dsn, role) == 0)
        assert election.drained(role)
        await bounded(election.remove_role(role))
        assert not election.roles


@pytest.mark.parametrize("threaded", [False, True])
async def test_a_removal_that_is_cancelled_at_any_turn_leaves_all_or_nothing(
    node_dsn: str, role: str, threaded: bool
) -> None:
    async with LeaderElection(node_dsn, f"{role}-stays", heartbeat_thread=threaded, **STEADY) as election:
        for turns in (0, 1, 2, 3, 5, 8, 13):
            name = f"{role}-{turns}"
            await bounded(election.add_role(name))
            await opens(election, name)
            removing = asyncio.ensure_future(election.remove_role(name))
            for _ in range(turns):
                await asyncio.sleep(0)
            removing.cancel()
            await asyncio.wait([removing])
            if name in election.roles:
                assert election.state(name) is not LockState.STOPPED
                await bounded(election.remove_role(name))
            assert name not in election.roles
            assert name not in election._roster.roles
            await until(lambda name=name: holding(node_dsn, name) == 0)  # type: ignore[misc]
        assert election.gate(f"{role}-stays").is_leader


async def test_a_role_whose_lock_may_be_granted_any_moment_is_not_forgotten(
    node_dsn: str, role: str, ledger_kind: type[Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer that grants it is on its way: forgotten now, its lock would be held by nobody's will."""
    real, granted, go_on = ledger_kind.try_and_look, asyncio.Event(), asyncio.Event()

    async def try_and_look(self: Ledger, *args: Any, **options: Any) -> list[Look]:
        answer = await real(self, *args, **options)
        granted.set()
        await go_on.wait()
        return answer

    monkeypatch.setattr(ledger_kind, "try_and_look", try_and_look)
    async with LeaderElection(node_dsn, role, **STEADY) as election:
        await bounded(granted.wait())
        assert election._run.engine is not None
        assert not election._run.engine.forget(election._roster.roles[role])
        removing = asyncio.ensure_future(election.remove_role(role))
        await asyncio.sleep(0)
        go_on.set()
        await bounded(removing)
        assert holding(node_dsn, role) == 0


async def test_a_role_is_removed_while_the_first_connect_hangs(role: str) -> None:
    """A server that accepts and says nothing: no lock of it can be on its way to us."""
    asked, hang_up = asyncio.Event(), asyncio.Event()

    async def says_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await hang_up.wait()
        writer.close()

    async with await asyncio.start_server(says_nothing, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        election = LeaderElection(f"host=127.0.0.1 port={port} user=x dbname=x", [role, "kept"], **STEADY)
        starting = asyncio.ensure_future(election.start())
        await bounded(asked.wait())
        await bounded(election.remove_role(role))
        assert election.roles == ("kept",)
        hang_up.set()
        await bounded(starting)
        await bounded(election.shutdown())


async def test_a_removal_out_of_time_is_not_clean_and_goes_through(node_dsn: str, superuser: str, role: str) -> None:
    began, may_end = threading.Event(), threading.Event()

    def act() -> None:
        with election.gate(role).acting():
            began.set()
            may_end.wait(WAIT_S)

    election = LeaderElection(node_dsn, role, **STEADY)
    async with election:
        await opens(election, role)
        thread = threading.Thread(target=act)
        thread.start()
        await until(began.is_set)
        await bounded(election.remove_role(role, timeout_s=0.05))
        row = one(superuser, "SELECT ended, clean FROM pgleaderlock.leaders WHERE role = %s", role)
        assert row == {"ended": True, "clean": False}
        assert [gate.role for gate in election._roster.watched_gates()] == [role], "the watchdog sees its work still"
        may_end.set()
        thread.join()


async def test_a_role_that_is_removed_and_added_again_is_led_in_a_new_term(node_dsn: str, role: str) -> None:
    async with LeaderElection(node_dsn, role, **STEADY) as election:
        for epoch in (1, 2, 3):
            await opens(election, role)
            assert election.gate(role).current_epoch == epoch
            await bounded(election.remove_role(role))
            assert election.roles == ()
            await bounded(election.add_role(role))


async def test_a_work_or_a_callback_cannot_remove_the_role_it_works_for(node_dsn: str, role: str) -> None:
    async def work(token: LeaderToken) -> str:
        with pytest.raises(LockError, match="outside"):
            await election.remove_role(role)
        return "refused"

    async with LeaderElection(node_dsn, role, **STEADY) as election:
        assert await bounded(election.lead(role, work)) == "refused"
        assert election.gate(role).is_leader


async def test_roles_come_and_go_without_a_database_too() -> None:
    async with LeaderElection("", "a", standalone=True, **STEADY) as election:
        await election.add_role("b")
        assert election.gate("b").is_leader
        await election.remove_role("a")
        assert election.roles == ("b",)
    async with LeaderElection("", "a", enabled=False, **STEADY) as disabled:
        await disabled.add_role("b")
        with pytest.raises(NotLeader) as refused:
            disabled.gate("b").require_leader()
        assert refused.value.reason == "disabled"
        await disabled.remove_role("b")


@pytest.mark.parametrize("threaded", [False, True])
async def test_many_that_come_and_go_at_once_leave_nothing(node_dsn: str, role: str, threaded: bool) -> None:
    """`dsn` looks for locks in the server."""
    names = [f"{role}-{number}" for number in range(20)]
    election = LeaderElection(node_dsn, role, heartbeat_thread=threaded, **STEADY)

    async def comes_and_goes(name: str) -> None:
        await election.add_role(name)
        await opens(election, name)
        await election.remove_role(name)

    async with election:
        results: list[Any] = await bounded(asyncio.gather(*(comes_and_goes(name) for name in names)))
        assert results == [None] * 20
        assert election.roles == (role,)
        assert len(election._roster.roles) == len(election._roster.gates) == len(election._setup.keys) == 1
        await opens(election, role)
    gc.collect()
