"""What a dedicated session does when a statement answers, fails, hangs or is given up; and what a ledger makes of it.

The connection here is a script with a real socket: no server, and no time passes. How long somebody would have waited
is read from what it asks the loop for.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest
from psycopg import pq

from pgleaderlock._election.ledger import Identity, Ledger, Request
from pgleaderlock._pg import session as _session
from pgleaderlock._pg.conninfo import ConnectionSettings
from pgleaderlock._pg.session import SEVER_TIMEOUT_S, DedicatedSession
from pgleaderlock.errors import ConnectionError, UnsafeSessionError
from support.fakes import limit, until

SETTINGS = ConnectionSettings("test", statement_timeout_s=3.0, lease_s=7.0)
KEYS = (11, 22)
SOUND = {
    "backend_pid": 99,
    "in_recovery": False,
    "idle_session_timeout": "0",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "client_min_messages": "warning",
    "search_path": "pg_catalog",
    "client_encoding": "UTF8",
    "deadlock_timeout": "1s",
}
CALLS_MAX = 100

Answer = list[Any] | BaseException | Callable[[], Any]


class PgConn:
    backend_pid = 99
    status = pq.ConnStatus.OK
    transaction_status = pq.TransactionStatus.IDLE

    def __init__(self, descriptor: int) -> None:
        self.socket = descriptor
        self.consumed = 0
        self.finished = False
        self.error: Exception | None = None
        self.notifications = 2
        self._calls = 0

    def consume_input(self) -> None:
        self.consumed += 1
        os.read(self.socket, 100)
        if self.error is not None:
            raise self.error

    def notifies(self) -> object:
        self._calls += 1
        assert self._calls < CALLS_MAX, "it asks for ever"
        self.notifications -= 1
        return object() if self.notifications >= 0 else None

    def finish(self) -> None:
        self.finished = True


class Connection:
    """Answers each statement with the next of `answers`: rows, an error, or what a function returns or awaits."""

    def __init__(self, descriptor: int) -> None:
        self.pgconn = PgConn(descriptor)
        self.closed = False
        self.answers: list[Answer] = []
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self.warn: Callable[[Any], None] = lambda _: None

    def add_notice_handler(self, handler: Callable[[Any], None]) -> None:
        self.warn = handler

    def cursor(self, row_factory: Any) -> "Connection":
        return self

    async def execute(self, name: bytes, params: Mapping[str, Any]) -> None:
        self.asked.append((name.decode(), params))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        self._rows = answer if isinstance(answer, list) else await answer()

    def nextset(self) -> bool:
        return False

    async def fetchall(self) -> list[Any]:
        return self._rows

    async def close(self) -> None:
        self.closed = True


class World:
    def __init__(self, settings: ConnectionSettings = SETTINGS) -> None:
        ours, self.server = socket.socketpair()
        self._ours = ours
        self.connection = Connection(ours.fileno())
        self.session = DedicatedSession(cast("psycopg.AsyncConnection[Any]", self.connection), {}, settings)
        self.session._watch()

    def is_watched(self) -> bool:
        """Whether somebody would notice the end of the session now. Asked once: it ends the watch."""
        return asyncio.get_running_loop().remove_reader(self.session._watched_fd)

    def lost(self) -> str | None:
        loss = self.session._loss
        return str(loss.result()) if loss.done() else None

    def cut_off(self) -> bool:
        """Whether the server sees the end of the stream."""
        self.server.setblocking(False)
        try:
            return self.server.recv(1) == b""
        except BlockingIOError:
            return False

    async def end(self) -> None:
        await self.session.close()
        self._ours.close()
        self.server.close()


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statements are known by their names."""
    monkeypatch.setattr(_session, "statement", lambda name: name.encode())


@pytest.fixture
async def world() -> Any:
    made = World()
    yield made
    await made.end()


@pytest.fixture
def time_is_up(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Whoever waits with a limit has waited that long, in no time: which limits there were."""
    limits: list[float | None] = []
    wait = asyncio.wait

    async def at_once(futures: Any, *, timeout: float | None = None, **how: Any) -> Any:
        limits.append(timeout)
        await asyncio.sleep(0)  # what was sent is on its way
        return await wait(futures, timeout=0, **how)

    monkeypatch.setattr(asyncio, "wait", at_once)
    return limits


async def never() -> None:
    await asyncio.get_running_loop().create_future()


def refused(sqlstate: str | None = "57014") -> psycopg.Error:
    error = psycopg.Error("the server says no")
    error.sqlstate = sqlstate
    return error


# --- The deadline of a statement


async def test_a_statement_is_waited_for_as_long_as_was_configured_and_then_its_connection_is_cut(
    world: World, time_is_up: list[float | None]
) -> None:
    world.connection.answers = [never]
    with pytest.raises(ConnectionError, match="did not answer 'probe' within 3 s"):
        await world.session.rows("probe")
    assert time_is_up == [SETTINGS.statement_timeout_s, SEVER_TIMEOUT_S]
    assert world.cut_off()
    assert (world.lost() or "").startswith("the server did not answer")
    assert not world.is_watched()
    with pytest.raises(ConnectionError, match="did not answer 'probe'"):
        await world.session.rows("another")
    assert [name for name, _ in world.connection.asked] == ["probe"], "it is never used again"
    running = world.session._running
    assert running is not None
    await until(running.done)
    assert running.cancelled(), "what does not notice the cut is not left behind"


async def test_a_statement_that_is_cut_and_ends_is_closed_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """psycopg notices the cut: there is nobody left to wait for."""
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def sever(_: object) -> None:
        gone.set_exception(psycopg.OperationalError("cut"))

    async def hang() -> None:
        await gone

    real = asyncio.wait
    limits: list[float | None] = []

    async def patient(futures: Any, *, timeout: float | None = None, **how: Any) -> Any:
        limits.append(timeout)
        return await real(futures, timeout=0.0 if len(limits) == 1 else timeout, **how)

    monkeypatch.setattr(_session, "sever", sever)
    monkeypatch.setattr(asyncio, "wait", patient)
    world.connection.answers = [hang]
    with pytest.raises(ConnectionError, match="within 3 s"):
        await world.session.rows("probe")
    assert world.connection.closed
    running = world.session._running
    assert running is not None
    assert running.done()


async def test_a_statement_that_is_cancelled_ends_the_session_because_its_answer_is_unknown(world: World) -> None:
    sent = asyncio.Event()

    async def hang() -> None:
        sent.set()
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_recv(twin, 1)
        raise psycopg.OperationalError("cut")

    with socket.socket(fileno=os.dup(world.connection.pgconn.socket)) as twin:
        twin.setblocking(False)
        world.connection.answers = [hang]
        asking = asyncio.ensure_future(world.session.rows("probe"))
        async with limit():
            await sent.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
    assert world.cut_off()
    assert world.connection.closed
    assert "was cancelled" in (world.lost() or "")


async def test_of_a_statement_that_is_given_up_in_the_middle_of_giving_up_no_error_is_left_unheard(
    world: World,
) -> None:
    """Or the loop tells the standard error that nobody asked how it ended."""
    go_on = asyncio.Event()

    async def hang() -> None:
        await go_on.wait()
        raise psycopg.OperationalError("cut")

    world.connection.answers = [hang]
    asking = asyncio.ensure_future(world.session.rows("probe"))
    await until(lambda: bool(world.connection.asked))
    asking.cancel()
    await until(world.cut_off)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    go_on.set()
    running = world.session._running
    assert running is not None
    await until(lambda: not cast("Any", running)._log_traceback and running.done())


async def test_an_error_of_a_statement_ends_the_session_though_it_was_an_answer(world: World) -> None:
    world.connection.answers = [refused()]
    with pytest.raises(ConnectionError, match="the server says no"):
        await world.session.rows("probe")
    assert world.connection.closed
    assert "the server says no" in (world.lost() or "")


async def test_rows_are_an_answer_and_the_session_is_watched_again(world: World) -> None:
    world.connection.answers = [[{"alive": 1}], []]
    assert await world.session.rows("probe") == [{"alive": 1}]
    assert await world.session._run("probe") == {}
    assert (world.lost(), world.connection.closed) == (None, False)
    assert world.is_watched()


async def test_while_a_statement_runs_nobody_else_reads_its_socket(world: World) -> None:
    go_on = asyncio.Event()

    async def hang() -> list[Any]:
        await go_on.wait()
        return []

    world.connection.answers = [hang]
    asking = asyncio.ensure_future(world.session.rows("probe"))
    await until(lambda: bool(world.connection.asked))
    assert not world.is_watched()
    go_on.set()
    await asking


async def test_what_nobody_needs_may_be_refused_by_a_server_that_is_ready_for_the_next(world: World) -> None:
    world.connection.answers = [refused()]
    assert await world.session.rows_or_none("ledger_prune") == []
    assert (world.lost(), world.connection.closed) == (None, False)
    assert world.is_watched()


@pytest.mark.parametrize("why", ["no answer of the server", "no error of the driver", "broken", "in a transaction"])
async def test_what_nobody_needs_ends_the_session_all_the_same_if_its_outcome_is_unknown(
    world: World, why: str
) -> None:
    world.connection.answers = [refused()]
    if why == "no answer of the server":
        world.connection.answers = [refused(None)]
    elif why == "no error of the driver":
        error = RuntimeError("a bug")
        error.sqlstate = "57014"  # type: ignore[attr-defined]
        world.connection.answers = [error]
    elif why == "broken":
        world.connection.pgconn.status = pq.ConnStatus.BAD
    else:
        world.connection.pgconn.transaction_status = pq.TransactionStatus.INTRANS
    with pytest.raises(Exception):  # noqa: B017, PT011  # whatever it is, it is raised
        await world.session.rows_or_none("ledger_prune")
    assert world.connection.closed
    assert world.lost() is not None


# --- The end


async def test_the_end_of_an_idle_session_is_noticed_at_the_socket(world: World) -> None:
    world.connection.pgconn.error = psycopg.OperationalError("terminating connection")
    world.server.close()
    async with limit():
        assert "terminating connection" in str(await world.session.lost())
    assert not world.is_watched()


async def test_a_broken_connection_that_reads_well_is_an_end_too(world: World) -> None:
    world.connection.pgconn.status = pq.ConnStatus.BAD
    world.server.send(b"x")
    async with limit():
        assert "the connection is broken" in str(await world.session.lost())
    assert world.connection.pgconn.consumed == 1
    assert not world.is_watched()


async def test_a_notification_is_read_and_is_no_end(world: World) -> None:
    world.server.send(b"x")
    await until(lambda: world.connection.pgconn.notifications < 0)
    assert world.lost() is None
    assert world.is_watched()


async def test_a_connection_that_is_closed_when_it_should_be_watched_is_lost(world: World) -> None:
    async def closes() -> list[Any]:
        world.connection.closed = True
        return []

    world.connection.answers = [closes]
    await world.session.rows("probe")
    assert "the session has ended" in (world.lost() or "")
    assert not world.is_watched()


async def test_a_closed_session_keeps_no_descriptor_and_may_be_closed_again(world: World) -> None:
    descriptor = world.session._watched_fd
    await world.session.close()
    assert not world.is_watched()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert world.connection.closed
    kept = os.open(os.devnull, os.O_RDONLY)  # takes the number that has become free
    try:
        await world.session.close()
        os.fstat(kept)
    finally:
        os.close(kept)


async def test_a_session_that_is_closed_under_a_statement_is_cut_and_freed_when_that_has_noticed(world: World) -> None:
    go_on = asyncio.Event()

    async def hang() -> list[Any]:
        await go_on.wait()
        return []

    world.connection.answers = [hang]
    asking = asyncio.ensure_future(world.session.rows("probe"))
    await until(lambda: bool(world.connection.asked))
    await world.session.close()
    assert world.cut_off()
    assert (world.connection.closed, world.connection.pgconn.finished) == (False, False)
    world.connection.closed = True  # as psycopg finds it
    go_on.set()
    await asking
    assert world.connection.pgconn.finished


async def test_a_session_without_a_statement_is_closed_the_ordinary_way(world: World) -> None:
    world.connection.answers = [[]]
    await world.session.rows("probe")
    await world.session.close()
    assert (world.connection.closed, world.connection.pgconn.finished, world.cut_off()) == (True, False, False)


# --- The statements


@contextlib.asynccontextmanager
async def session(settings: ConnectionSettings, *answers: Answer) -> Any:
    made = World(settings)
    made.connection.answers = list(answers)
    try:
        yield made
    finally:
        await made.end()


@pytest.mark.parametrize(("lease", "granted"), [("7000", True), ("", False)])
async def test_a_try_is_granted_with_its_lease(world: World, lease: str, granted: bool) -> None:
    world.connection.answers = [[{"lease": lease, "deadlock_timeout": "500ms"}]]
    assert await world.session.take(KEYS) is granted
    ((name, params),) = world.connection.asked
    assert (name, params["lease_ms"], params["backend_pid"]) == ("take", 7000, 99)
    assert world.session._deadlock_timeout_s == 0.5
    async with session(
        ConnectionSettings("test", 3.0, 7.0, allow_pooler=True), [{"lease": "", "deadlock_timeout": "1s"}]
    ) as pooled:
        await pooled.session.take(KEYS)
        assert pooled.connection.asked[0][0] == "take_pooled"


async def test_a_session_that_is_not_fit_for_the_lock_is_closed(world: World) -> None:
    world.connection.answers = [[{"lease": None, "deadlock_timeout": "1s"}], [{**SOUND, "in_recovery": True}]]
    with pytest.raises(UnsafeSessionError):
        await world.session.take(KEYS)
    assert world.connection.closed


@pytest.mark.parametrize(
    ("wait_s", "deadlock_timeout", "timeout_s", "slice_ms"),
    [
        pytest.param(60.0, "1s", 3.0, 500, id="half of deadlock_timeout"),
        pytest.param(60.0, "10s", 3.0, 1500, id="half of what a statement may take"),
        pytest.param(0.25, "1s", 3.0, 250, id="all of it"),
        pytest.param(0.0001, "1s", 3.0, 1, id="at least a millisecond: zero is for ever"),
    ],
)
async def test_a_wait_at_the_server_is_one_slice(
    wait_s: float, deadlock_timeout: str, timeout_s: float, slice_ms: int
) -> None:
    settings = ConnectionSettings("test", timeout_s, 7.0)
    verified = {**SOUND, "deadlock_timeout": deadlock_timeout}
    async with session(settings, [verified], [{"granted": True}], [{"granted": False}]) as made:
        await made.session.verify()
        assert await made.session.wait(KEYS, wait_s) is True
        assert await made.session.wait(KEYS, wait_s) is False
        name, params = made.connection.asked[1]
        assert (name, params["slice_ms"]) == ("wait_for_lock", slice_ms)


@pytest.mark.parametrize(
    "wrong",
    [
        {"backend_pid": 98},
        {"in_recovery": True},
        {"default_transaction_read_only": "on"},
        {"idle_session_timeout": "5s"},
        {"client_min_messages": "error"},
        {"search_path": "public"},
    ],
    ids=str,
)
async def test_a_session_on_which_a_lock_would_exclude_nobody_is_refused_and_closed(
    world: World, wrong: dict[str, Any]
) -> None:
    world.connection.answers = [[{**SOUND, **wrong}]]
    with pytest.raises(UnsafeSessionError):
        await world.session.verify()
    assert world.connection.closed


async def test_a_sound_session_is_verified_and_stays(world: World) -> None:
    world.connection.answers = [[SOUND]]
    await world.session.verify()
    assert not world.connection.closed


def test_the_servers_limits_are_those_that_were_configured_and_never_zero() -> None:
    def limits(**settings: Any) -> dict[str, int]:
        session = SimpleNamespace(_settings=ConnectionSettings("test", **settings))
        return DedicatedSession._timeouts_ms(cast("DedicatedSession", session))

    assert limits(statement_timeout_s=3.0, lease_s=7.0, idle_timeout_s=8.0) == {
        "statement_timeout_ms": 3000,
        "lease_ms": 7000,
        "idle_timeout_ms": 8000,
    }
    assert limits(statement_timeout_s=0.0001, lease_s=0.0001) == {
        "statement_timeout_ms": 1,
        "lease_ms": 1,
        "idle_timeout_ms": 0,
    }


# --- The ledger on top of it


class Rows:
    """A session that answers and remembers what it was asked."""

    def __init__(self, *answers: list[dict[str, Any]]) -> None:
        self.answers, self.asked = list(answers), list[tuple[str, dict[str, Any]]]()
        self.doubts: list[str] = []
        self.closed = False

    async def rows(self, name: str, **params: Any) -> list[dict[str, Any]]:
        self.asked.append((name, params))
        return self.answers.pop(0)

    rows_or_none = rows

    async def close(self) -> None:
        self.closed = True


def ledger(rows: Rows, *, version: int = 4) -> Ledger:
    made = Ledger(cast("DedicatedSession", rows), Identity("ns", "i", "me", "h", 1, "me-here", "test"), "channel")
    made.session_id, made.version = 40, version
    return made


BEAT = {"roles": 2, "epochs": 16, "settled": ["r"], "requests": None, "version": 4, "proven": True}
STEP_DOWN = {"request_id": 5, "kind": "step_down", "role": "r", "to_node_id": "two", "to_is_live": True}


async def test_a_heartbeat_names_what_is_settled_and_brings_what_was_asked() -> None:
    rows = Rows([{**BEAT, "requests": [STEP_DOWN]}], [BEAT])
    beat = await ledger(rows).beat(("r", "s"), draining=False)
    sent = {"session_id": 40, "settled": ["r", "s"], "draining": False, "key1": None, "key2": None}
    assert rows.asked == [("ledger_heartbeat", sent)]
    assert (beat.roles, beat.epochs, beat.settled) == (2, 16, frozenset({"r"}))
    assert beat.requests == (Request(5, "step_down", "r", "two", to_is_live=True),)
    assert (await ledger(rows).beat(())).requests == ()


async def test_a_heartbeat_asks_for_a_lock_that_the_session_holds() -> None:
    rows = Rows([BEAT])
    await ledger(rows).beat((), held=(1, -2))
    ((_, params),) = rows.asked
    assert (params["key1"], params["key2"]) == (1, -2)


async def test_a_heartbeat_that_another_backend_answers_or_that_finds_no_lock_ends_the_session() -> None:
    rows = Rows([{**BEAT, "proven": False, "version": 5}])
    made = ledger(rows, version=4)
    with pytest.raises(UnsafeSessionError, match="has lost it"):
        await made.beat((), held=(1, 2))
    assert rows.closed
    assert made.version == 4, "it is not this session's answer"


async def test_a_heartbeat_tells_the_version_of_a_ledger_that_was_upgraded() -> None:
    made = ledger(Rows([{**BEAT, "version": 5}]), version=4)
    await made.beat(("r",))
    assert made.version == 5


BUMP: dict[str, Any] = {
    "role": "r",
    "outcome": "won",
    "epoch": 8,
    "system_identifier": 7,
    "timeline": 2,
    "prev_session_id": 40,
    "prev_beat": 17,
    "prev_wait_t": 6.0,
    "prev_clean": False,
    "prev_instance": "11111111-1111-1111-1111-111111111111",
}


async def test_a_bump_is_told_with_its_history_and_its_predecessor() -> None:
    rows = Rows([BUMP, {**dict.fromkeys(BUMP), "role": "s", "outcome": "busy"}])
    won, busy = await ledger(rows).bump({"r": (1, 2), "s": (3, 4)}, wait_ms=100)
    assert (won.epoch, won.history, won.prev_instance) == (8, (7, 2), BUMP["prev_instance"])
    assert (won.prev_session_id, won.prev_beat, won.prev_wait_t, won.prev_clean) == (40, 17, 6.0, False)
    assert (busy.outcome, busy.epoch, busy.history, busy.prev_instance) == ("busy", None, None, None)
    ((name, params),) = rows.asked
    assert (name, params["session_id"], params["wait_ms"], params["channel"]) == ("ledger_bump", 40, 100, "channel")


async def test_terms_end_with_their_own_epochs_and_what_was_clean_of_them() -> None:
    rows = Rows([{"role": "r"}])
    assert await ledger(rows).end_terms({"r": (8, True), "s": (9, False)}) == {"r"}
    assert rows.asked == [
        (
            "ledger_end_term",
            {"session_id": 40, "roles": ["r", "s"], "epochs": [8, 9], "clean": [True, False], "reason": "released"},
        )
    ]


async def test_what_was_not_held_is_not_told_as_unlocked() -> None:
    rows = Rows([{"role": "r", "unlocked": True}, {"role": "s", "unlocked": False}], [])
    assert await ledger(rows).unlock({"r": (1, 2), "s": (3, 4)}) == {"r"}
    assert rows.asked[1] == ("ledger_hint", {"channel": "channel", "hint": "released"})


@pytest.mark.parametrize(
    ("write", "answer"),
    [
        (lambda made: made.beat(()), [BEAT]),
        (lambda made: made.bump({"r": (1, 2)}), [BUMP]),
        (lambda made: made.end_terms({"r": (8, True)}), [{"role": "r"}]),
    ],
    ids=["beat", "bump", "end of a term"],
)
async def test_a_write_that_the_server_warned_of_is_led_on_by_nobody_and_ends_the_session(
    write: Callable[[Ledger], Awaitable[object]], answer: list[dict[str, Any]]
) -> None:
    """A wait for a synchronous standby that was cancelled is only a warning: the commit may be lost."""
    rows = Rows(answer)
    rows.doubts = ["canceling wait for synchronous replication"]
    with pytest.raises(ConnectionError, match="synchronous replication"):
        await write(ledger(rows))
    assert rows.closed


async def test_a_doubt_counts_for_the_statement_that_it_came_with_and_for_no_later_one(world: World) -> None:
    async def warned() -> list[Any]:
        for severity, sqlstate, text in (
            ("WARNING", "01000", "a wait was cancelled"),
            ("WARNING", "25P01", "there is no transaction in progress"),
            ("NOTICE", "01000", "a notice"),
        ):
            world.connection.warn(
                SimpleNamespace(severity_nonlocalized=severity, sqlstate=sqlstate, message_primary=text)
            )
        return []

    world.connection.answers = [warned, []]
    await world.session.rows("ledger_bump")
    assert world.session.doubts == ["a wait was cancelled"]
    await world.session.rows("ledger_bump")
    assert world.session.doubts == []
