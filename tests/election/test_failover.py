"""Failover, lost commits and cancelled waits: an epoch is never handed out twice, and nobody leads on a maybe."""

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest

from conftest import StartServer
from pgleaderlock import LeaderElection, LeaderToken, LockState, fenced
from pgleaderlock._pg import session
from pgleaderlock._pg.statements import statement
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.keys import key_pair
from pgleaderlock.migrate import advance_epoch, migrate
from support.counts import count
from support.election_node import Send, SendLog, election_node
from support.ledger_node import ledger_node
from support.servers import open_folder

WAIT_S = 30.0
POLL_S = 0.01
SHORT = {"heartbeat_interval_s": 0.3, "late_threshold_s": 0.6, "session_lease_s": 0.9, "acquire_delay_s": (0.05, 0.2)}
JUMP = 2**32


def fresh_role() -> str:
    return f"role-{uuid.uuid4()}"


@pytest.fixture
def sends(tmp_path: Path) -> SendLog:
    return SendLog(tmp_path / "sends")


@pytest.fixture
async def pair(throwaway_postgres: StartServer) -> AsyncIterator[tuple[EmbeddedPostgres, EmbeddedPostgres]]:
    """A primary with the ledger and a table, and a replica that has both."""
    primary = throwaway_postgres()
    await migrate(primary.dsn)
    await dba(primary, "CREATE TABLE orders (number bigint PRIMARY KEY, epoch bigint NOT NULL)")
    with open_folder() as folder:
        replica = await asyncio.to_thread(primary.make_replica, folder / "replica")
        try:
            yield primary, replica
        finally:
            await asyncio.to_thread(replica.close)


async def dba(server: EmbeddedPostgres, *statements: str) -> None:
    async with await psycopg.AsyncConnection.connect(server.dsn, autocommit=True, application_name="dba") as conn:
        for text in statements:
            await conn.execute(text.encode())


async def rows(server: EmbeddedPostgres, text: str, *params: object) -> list[tuple[object, ...]]:
    async with await psycopg.AsyncConnection.connect(server.dsn, autocommit=True, application_name="dba") as conn:
        return await (await conn.execute(text.encode(), params)).fetchall()


async def until_row(server: EmbeddedPostgres, text: str, *params: object) -> tuple[object, ...]:
    """The first row of this query, as soon as there is one: nothing announces it."""
    async with asyncio.timeout(WAIT_S):
        while not (found := await rows(server, text, *params)):
            await asyncio.sleep(POLL_S)
    return found[0]


async def terms(server: EmbeddedPostgres, role: str) -> dict[int, str]:
    found = await rows(server, "SELECT epoch, holder_identity FROM pgleaderlock.terms WHERE role = %s", role)
    return {int(str(epoch)): str(holder) for epoch, holder in found}


class Writer:
    """Writes fenced rows, one transaction each, and remembers which of them were acknowledged."""

    def __init__(self, dsn: str, token: LeaderToken, numbers: "itertools.count[int]") -> None:
        self._dsn, self._token, self._numbers = dsn, token, numbers
        self.acknowledged: list[int] = []
        self.tried = 0
        self._news = asyncio.Event()

    async def run(self) -> None:
        async with await psycopg.AsyncConnection.connect(self._dsn, autocommit=True, application_name="writer") as conn:
            while True:
                number = next(self._numbers)
                self.tried += 1
                async with fenced(conn, self._token):
                    await conn.execute("INSERT INTO orders VALUES (%s, %s)", (number, self._token.epoch))
                self.acknowledged.append(number)
                self._news.set()

    async def has_written(self, more: int) -> None:
        wanted = len(self.acknowledged) + more
        async with asyncio.timeout(WAIT_S):
            while len(self.acknowledged) < wanted:
                self._news.clear()
                await self._news.wait()


@contextlib.asynccontextmanager
async def writing(dsn: str, send: Send, numbers: "itertools.count[int]") -> AsyncIterator[Writer]:
    writer = Writer(dsn, LeaderToken(send.role, send.epoch, send.holder), numbers)
    task = asyncio.create_task(writer.run())
    try:
        yield writer
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=WAIT_S)


@pytest.mark.long
async def test_after_a_synchronous_failover_no_epoch_repeats_and_the_old_leader_writes_nothing_that_counts(
    pair: tuple[EmbeddedPostgres, EmbeddedPostgres], sends: SendLog
) -> None:
    """The standby is promoted while the old primary lives, and its leader with it."""
    primary, standby = pair
    await dba(primary, "ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
    await until_row(primary, "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'")
    role, numbers = fresh_role(), itertools.count()
    async with (
        election_node(primary.dsn, "old", role, sends.path, **SHORT) as old,
        election_node(primary.dsn, "beside", role, sends.path, **SHORT),
    ):
        before = await sends.until(lambda send: True)
        async with writing(primary.dsn, before, numbers) as stale:
            await stale.has_written(20)
            await asyncio.to_thread(standby.promote)
            async with election_node(standby.dsn, "new", role, sends.path, **SHORT):
                after = await sends.until(lambda send: send.node == "new")
                acknowledged = len(stale.acknowledged)
                async with writing(standby.dsn, after, numbers) as current:
                    await current.has_written(20)
                await sends.until(lambda send: send.before_ns > after.before_ns + 2 * 10**9)
                assert len(stale.acknowledged) == acknowledged, "acknowledged beside a newer leader"
                assert stale.tried == acknowledged + 1, "it is still waiting for an answer to the last one"
                kept = {int(str(number)) for (number,) in await rows(standby, "SELECT number FROM orders")}
                assert set(stale.acknowledged) <= kept, "an acknowledged write is missing after the failover"
                assert after.epoch % JUMP == 0, "the first epoch of a new history"
                new_terms = await terms(standby, role)
        assert (await old.asked("ask"))["epoch"] is None
        old_terms = await terms(primary, role)
    assert {epoch for epoch, holder in old_terms.items() if new_terms.get(epoch, holder) != holder} == set()
    assert sends.violations() == []
    assert all(len(holders) == 1 for holders in sends.epochs(role).values())


@pytest.mark.long
async def test_after_an_asynchronous_failover_that_lost_terms_no_epoch_repeats(
    pair: tuple[EmbeddedPostgres, EmbeddedPostgres], sends: SendLog
) -> None:
    primary, standby = pair
    role = fresh_role()
    async with election_node(primary.dsn, "old", role, sends.path, **SHORT) as old:
        common = await sends.until(lambda send: True)
        await until_row(standby, "SELECT 1 FROM pgleaderlock.terms WHERE role = %s", role)
        await cut_off(primary, standby)
        for _ in range(3):
            await old.asked("step_down")
            await sends.until(lambda send: send.node == "old")
        await asyncio.to_thread(standby.promote)
        async with election_node(standby.dsn, "new", role, sends.path, **SHORT) as new:
            await sends.until(lambda send: send.node == "new")
            for node, name in ((new, "new"), (old, "old"), (new, "new"), (old, "old")):
                await node.asked("step_down")
                await sends.until(lambda send, name=name: send.node == name)  # type: ignore[misc]
            histories = await terms(primary, role), await terms(standby, role)
    lost, kept = (set(history) - {common.epoch} for history in histories)
    assert len(lost) >= 5
    assert len(kept) >= 3
    assert not lost & kept, "an epoch was handed out in both histories"
    assert min(kept) == JUMP
    assert all(len(holders) == 1 for holders in sends.epochs(role).values())


async def cut_off(primary: EmbeddedPostgres, standby: EmbeddedPostgres) -> None:
    """From now on the standby hears of nothing."""
    await dba(standby, "ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()")
    await until_row(primary, "SELECT 1 WHERE NOT EXISTS (SELECT FROM pg_stat_replication)")


async def test_after_a_failover_that_lost_a_bump_a_clean_release_before_it_is_not_trusted(
    pair: tuple[EmbeddedPostgres, EmbeddedPostgres],
) -> None:
    """The row that the standby knew says clean; who led after it may act on the old primary for another ten minutes."""
    primary, standby = pair
    role = fresh_role()
    with ledger_node(primary.dsn, "first", gate_s=1, lease_s=2) as first, ledger_node(primary.dsn, "second") as second:
        assert first.end_term(role, first.lead(role), clean=True)
        first.unlock(role)
        await until_row(standby, "SELECT 1 FROM pgleaderlock.leaders WHERE role = %s AND clean", role)
        await cut_off(primary, standby)
        assert second.lead(role) == 2
        await asyncio.to_thread(standby.promote)
        with ledger_node(standby.dsn, "third", gate_s=1, lease_s=2) as third:
            assert third.lock(role)
            won = third.bump(role)
    assert (won["prev_clean"], won["prev_wait_t"]) == (False, 600.0)
    assert won["epoch"] == JUMP


@pytest.mark.long
async def test_after_a_failover_a_new_role_waits_as_long_as_a_leader_of_lost_commits_may_act(
    pair: tuple[EmbeddedPostgres, EmbeddedPostgres],
) -> None:
    """Whoever led it first did so in commits of which no trace is left. Later on, a new role opens at once again."""
    primary, standby = pair
    role = fresh_role()
    with ledger_node(primary.dsn, "first") as first:
        await until_row(standby, "SELECT 1 FROM pgleaderlock.sessions WHERE session_id = %s", first.session_id)
        await cut_off(primary, standby)
        assert first.lead(role) == 1
        await asyncio.to_thread(standby.promote)
        with ledger_node(standby.dsn, "second", gate_s=1, lease_s=2) as second:
            assert second.lock(role)
            won = second.bump(role)
            assert (won["prev_clean"], won["prev_wait_t"]) == (False, 600.0)
            await dba(standby, "UPDATE pgleaderlock.histories SET seen_at = seen_at - interval '1 hour'")
            assert second.lock("later")
            assert second.bump("later")["prev_clean"]


@pytest.mark.long
async def test_an_epoch_advanced_before_a_failover_that_lost_it_is_never_issued_again(
    pair: tuple[EmbeddedPostgres, EmbeddedPostgres],
) -> None:
    """On timeline 2 the epoch is advanced and used; the server of timeline 3 was cut off before that."""
    primary, second = pair
    role = fresh_role()
    with ledger_node(primary.dsn, "on-one") as leader:
        assert leader.lead(role) == 1
        await until_row(second, "SELECT 1 FROM pgleaderlock.leaders WHERE role = %s AND epoch = 1", role)
    await asyncio.to_thread(second.promote)
    with open_folder() as folder, ledger_node(second.dsn, "on-two") as leader:
        issued = [leader.lead(role)]
        third = await asyncio.to_thread(second.make_replica, folder / "third")
        try:
            await until_row(third, "SELECT 1 FROM pgleaderlock.leaders WHERE role = %s AND epoch = %s", role, issued[0])
            await cut_off(second, third)
            for _ in range(3):
                issued.append((await advance_epoch(second.dsn, role, namespace="pgleaderlock", channel="c"))[1])
                issued.append(int(leader.bump(role)["epoch"]))
            await asyncio.to_thread(third.promote)
            with ledger_node(third.dsn, "on-three") as other:
                others = [other.lead(role)]
                others += [(await advance_epoch(third.dsn, role, namespace="pgleaderlock", channel="c"))[1]]
                others += [int(other.bump(role)["epoch"])]
        finally:
            await asyncio.to_thread(third.close)
    assert issued == sorted(set(issued))
    assert others == sorted(set(others))
    assert min(others) > max(issued)


# --- Commits that are not on disk yet


async def _epochs_over_crashes(server: EmbeddedPostgres, crashes: int) -> list[int]:
    """The epochs of as many terms, each ended by a crash of the server as soon as it is known."""
    role, handed_out = fresh_role(), []
    for _ in range(crashes):
        won = asyncio.Event()
        election = LeaderElection(server.dsn, role, acquire_delay_s=(0.05, 0.1))
        election.on_acquired(lambda _, won=won: won.set())
        async with election:
            async with asyncio.timeout(WAIT_S):
                await won.wait()
            handed_out.append(election.gate(role).current_epoch or 0)
            await asyncio.to_thread(server.stop, "immediate")
        await asyncio.to_thread(server.start)
    return handed_out


@pytest.fixture
async def careless(throwaway_postgres: StartServer) -> EmbeddedPostgres:
    """A server whose DBA prefers speed: what is committed is on disk at some later time."""
    server = throwaway_postgres(wal_writer_delay="10s")
    await migrate(server.dsn)
    await dba(server, "ALTER DATABASE postgres SET synchronous_commit = off", "CHECKPOINT")
    return server


@pytest.mark.timeout(300)
async def test_no_epoch_is_issued_again_after_a_crash_though_commits_are_asynchronous(
    careless: EmbeddedPostgres,
) -> None:
    assert await rows(careless, "SHOW synchronous_commit") == [("off",)]
    epochs = await _epochs_over_crashes(careless, count(3, 20))
    assert epochs == sorted(set(epochs))


async def test_an_advanced_epoch_survives_a_crash_though_commits_are_asynchronous(careless: EmbeddedPostgres) -> None:
    role = fresh_role()
    with ledger_node(careless.dsn, "led") as led:
        led.lead(role)
    await dba(careless, "CHECKPOINT")
    _, advanced = await advance_epoch(careless.dsn, role, namespace="pgleaderlock", channel="c")
    await asyncio.to_thread(careless.restart, "immediate")
    assert await rows(careless, "SELECT epoch FROM pgleaderlock.leaders WHERE role = %s", role) == [(advanced,)]


async def test_a_reload_of_the_servers_files_makes_no_epoch_less_durable(throwaway_postgres: StartServer) -> None:
    server = throwaway_postgres(wal_writer_delay="10s")
    await migrate(server.dsn)
    role = fresh_role()
    election = LeaderElection(server.dsn, role, acquire_delay_s=(0.02, 0.05))
    gate, won = election.gate(role), asyncio.Queue[str]()
    election.on_acquired(won.put_nowait)
    epochs: list[int] = []

    async def led() -> None:
        """The next term has begun."""
        await asyncio.wait_for(won.get(), WAIT_S)
        assert await gate.wait_open(WAIT_S)
        epochs.append(gate.require_leader().epoch)

    async with election:
        await led()
        await dba(server, "ALTER SYSTEM SET synchronous_commit = off", "SELECT pg_reload_conf()", "CHECKPOINT")
        await until_row(server, "SELECT 1 WHERE current_setting('synchronous_commit') = 'off'")
        for _ in range(3):  # the election's session has read the files again by its second statement
            await election.step_down(role)
            await led()
        await asyncio.to_thread(server.restart, "immediate")
        await led()
    assert epochs == sorted(set(epochs))
    assert len(epochs) == 5


@pytest.mark.long
async def test_without_a_durable_commit_the_same_crashes_do_issue_an_epoch_again(
    careless: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = statement("ledger_open")
    durable = b"THEN set_config('synchronous_commit', 'on', false)"
    assert durable in whole
    forgetful = whole.replace(durable, b"THEN 'off'")
    monkeypatch.setattr(session, "statement", lambda name: forgetful if name == "ledger_open" else statement(name))
    epochs = await _epochs_over_crashes(careless, 4)
    assert len(set(epochs)) < len(epochs)


# --- A maybe


@pytest.mark.long
@pytest.mark.parametrize("dba_hides_warnings", [False, True])
async def test_a_cancelled_wait_for_a_standby_is_not_led_on(
    throwaway_postgres: StartServer, dba_hides_warnings: bool
) -> None:
    """The bump is committed here and nowhere else, which the server calls a warning: nobody leads on that."""
    server = throwaway_postgres()
    await migrate(server.dsn)
    if dba_hides_warnings:
        await dba(server, "ALTER ROLE postgres SET client_min_messages = error")
    role = fresh_role()
    # No heartbeat comes in between, and what comes of the maybe is waited for as long as its T.
    timing = {"heartbeat_interval_s": 2.5, "late_threshold_s": 3.1, "session_lease_s": 3.6}
    election = LeaderElection(server.dsn, role, acquire_delay_s=(0.05, 0.1), **timing)  # type: ignore[arg-type]
    acquired: list[int | None] = []
    errors: list[Exception] = []
    failed = asyncio.Event()
    election.on_acquired(lambda role: acquired.append(election.gate(role).current_epoch))

    @election.on_error
    def note(error: Exception) -> None:
        errors.append(error)
        failed.set()

    async with await psycopg.AsyncConnection.connect(server.dsn, autocommit=True) as holder:
        await holder.execute("SELECT pg_advisory_lock(%s, %s)", key_pair(role))
        await election.start()
        # It has written all that it writes before it leads: nothing but the bump is to wait for a standby.
        await until_row(server, "SELECT 1 FROM pgleaderlock.sessions WHERE beat > 0 AND cardinality(wants) > 0")
        await dba(server, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")
        await until_row(server, "SELECT 1 WHERE current_setting('synchronous_standby_names') = 'nobody'")
    (pid,) = await until_row(
        server, "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND query LIKE %s", "%.bump(%"
    )
    assert (election.state(role), acquired) == (LockState.FOLLOWER, [])
    await rows(server, "SELECT pg_cancel_backend(%s)", pid)
    async with asyncio.timeout(WAIT_S):
        await failed.wait()
    assert "unknown" in str(errors[0])
    assert election.gate(role).token is None
    assert acquired == []
    (maybe,) = await terms(server, role)
    await until_row(server, "SELECT 1 WHERE NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)", pid)
    await dba(server, "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
    assert await election.gate(role).wait_open(WAIT_S)
    assert acquired == [maybe + 1], "the epoch that may have been lost is never used"
    await election.shutdown()
