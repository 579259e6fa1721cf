"""What the stand-in for a session does when a message is answered, refused, lost or given up.

The connection here is a script with a real socket: no server, and no time passes but what the test says.
"""

import asyncio
import socket
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest

from pgleaderlock._pg import lease as _lease
from pgleaderlock._pg.conninfo import ConnectionSettings, Dsn
from pgleaderlock._pg.lease import LeaseSession
from pgleaderlock._pg.session import SEVER_TIMEOUT_S
from pgleaderlock.errors import ConnectionError, SchemaError, UnsafeSessionError
from support.fakes import FakeClock, limit, until

SETTINGS = ConnectionSettings("test", statement_timeout_s=2.5, lease_s=7.0)
DSN = "host=127.0.0.1 password=secret"
JITTER = 20.0
"""The first delay is 0.05 s times this: 1 s."""
HEARTBEAT = ("ledger_heartbeat", {"session_id": 40})

Answer = list[Any] | BaseException | Callable[[], Any]


class Connection:
    """Answers each message with the next of the world's answers: the rows of its statements, or an error."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._ours, self.server = socket.socketpair()
        self.pgconn = SimpleNamespace(socket=self._ours.fileno())
        self.closed = False
        self.warn: Callable[[Any], None] = lambda _: None

    def add_notice_handler(self, handler: Callable[[Any], None]) -> None:
        self.warn = handler

    def cursor(self, row_factory: Any) -> "Connection":
        return self

    async def execute(self, message: bytes, params: Mapping[str, Any]) -> None:
        self._world.asked.append((message.decode().split(";\n"), params))
        answer = self._world.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        self._sets = list(answer if isinstance(answer, list) else await answer())

    def nextset(self) -> bool:
        return bool(self._sets)

    async def fetchall(self) -> Any:
        return self._sets.pop(0)

    def cut_off(self) -> bool:
        """Whether the server sees the end of the stream."""
        self.server.setblocking(False)
        try:
            return self.server.recv(1) == b""
        except BlockingIOError:
            return False

    async def close(self) -> None:
        self.closed = True

    def free(self) -> None:
        self._ours.close()
        self.server.close()


class World:
    def __init__(self, dsn: Dsn = DSN) -> None:
        self.clock = FakeClock()
        self.jitter: list[tuple[float, float]] = []
        self.answers: list[Answer] = []
        self.asked: list[tuple[list[str], Mapping[str, Any]]] = []
        self.connections: list[Connection] = []
        self.connects: list[Mapping[str, str]] = []
        self.refusals: list[BaseException] = []
        """How the next attempts to connect fail."""
        rng = SimpleNamespace(uniform=self._uniform)
        self.session = LeaseSession(dsn, SETTINGS, clock=self.clock, rng=cast("Any", rng))
        self.session.recorded()

    def _uniform(self, low: float, high: float) -> float:
        self.jitter.append((low, high))
        return JITTER

    async def connect(self, params: Mapping[str, str]) -> Any:
        self.connects.append(params)
        if self.refusals:
            raise self.refusals.pop(0)
        self.connections.append(Connection(self))
        return self.connections[-1]

    def numbers(self) -> list[int | None]:
        return [params.get("number") for _, params in self.asked]

    async def heartbeat(self) -> list[Any]:
        async with limit():
            return await self.session.rows(HEARTBEAT[0], **cast("Any", HEARTBEAT[1]))

    async def sleeps_for(self, asking: "asyncio.Future[Any]") -> float | None:
        """How long the asker waits before it asks again; None if it has ended instead."""
        await until(lambda: asking.done() or bool(self.clock.waits_s()))
        return None if asking.done() else self.clock.waits_s()[0]


def answered(*rows: Any, before: int = 1) -> list[Any]:
    """The rows of a message: those of what comes before, of the statement itself, and of what ends it."""
    return [*([["before"]] * before), list(rows), ["done"]]


def refused(sqlstate: str | None) -> psycopg.Error:
    error = psycopg.Error("the server says no")
    error.sqlstate = sqlstate
    return error


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()
    monkeypatch.setattr(_lease, "connect", made.connect)
    monkeypatch.setattr(_lease, "statement", lambda name: name.encode())
    yield made
    for connection in made.connections:
        connection.free()


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


# --- The number of a message


async def test_what_a_lease_writes_is_one_message_under_the_next_number(world: World) -> None:
    world.answers = [answered("a", "b"), answered("c", before=3)]
    assert await world.heartbeat() == ["a", "b"]
    assert await world.session.rows("ledger_bump", None, "one", "two", session_id=40, roles="{r}") == ["c"]
    key = world.session.key
    assert world.asked == [
        (["lease_begin", "ledger_heartbeat", "lease_done"], {"session_id": 40, "key": key, "number": 1}),
        (
            ["lease_begin", "one", "two", "ledger_bump", "lease_done"],
            {"session_id": 40, "roles": "{r}", "key": key, "number": 2},
        ),
    ]
    assert len(world.connections) == 1


@pytest.mark.parametrize(("name", "params"), [("lease_look", {"namespace": "n"}), ("lease_ended", {"session_id": 40})])
async def test_what_a_lease_only_reads_has_no_number_and_no_key(
    world: World, name: str, params: dict[str, Any]
) -> None:
    world.answers = [[["row"]]]
    assert await world.session.rows(name, **params) == ["row"]
    assert world.asked == [([name], params)]


# --- A message without an answer


async def test_what_was_not_answered_is_asked_again_under_the_next_number_and_said_to_be_so(world: World) -> None:
    world.answers = [refused("08006"), refused(None), answered("row")]
    asking = asyncio.ensure_future(world.heartbeat())
    assert await world.sleeps_for(asking) == pytest.approx(0.05 * JITTER)
    assert not world.session.asked_again
    world.clock.advance(0.05 * JITTER)
    assert await world.sleeps_for(asking) == pytest.approx(0.1 * JITTER)
    assert world.session.asked_again
    world.clock.advance(0.1 * JITTER)
    assert await asking == ["row"]
    assert world.session.asked_again
    assert world.numbers() == [1, 2, 3]
    assert world.jitter == [(0.5, 1.5)] * 2
    assert [connection.closed for connection in world.connections] == [True, True, False], "each on its own connection"
    world.answers = [answered()]
    await world.heartbeat()
    assert not world.session.asked_again


@pytest.mark.parametrize("in_time", [False, True])
async def test_it_is_asked_again_only_while_nobody_can_have_ended_the_lease(world: World, in_time: bool) -> None:
    """That is until T after it was first asked."""

    async def late() -> None:
        world.clock.jump(SETTINGS.lease_s - 1.0 - (0.25 if in_time else 0.0))
        raise refused("08006")

    world.answers = [late, answered("row")]
    asking = asyncio.ensure_future(world.heartbeat())
    if in_time:
        assert await world.sleeps_for(asking) == pytest.approx(1.0)
        world.clock.advance(1.0)
        assert await asking == ["row"]
    else:
        assert await world.sleeps_for(asking) is None
        with pytest.raises(ConnectionError, match="the server says no"):
            await asking


async def test_before_the_lease_is_recorded_nothing_is_asked_again(world: World) -> None:
    world.session.opened = False
    world.answers = [refused("08006")]
    asking = asyncio.ensure_future(world.heartbeat())
    assert await world.sleeps_for(asking) is None
    with pytest.raises(ConnectionError, match="the server says no"):
        await asking


async def test_what_may_fail_is_asked_once(world: World) -> None:
    world.answers = [refused("08006"), refused("42501"), refused("42501"), [["row"]]]
    assert await world.session.rows_if_answered("lease_look") == []
    with pytest.raises(SchemaError):
        await world.session.rows_if_answered("lease_look")
    assert await world.session.rows_or_none("lease_look") == []
    assert await world.session.rows_or_none("lease_look") == ["row"]


@pytest.mark.parametrize(
    ("sqlstate", "error", "says"),
    [("PGL06", ConnectionError, "the lease has ended"), ("42501", SchemaError, "see the GRANTs")],
)
async def test_what_the_server_will_refuse_again_is_not_asked_again(
    world: World, sqlstate: str, error: type[Exception], says: str
) -> None:
    world.answers = [refused(sqlstate)]
    asking = asyncio.ensure_future(world.heartbeat())
    assert await world.sleeps_for(asking) is None
    with pytest.raises(error, match=says):
        await asking
    assert world.connections[0].closed


# --- Warnings


def warning(severity: str = "WARNING", sqlstate: str = "01000", text: str | None = "cancelled") -> Any:
    return SimpleNamespace(severity_nonlocalized=severity, sqlstate=sqlstate, message_primary=text)


@pytest.mark.parametrize(("text", "told"), [("cancelled", "cancelled"), (None, "a warning without a text")])
async def test_an_answer_with_a_warning_that_leaves_its_outcome_open_is_none(
    world: World, text: str | None, told: str
) -> None:
    async def warned() -> list[Any]:
        world.connections[-1].warn(warning(text=text))
        return answered("row")

    world.session.opened = False
    world.answers = [warned]
    with pytest.raises(ConnectionError, match=f"the server warned.*{told}"):
        await world.heartbeat()
    assert world.connections[0].closed
    world.answers = [answered("row")]
    assert await world.heartbeat() == ["row"], "the warning was of the message before"


@pytest.mark.parametrize("harmless", [warning("NOTICE"), warning(sqlstate="01007")], ids=["a notice", "another state"])
async def test_another_warning_leaves_an_answer_as_it_is(world: World, harmless: Any) -> None:
    async def told() -> list[Any]:
        world.connections[-1].warn(harmless)
        return answered("row")

    world.answers = [told]
    assert await world.heartbeat() == ["row"]


# --- A message that is given up


async def test_a_message_is_waited_for_as_long_as_was_configured_and_then_its_connection_is_cut(
    world: World, time_is_up: list[float | None]
) -> None:
    world.session.opened = False
    ended: list[bool] = []

    async def hangs() -> None:
        try:
            await never()
        finally:
            ended.append(True)

    world.answers = [hangs, answered("row")]
    with pytest.raises(ConnectionError, match=r"did not answer 'ledger_heartbeat' within 2\.5 s"):
        await world.heartbeat()
    assert time_is_up == [SETTINGS.statement_timeout_s, SEVER_TIMEOUT_S]
    assert world.connections[0].cut_off()
    assert world.connections[0].closed
    await until(lambda: bool(ended))


@pytest.mark.parametrize("times", [1, 2], ids=["once", "and again while it is given up"])
async def test_a_message_that_is_cancelled_leaves_no_connection_and_no_error_behind(world: World, times: int) -> None:
    go_on = asyncio.Event()
    tasks: list[Any] = []

    async def hangs() -> None:
        tasks.append(asyncio.current_task())
        await go_on.wait()
        raise psycopg.OperationalError("cut")

    world.answers = [hangs, answered("row")]
    asking = asyncio.ensure_future(world.heartbeat())
    await until(lambda: bool(tasks))
    asking.cancel()
    await until(world.connections[0].cut_off)
    if times == 1:
        go_on.set()
    else:
        asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert world.connections[0].closed is (times == 1)
    go_on.set()
    # Or the loop tells the standard error of an exception that nobody has retrieved.
    await until(lambda: tasks[0].done() and not tasks[0]._log_traceback)
    assert await world.heartbeat() == ["row"]
    assert len(world.connections) == 2, "it is never used again"


# --- The connection


async def test_a_connection_that_was_closed_is_replaced(world: World) -> None:
    world.answers = [answered("row"), answered("row")]
    await world.heartbeat()
    world.connections[0].closed = True
    await world.heartbeat()
    assert len(world.connections) == 2
    assert not world.session.asked_again


async def test_a_pooler_that_does_not_answer_is_waited_for_no_longer_than_a_statement(world: World) -> None:
    world.answers = [answered("row")]
    await world.heartbeat()
    (params,) = world.connects
    assert (params["connect_timeout"], params["application_name"]) == ("3", "pgleaderlock lease")
    assert params["host"] == "127.0.0.1"


async def test_while_nobody_can_connect_it_is_tried_again_once_the_lease_is_recorded(world: World) -> None:
    world.refusals, world.answers = [psycopg.OperationalError("no way")], [answered("row")]
    asking = asyncio.ensure_future(world.heartbeat())
    assert await world.sleeps_for(asking) == pytest.approx(1.0)
    world.clock.advance(1.0)
    assert await asking == ["row"]
    assert world.numbers() == [1], "nothing was sent before"


async def test_before_the_lease_is_recorded_it_is_told_why_nobody_can_connect(world: World) -> None:
    world.session.opened = False
    world.refusals = [psycopg.OperationalError("out of shared memory for secret")]
    with pytest.raises(ConnectionError, match="raise max_locks_per_transaction") as error:
        await world.heartbeat()
    assert "secret" not in str(error.value)


async def test_a_pooler_that_refuses_a_setting_of_the_dsn_is_told_with_what_to_remove(world: World) -> None:
    world.session.opened = False
    world.refusals = [psycopg.OperationalError("unsupported startup parameter: options")]
    with pytest.raises(UnsafeSessionError, match="remove `options`"):
        await world.heartbeat()


@pytest.mark.parametrize("recorded", [False, True])
async def test_a_dsn_callable_that_fails_is_asked_again_once_the_lease_is_recorded(
    world: World, recorded: bool
) -> None:
    failures = [RuntimeError("no password yet")]

    def dsn() -> str:
        if failures:
            raise failures.pop()
        return DSN

    world.session._dsn, world.session.opened = dsn, recorded
    world.answers = [answered("row")]
    asking = asyncio.ensure_future(world.heartbeat())
    if recorded:
        assert await world.sleeps_for(asking) == pytest.approx(1.0)
        world.clock.advance(1.0)
        assert await asking == ["row"]
    else:
        assert await world.sleeps_for(asking) is None
        with pytest.raises(ConnectionError, match="the DSN callable failed"):
            await asking
