"""A running `LeaderElection`: how it starts and ends, what it needs, and what wakes it, evicts others and watches it.

Every test runs twice: as a superuser and as a plain role that has what `grants.sql` gives it and nothing else.
"""

import asyncio
import contextlib
import gc
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from conftest import StartServer
from pgleaderlock import (
    LeaderElection,
    LeaderToken,
    LockError,
    LockState,
    NotLeader,
    PgLeaderLockError,
    SchemaError,
    ShutdownError,
    key_pair,
)
from pgleaderlock._election.ledger import LEASES_SINCE
from pgleaderlock.errors import ConnectionError
from pgleaderlock.migrate import LEDGER_VERSION, migrate
from support.counts import count
from support.elections import (
    HASTY,
    PATIENT,
    STEADY,
    WAIT_S,
    SilentLeader,
    Story,
    admin,
    beat,
    beat_turns,
    beats_on,
    bounded,
    end_leader,
    fresh_database,
    holding,
    leader_row,
    ledger_dsns,
    one,
    opens,
    reading,
    running,
    somebody_acts,
    terms,
    until,
)
from support.server_side import holders

pytestmark = pytest.mark.usefixtures("hold")

POLITE = {"acquire_delay_s": (4.0, 5.0)}


@pytest.fixture(params=["plain", "superuser"][: count(1, 2)])
def node_dsn(request: pytest.FixtureRequest, dsn: str) -> str:
    """What the nodes connect with."""
    return ledger_dsns(dsn)[request.param]


# --- Starting and stopping


async def test_start_twice_is_start_once_and_an_election_can_be_started_again(
    node_dsn: str, superuser: str, role: str
) -> None:
    election = LeaderElection(node_dsn, role, **STEADY)
    await election.start()
    task = election._run.task
    await election.start()
    assert election._run.task is task
    await opens(election, role)
    await election.shutdown()
    await election.shutdown()
    assert election.state(role) is LockState.STOPPED
    async with election:
        await opens(election, role)
        assert election.gate(role).current_epoch == 2
    assert [term["epoch"] for term in terms(superuser, role)] == [1, 2]


async def test_a_start_that_is_cancelled_leaves_nothing_running(node_dsn: str, role: str) -> None:
    before = asyncio.all_tasks()
    for turns in (1, 2, 3, 5, 10, 50):
        election = LeaderElection(node_dsn, role, **STEADY)
        starting = asyncio.ensure_future(election.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        if starting.cancelled():
            await until(lambda: asyncio.all_tasks() == before, f"cancelled after {turns} turns")
        assert holding(node_dsn, role) == 0 or not starting.cancelled()
        await election.shutdown()
        del election, starting
    gc.collect()  # the driver gives the socket of a connect that was broken off back when it is collected


@pytest.mark.parametrize("ending", ["cancelled", "end of the program"])
@pytest.mark.parametrize("options", [{"standalone": True}, {"enabled": False}], ids=lambda options: next(iter(options)))
def test_an_election_that_is_cancelled_before_its_first_turn_says_that_it_has_stopped(
    role: str, options: dict[str, bool], ending: str
) -> None:
    heard: list[str] = []

    async def main() -> None:
        await election.start()
        task = election._run.task
        assert task is not None
        if ending == "cancelled":
            task.cancel()
            await asyncio.wait([task])

    election = LeaderElection("", role, **options)  # type: ignore[arg-type]
    election.on_stopped(lambda: heard.append("on_stopped"))
    asyncio.run(main())
    assert (election.state(role), heard) == (LockState.STOPPED, ["on_stopped"])


@pytest.mark.parametrize("then", ["start", "shutdown"])
@pytest.mark.parametrize("heartbeat_thread", [False, True])
def test_an_election_whose_loop_was_closed_under_it_frees_its_roles_and_starts_again_on_another(
    node_dsn: str, role: str, heartbeat_thread: bool, then: str
) -> None:
    # A role that is held by a lease is free when that has ended: the loop that could give it back is closed.
    election = LeaderElection(node_dsn, role, heartbeat_thread=heartbeat_thread, takeover="instant", **HASTY)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(election.start())
    loop.run_until_complete(opens(election, role))
    loop.close()

    async def again() -> None:
        if then == "shutdown":
            await bounded(election.shutdown())
            assert (election.state(role), election.gate(role).is_leader) == (LockState.STOPPED, False)
            await until(lambda: holders(node_dsn, key_pair(role)) == [])
        async with election:
            await opens(election, role)

    asyncio.run(again())
    assert election.state(role) is LockState.STOPPED
    assert holders(node_dsn, key_pair(role)) == []


async def test_a_shutdown_leaves_a_clean_ledger(node_dsn: str, superuser: str, role: str) -> None:
    async with LeaderElection(node_dsn, role, node_id="tidy", **STEADY) as election:
        await opens(election, role)
    row = leader_row(superuser, role)
    assert (row["epoch"], row["clean"], row["ended"]) == (1, True, True)
    (term,) = terms(superuser, role)
    assert (term["reason"], term["node_id"]) == ("released", "tidy")
    assert term["ended_at"] >= term["began_at"]
    session = one(superuser, "SELECT * FROM pgleaderlock.sessions WHERE session_id = %s", row["session_id"])
    assert session["ended_at"] is not None
    with admin(superuser) as conn:
        events = conn.execute(
            "SELECT kind, detail FROM pgleaderlock.events WHERE role = %s ORDER BY event_id", (role,)
        ).fetchall()
        state = conn.execute(
            "SELECT epoch, holder_identity FROM pgleaderlock.leader_state WHERE role = %s", (role,)
        ).fetchone()
    assert [(event["kind"], event["detail"]) for event in events] == [("acquired", None), ("released", "clean")]
    assert state == {"epoch": 1, "holder_identity": ""}


async def test_a_shutdown_waits_for_the_work_in_flight(node_dsn: str, superuser: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, **STEADY)
    await election.start()
    await opens(election, role)
    with election.gate(role).acting():
        stopping = asyncio.ensure_future(election.shutdown())
        await until(lambda: election.state(role) is LockState.RELEASING)
        await beats_on(superuser, role)
        assert not stopping.done()
        assert holding(node_dsn, role) == 1
    await bounded(stopping)
    assert leader_row(superuser, role)["clean"] is True


async def test_a_cancellation_from_a_dsn_callable_does_not_end_the_election(node_dsn: str, role: str) -> None:
    asked: list[int] = []

    async def fresh() -> str:
        asked.append(1)
        if len(asked) == 1:
            raise asyncio.CancelledError
        return node_dsn

    election = LeaderElection(fresh, role, listen_channel=None, **STEADY)
    story = Story(election)
    async with election:
        await opens(election, role)
    assert "the DSN callable failed with CancelledError" in str(story.errors[0])


async def test_a_shutdown_that_runs_out_of_time_says_so_and_is_not_clean(
    node_dsn: str, superuser: str, role: str
) -> None:
    election = LeaderElection(node_dsn, role, **STEADY)
    await election.start()
    await opens(election, role)
    with election.gate(role).acting():
        with pytest.raises(ShutdownError):
            await bounded(election.shutdown(timeout_s=0.05))
        assert election.state(role) is LockState.STOPPED
        assert holding(node_dsn, role) == 0
    row = leader_row(superuser, role)
    assert (row["ended"], row["clean"]) == (True, False)


async def test_work_that_does_not_end_at_the_exit_does_not_mask_what_the_block_raised(
    node_dsn: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgleaderlock.election.EXIT_TIMEOUT_S", 0.05)
    election = LeaderElection(node_dsn, role, **STEADY)
    work = contextlib.ExitStack()

    async def block() -> None:
        async with election:
            await opens(election, role)
            work.enter_context(election.gate(role).acting())
            raise KeyError("body")

    with work, pytest.raises(KeyError) as raised:
        await block()
    assert any("did not stop within 0.05 s" in note for note in raised.value.__notes__)


async def test_a_step_down_that_runs_out_of_time_is_not_clean(node_dsn: str, superuser: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, **{**STEADY, "acquire_delay_s": (4.0, 5.0)})
    story = Story(election)
    async with election:
        await opens(election, role)
        with election.gate(role).acting():
            await bounded(election.step_down(role, timeout_s=0.05))
            await story.heard("on_released", role)
            row = leader_row(superuser, role)
            assert (row["epoch"], row["ended"], row["clean"]) == (1, True, False)


async def test_a_step_down_runs_out_of_time_even_before_the_database_has_answered(
    node_dsn: str, superuser: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers = asyncio.Event(), asyncio.Event()
    election = LeaderElection(node_dsn, role, **{**STEADY, "acquire_delay_s": (4.0, 5.0)})
    story = Story(election)
    async with election:
        await opens(election, role)
        assert election._run.engine is not None
        ledger = election._run.engine._board.open_ledger()
        beat = ledger.beat

        async def slow_beat(*args: Any, **options: Any) -> Any:
            asked.set()
            await answers.wait()
            return await beat(*args, **options)

        monkeypatch.setattr(ledger, "beat", slow_beat)
        with election.gate(role).acting():
            await bounded(asked.wait())
            stepping = asyncio.ensure_future(election.step_down(role, timeout_s=0.01))
            await until(lambda: election._roster.roles[role].release_forced)
            answers.set()
            await bounded(stepping)
            await story.heard("on_released", role)
            assert not leader_row(superuser, role)["clean"]


async def test_a_step_down_of_a_role_that_is_not_led_does_nothing(node_dsn: str, role: str) -> None:
    one_node, two = (LeaderElection(node_dsn, role, **STEADY) for _ in range(2))
    async with one_node:
        await opens(one_node, role)
        async with two:
            await bounded(two.step_down(role))
            assert one_node.gate(role).is_leader


async def test_a_database_that_is_away_is_tried_again_until_it_is_there(throwaway_postgres: StartServer) -> None:
    server = throwaway_postgres()
    await migrate(server.dsn)
    dsn = server.dsn
    await asyncio.to_thread(server.stop)
    election = LeaderElection(dsn, "away", **STEADY)
    story = Story(election)
    await bounded(election.start())
    await story.heard("on_error")
    assert isinstance(election.last_error, ConnectionError)
    await asyncio.to_thread(server.start)
    await opens(election, "away")
    await election.shutdown()


# --- The schema


async def test_without_a_ledger_start_says_migrate_and_leaves_nothing(dsn: str) -> None:
    with fresh_database(dsn) as empty:
        election = LeaderElection(empty, "r", **STEADY)
        story = Story(election)
        with pytest.raises(SchemaError, match="pgleaderlock migrate"):
            await bounded(election.start())
        assert election.state("r") is LockState.STOPPED
        assert story.calls[-1] == ("on_stopped",)
        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        # And the same object works once the ledger is there.
        await migrate(empty)
        async with election:
            await opens(election, "r")


@pytest.mark.parametrize(
    ("sql", "remedy"),
    [
        ("DELETE FROM pgleaderlock.schema_version", "pgleaderlock migrate"),
        ("UPDATE pgleaderlock.schema_version SET version = version - 2", "pgleaderlock migrate"),
        ("INSERT INTO pgleaderlock.schema_version SELECT max(version) + 2 FROM pgleaderlock.schema_version", "upgrade"),
        ("DROP FUNCTION pgleaderlock.open_session, pgleaderlock.lease_open", "pgleaderlock migrate"),
    ],
)
async def test_a_ledger_that_does_not_fit_is_refused_with_the_remedy(dsn: str, sql: str, remedy: str) -> None:
    with fresh_database(dsn, ledger=True) as own:
        with admin(own) as conn:
            conn.execute(sql.encode())
        with pytest.raises(SchemaError, match=remedy):
            await bounded(LeaderElection(own, "r", **STEADY).start())
        assert one(own, "SELECT count(*) AS n FROM pgleaderlock.sessions")["n"] == 0


async def test_a_ledger_one_version_newer_or_older_serves(dsn: str, hold: str) -> None:
    """As far as it knows leases, where one is needed."""
    since = LEASES_SINCE if hold == "lease" else 0
    with fresh_database(dsn, ledger=True) as own:
        for version in (version for version in (LEDGER_VERSION + 1, LEDGER_VERSION - 1) if version >= since):
            with admin(own) as conn:
                conn.execute("DELETE FROM pgleaderlock.schema_version")
                conn.execute("INSERT INTO pgleaderlock.schema_version (version) VALUES (%s)", (version,))
            async with LeaderElection(own, f"r{version}", **STEADY) as election:
                await opens(election, f"r{version}")


async def test_without_the_grants_start_says_so(dsn: str, superuser: str) -> None:
    with fresh_database(dsn, ledger=True) as own:
        with admin(own) as conn:
            conn.execute("GRANT CONNECT ON DATABASE " + conn.info.dbname + " TO election_plain")
        stranger = psycopg.conninfo.make_conninfo(own, user="election_plain", password="plain")
        with pytest.raises(SchemaError, match="GRANT"):
            await bounded(LeaderElection(stranger, "r", **STEADY).start())


# --- Asked from afar


@pytest.mark.parametrize("channel", ["pgleaderlock", "nobody_listens_here"], ids=["notified", "notification lost"])
async def test_a_step_down_asked_through_sql_is_done_and_marked(
    node_dsn: str, superuser: str, role: str, channel: str
) -> None:
    election = LeaderElection(node_dsn, role, **STEADY)
    story = Story(election)
    async with election:
        await opens(election, role)
        asked = one(
            node_dsn, "SELECT pgleaderlock.request_step_down(%s, 'pgleaderlock', NULL, %s) AS id", role, channel
        )
        await story.heard("on_released", role)
        query = "SELECT done_at FROM pgleaderlock.requests WHERE request_id = %s"
        await until(lambda: one(superuser, query, asked["id"])["done_at"] is not None)
        await opens(election, role)
        await beats_on(superuser, role)
        assert election.gate(role).current_epoch == 2, "it was obeyed once"
        assert terms(superuser, role)[0]["reason"] == "released"


async def test_a_request_of_another_namespace_is_not_for_this_leader(node_dsn: str, superuser: str, role: str) -> None:
    async with LeaderElection(node_dsn, role, **STEADY) as election:
        await opens(election, role)
        one(node_dsn, "SELECT pgleaderlock.request_step_down(%s, 'elsewhere', NULL, 'pgleaderlock')", role)
        await beats_on(superuser, role, 3)
        assert election.gate(role).current_epoch == 1


async def test_an_advanced_epoch_is_noticed_and_a_higher_term_begins(node_dsn: str, superuser: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, **HASTY)
    story = Story(election)
    async with election:
        await opens(election, role)
        old = election.gate(role).require_leader()
        moved = one(superuser, "SELECT * FROM pgleaderlock.advance_epoch(%s, 'pgleaderlock', 'pgleaderlock')", role)
        assert (moved["old_epoch"], moved["new_epoch"]) == (1, 2**20)
        await story.heard("on_lost", role)
        await story.heard("on_acquired", role, times=2)
        await opens(election, role)
        assert election.gate(role).require_leader().epoch == 2**20 + 1
        with pytest.raises(NotLeader) as refused:
            election.gate(role).ensure_epoch(old.epoch)
        assert refused.value.reason == "epoch_changed"
    assert [term["reason"] for term in terms(superuser, role)] == ["superseded", "released"]


@pytest.mark.of_sessions
async def test_a_request_to_step_down_wakes_the_leader_at_once(node_dsn: str, superuser: str, role: str) -> None:
    slow = {**PATIENT, "heartbeat_interval_s": 400.0}
    election = LeaderElection(node_dsn, role, **slow)
    story = Story(election)
    async with election:
        await opens(election, role)
        one(superuser, "SELECT pgleaderlock.request_step_down(%s, 'pgleaderlock', NULL, 'pgleaderlock')", role)
        one(superuser, "SELECT pg_notify('pgleaderlock', 'requested')")
        await story.heard("on_released", role)


async def test_without_a_listener_a_superseded_leader_competes_again(node_dsn: str, superuser: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, listen_channel=None, **HASTY)
    story = Story(election)
    async with election:
        await opens(election, role)
        await until(lambda: election._run.engine is not None and election._run.engine._due.try_at == float("inf"))
        one(superuser, "SELECT pgleaderlock.advance_epoch(%s, 'pgleaderlock', 'pgleaderlock')", role)
        await story.heard("on_lost", role)
        await story.heard("on_acquired", role, times=2)


async def test_an_epoch_advanced_during_a_drain_is_a_loss_of_that_role_only(
    node_dsn: str, superuser: str, role: str
) -> None:
    roles = [role, f"{role}-other"]
    election = LeaderElection(node_dsn, roles, **STEADY)
    story = Story(election)
    async with election:
        for name in roles:
            await opens(election, name)
        with election.gate(role).acting():
            stepping = asyncio.ensure_future(election.step_down(role))
            await until(lambda: election.state(role) is LockState.RELEASING)
            one(superuser, "SELECT pgleaderlock.advance_epoch(%s, 'pgleaderlock', 'pgleaderlock')", role)
            await until(lambda: election.gate(role).current_epoch != 1)
        await bounded(stepping)
        await story.heard("on_acquired", role, times=2)
        assert election.gate(roles[1]).current_epoch == 1, "the other role was lost with it"
        assert [error for error in story.errors if not isinstance(error, PgLeaderLockError)] == []


# --- Notifications are hints


@pytest.mark.of_sessions
async def test_a_flood_of_forged_notifications_only_costs_time(node_dsn: str, superuser: str, role: str) -> None:
    leader, standby = (LeaderElection(node_dsn, role, node_id=name, **STEADY) for name in ("leads", "stands by"))
    async with running(leader, standby):
        acting = await somebody_acts([leader, standby], role)
        with admin(superuser) as conn:
            conn.execute(
                "SELECT pg_notify('pgleaderlock', (ARRAY['released', 'acquired', 'requested', '', %s])[1 + n %% 5]"
                " || repeat('x', n %% 7)) FROM generate_series(1, 5000) n",
                (role,),
            )
        await beats_on(superuser, role, 3)
        assert acting.gate(role).require_leader().epoch == 1
        assert holding(node_dsn, role) == 1


@pytest.mark.of_sessions
async def test_without_its_listener_an_election_still_works_and_gets_it_back(
    node_dsn: str, superuser: str, role: str
) -> None:
    node = f"ears-{uuid.uuid4().hex[:6]}"
    leader, follower = (
        LeaderElection(node_dsn, role, node_id=node, **timing) for timing in ({**PATIENT, **POLITE}, PATIENT)
    )
    listeners = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s AND pid <> ALL (%s)"

    def listening(but: list[int]) -> list[int]:
        with admin(superuser) as conn:
            return [row["pid"] for row in conn.execute(listeners, (f"pgleaderlock listen {node}%", but)).fetchall()]

    async with leader:
        await opens(leader, role)
        async with follower:
            await until(lambda: len(listening([])) == 2)
            deaf = listening([])
            with admin(superuser) as conn:
                for pid in deaf:
                    conn.execute("SELECT pg_terminate_backend(%s)", (pid,))
            await bounded(leader.step_down(role))
            await opens(follower, role)
            await until(lambda: len(listening(deaf)) == 2, "the listeners are back")


async def test_an_election_that_listens_to_nothing_still_hands_over(node_dsn: str, superuser: str, role: str) -> None:
    leader = LeaderElection(node_dsn, role, listen_channel=None, **{**PATIENT, **POLITE})
    async with leader:
        await opens(leader, role)
        async with LeaderElection(node_dsn, role, listen_channel=None, **PATIENT) as follower:
            await bounded(leader.step_down(role))
            await opens(follower, role)
            listening = "SELECT count(*) AS n FROM pg_stat_activity WHERE application_name LIKE 'pgleaderlock listen%%'"
            assert one(superuser, listening)["n"] == 0


@pytest.mark.of_sessions
async def test_a_release_wakes_a_standby_that_would_not_look_for_long(node_dsn: str, superuser: str, role: str) -> None:
    """Only the notification can have woken it: its own next look is ten minutes away."""
    leader = LeaderElection(node_dsn, role, **{**PATIENT, **POLITE})
    sleepy = {**PATIENT, "acquire_delay_s": (500.0, 550.0), "node_id": f"sleepy-{uuid.uuid4().hex[:6]}"}
    async with leader:
        await opens(leader, role)
        async with LeaderElection(node_dsn, role, **sleepy) as standby:
            listens = (
                "SELECT count(*) AS n FROM pg_stat_activity WHERE application_name LIKE %s AND query LIKE 'LISTEN%%'"
            )
            await until(lambda: one(superuser, listens, f"%listen {standby.node_id}%")["n"] == 1)
            await bounded(leader.step_down(role))
            await opens(standby, role)


# --- A leader that is silent but still there


@pytest.fixture
def silent_leader(node_dsn: str, role: str) -> Iterator[SilentLeader]:
    silent = SilentLeader(node_dsn, role, lease_s=0.2)
    yield silent
    silent.conn.close()


async def test_a_session_silent_for_twice_its_lease_is_ended_and_noted(
    node_dsn: str, superuser: str, role: str, silent_leader: SilentLeader
) -> None:
    async with LeaderElection(node_dsn, role, node_id="watchful", **STEADY) as election:
        await opens(election, role)
        assert election.gate(role).current_epoch == 2
    with pytest.raises(psycopg.OperationalError):
        silent_leader.conn.execute("SELECT 1")
    (evicted, after) = terms(superuser, role)
    assert (evicted["reason"], after["reason"]) == ("evicted", "released")
    note = one(
        superuser,
        "SELECT * FROM pgleaderlock.events WHERE kind = 'evicted' AND detail LIKE %s",
        f"silent session {silent_leader.session_id} %",
    )
    assert (note["node_id"], note["detail"].endswith("ended by watchful")) == ("silent", True)


async def test_without_eviction_a_silent_session_is_left_alone_and_reported_stale(
    node_dsn: str, superuser: str, role: str, silent_leader: SilentLeader
) -> None:
    async with LeaderElection(node_dsn, role, evict_stale=False, stale_threshold_s=0.5, **STEADY) as election:

        def silent_for_long() -> bool:
            leader = election.leader(role)
            return leader is not None and leader.stale and leader.unchanged_s > 0.8

        await until(silent_for_long)
        silent_leader.conn.execute("SELECT 1")
        assert holders(superuser, key_pair(role)) == [silent_leader.conn.info.backend_pid]
        assert election.state(role) is LockState.FOLLOWER


async def test_a_leader_that_beats_is_neither_stale_nor_evicted(node_dsn: str, superuser: str, role: str) -> None:
    """The leader's lease is short, and the standby watches it for many times that."""
    async with LeaderElection(node_dsn, role, node_id="lives", **HASTY) as leader:
        await opens(leader, role)
        async with LeaderElection(node_dsn, role, node_id="watches", **STEADY) as standby:
            await until(lambda: standby.leader(role) is not None)
            await beats_on(superuser, role, 25)
            seen = standby.leader(role)
            assert seen is not None
            assert not seen.stale
        assert leader.gate(role).current_epoch == 1


# --- Names and keys


async def test_a_role_whose_key_is_another_names_is_refused_and_not_merged(
    node_dsn: str, superuser: str, role: str
) -> None:
    key = int(uuid.uuid4().int % 2**62)
    second = f"{role}-second"
    election = LeaderElection(node_dsn, {second: key}, **STEADY)
    story = Story(election)
    async with LeaderElection(node_dsn, {role: key}, **STEADY) as first:
        await opens(first, role)
        await election.start()
        await bounded(first.drain())
        await story.heard("on_error")
        (error,) = story.errors
        assert isinstance(error, LockError)
        assert second in str(error)
        assert election.state(second) is LockState.FOLLOWER
        assert not election.gate(second).is_leader
        await until(lambda: holders(superuser, election._setup.keys[second]) == [])
    assert leader_row(superuser, role)["epoch"] == 1


async def test_a_keyed_role_that_was_renamed_is_led_under_its_new_name(node_dsn: str, role: str) -> None:
    """T is ten minutes: it opens at once, because the old name was given up cleanly."""
    key, renamed = int(uuid.uuid4().int % 2**62), f"{role}-renamed"
    async with LeaderElection(node_dsn, {role: key}, **PATIENT) as election:
        await opens(election, role)
    async with LeaderElection(node_dsn, {renamed: key}, **PATIENT) as election:
        await opens(election, renamed)


async def test_equal_names_in_two_namespaces_are_two_roles(node_dsn: str, role: str) -> None:
    one_node, two = (LeaderElection(node_dsn, role, namespace=name, **STEADY) for name in ("shop", "bank"))
    async with running(one_node, two):
        await opens(one_node, role)
        await opens(two, role)
        assert one_node.gate(role).require_leader().namespace == "shop"


# --- The heartbeat in a thread of its own, and the watchdog


async def test_with_a_heartbeat_thread_a_blocked_loop_keeps_the_term(node_dsn: str, superuser: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, heartbeat_thread=True, **STEADY)
    story = Story(election)
    async with election:
        await opens(election, role)
        token = election.gate(role).require_leader()
        heard_again = threading.Event()

        def watch() -> None:
            before = beat(superuser, role)
            while beat(superuser, role) < before + 5:
                pass
            heard_again.set()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        assert heard_again.wait(WAIT_S), "no heartbeat came while the loop was blocked"
        assert election.gate(role).require_leader() is token
        thread.join()
    await story.heard("on_stopped")
    assert [call[0] for call in story.events] == ["on_acquired", "on_released", "on_stopped"]
    assert leader_row(superuser, role)["clean"] is True


async def test_with_a_heartbeat_thread_the_rest_works_as_without(node_dsn: str, superuser: str, role: str) -> None:
    timing = {**STEADY, "late_threshold_s": 1.5, "session_lease_s": 2.0}
    elections = [LeaderElection(node_dsn, role, heartbeat_thread=True, **timing) for _ in range(2)]
    began: list[int] = []

    async def work(token: LeaderToken) -> None:
        began.append(token.epoch)
        await asyncio.Event().wait()

    async with running(*elections):
        leader = await somebody_acts(elections, role)
        leading = [asyncio.ensure_future(election.lead(role, work)) for election in elections]
        await until(lambda: began == [1])
        async with reading(leader) as changes:
            await bounded(leader.step_down(role, timeout_s=WAIT_S))
            await until(lambda: began == [1, 2])
            await changes.until(lambda change: change.epoch == 2)
        end_leader(node_dsn, role)
        await until(lambda: len(began) == 3)
    assert await bounded(asyncio.gather(*leading)) == [None, None]
    # Of two that shut down one after the other, the second may lead once more.
    assert [term["reason"] for term in terms(superuser, role)][:3] == ["released", "lost", "released"]


async def test_with_a_heartbeat_thread_a_missing_ledger_is_raised_by_start(dsn: str) -> None:
    before = threading.enumerate()
    with fresh_database(dsn) as empty, pytest.raises(SchemaError):
        await bounded(LeaderElection(empty, "r", heartbeat_thread=True, **STEADY).start())
    await until(lambda: set(threading.enumerate()) <= set(before))


STUCK = """
import asyncio, sys, threading
from pgleaderlock import LeaderElection

async def main():
    election = LeaderElection(sys.argv[1], "stuck", heartbeat_interval_s=0.1, late_threshold_s=0.5,
                              session_lease_s=1.0, hard_stop_after_s=0.3)
    await election.start()
    await election.gate("stuck").wait_open()
    with election.gate("stuck").acting():
        print("acting", flush=True)
        if sys.argv[2] == "blocked":
            threading.Event().wait()   # the loop never runs again, and the gate shuts by its deadline
        election.gate("stuck").disable()
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["blocked", "vetoed"])
async def test_a_process_that_goes_on_acting_behind_a_shut_gate_is_ended(dsn: str, how: str) -> None:
    with fresh_database(dsn, ledger=True) as own:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STUCK, own, how, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await bounded(process.communicate())
    assert (out, process.returncode) == (b"acting\n", 70), err.decode()
    assert b"hard_stop" in err


async def test_the_watchdog_leaves_those_alone_who_act_behind_an_open_gate(node_dsn: str, role: str) -> None:
    """If it did not, this test process would end."""
    async with LeaderElection(node_dsn, role, hard_stop_after_s=0.05, **STEADY) as election:
        await opens(election, role)
        with election.gate(role).acting():
            await beat_turns(election, role)
            await beat_turns(election, role)
        election.gate(role).disable()  # shut, but nobody acts
        await beat_turns(election, role)
    await until(lambda: not [thread for thread in threading.enumerate() if "watchdog" in thread.name])


# --- Nothing is left


def descriptors() -> set[str]:
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists the folder is gone by now
            found.add(f"{descriptor.name} {descriptor.readlink()}")
    return found


@pytest.mark.parametrize("threaded", [False, True])
async def test_a_run_leaves_no_task_no_descriptor_and_no_session(node_dsn: str, role: str, threaded: bool) -> None:
    """`dsn` looks for sessions and locks in the server."""

    async def cycle() -> None:
        elections = [LeaderElection(node_dsn, role, heartbeat_thread=threaded, **STEADY) for _ in range(2)]
        async with running(*elections):
            leader = await somebody_acts(elections, role)
            await bounded(leader.step_down(role, timeout_s=WAIT_S))

    await cycle()  # whatever is loaded once, is loaded now
    gc.collect()
    before = descriptors()
    threads = threading.enumerate()
    for _ in range(3):
        await cycle()
    gc.collect()
    await until(lambda: set(threading.enumerate()) <= set(threads))
    for _ in range(10):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert descriptors() - before == set()
