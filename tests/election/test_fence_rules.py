"""When a fence joins a transaction, when it tries again, and what it makes of a refusal: case by case, by hand.

The connection is a script, and so is the server's answer. Each claim is for both kinds of connections. That the fence
holds is shown on a server, in `test_fence.py`.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest
from psycopg import pq

from pgleaderlock import fence
from pgleaderlock.errors import ConfigurationError, ConnectionError, FenceLost, StaleEpoch
from pgleaderlock.models import LeaderToken

TOKEN = LeaderToken("r", 7, "node-a")
OTHER = LeaderToken("r", 8, "node-a")
IDLE, INTRANS = pq.TransactionStatus.IDLE, pq.TransactionStatus.INTRANS

Answers = list[Exception | None]


def refused(sqlstate: str) -> psycopg.Error:
    error = psycopg.Error("the server says no")
    error.sqlstate = sqlstate
    return error


RACED, STALE = "40001", "PGL02"


class Connection:
    """Writes down what happens to it; `answers` are those to the fence, and then it is granted."""

    def __init__(self, answers: Answers, **state: Any) -> None:
        self.answers = answers
        self.happened: list[str] = []
        self.holders: list[object] = []
        self.closed = state.get("closed", False)
        self.autocommit = state.get("autocommit", True)
        self.cursor_factory = psycopg.Cursor
        self.pgconn = SimpleNamespace(
            pipeline_status=state.get("pipeline", pq.PipelineStatus.OFF),
            transaction_status=state.get("status", IDLE),
            parameter_status=lambda _: self.application_name,
        )
        self.application_name: bytes | None = b""
        self.mark: object = None
        self.marks: str | None = None
        if "blocks" in state:
            self._num_transactions = state["blocks"]

    def answer(self, params: dict[str, object]) -> None:
        self.happened.append("fence")
        self.holders.append(params["holder"])
        if self.answers and (error := self.answers.pop(0)) is not None:
            raise error
        self.mark = params["mark"]
        self.application_name = f"app {self.mark}".encode()


class Way:
    """Both kinds of connections, used in the same way."""

    def __init__(self, *, blocking: bool) -> None:
        self.blocking = blocking
        self.in_block: Callable[[], None] = lambda: None

    def connect(self, *answers: Exception | None, **state: Any) -> Connection:
        made = Connection(list(answers), **state)

        @contextlib.contextmanager
        def transaction() -> Iterator[None]:
            made.happened.append("begin")
            before, made.pgconn.transaction_status = made.pgconn.transaction_status, INTRANS
            try:
                yield
            except BaseException:
                made.happened.append("rollback")
                raise
            finally:
                made.pgconn.transaction_status = before
            made.happened.append("commit")

        @contextlib.asynccontextmanager
        async def transaction_async() -> AsyncIterator[None]:
            with transaction():
                yield

        made.transaction = transaction if self.blocking else transaction_async  # type: ignore[attr-defined]
        return made

    async def write(self, conn: Connection, error: Exception | None = None, token: LeaderToken = TOKEN) -> None:
        """A fenced block that writes, or fails."""
        block = fence._PsycopgBlock(conn, token, fence.fence_params(token, 10.0))
        if self.blocking:
            with fence.fenced_sync(block) as same:
                self._in_block(conn, same, error)
        else:
            async with fence.fenced_async(block) as same:
                self._in_block(conn, same, error)

    def _in_block(self, conn: Connection, same: object, error: Exception | None) -> None:
        assert same is conn
        conn.happened.append("write")
        self.in_block()
        if error is not None:
            raise error


@pytest.fixture(params=[True, False], ids=["blocking", "async"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    class Cursor:
        def __init__(self, conn: Connection) -> None:
            self._conn = conn

        def execute(self, statement: bytes, params: dict[str, object] | None = None) -> "Cursor":
            if params is None:
                self._conn.happened.append("marks")
            else:
                self._conn.answer(params)
            return self

        def fetchone(self) -> tuple[str | None]:
            return (self._conn.marks,)

    class AsyncCursor(Cursor):
        async def execute(  # type: ignore[override]
            self, statement: bytes, params: dict[str, object] | None = None
        ) -> Cursor:
            return super().execute(statement, params)

        async def fetchone(self) -> tuple[str | None]:  # type: ignore[override]
            return super().fetchone()

    monkeypatch.setattr(fence, "plain_cursor", Cursor if request.param else AsyncCursor)
    return Way(blocking=request.param)


def race(sqlstate: str = RACED) -> StaleEpoch:
    error = StaleEpoch("overtaken")
    error.__cause__ = refused(sqlstate)
    return error


# --- Whose transaction it is


@pytest.mark.parametrize(
    "state", [{}, {"blocks": 0}, {"blocks": 1}, {"status": INTRANS}, {"status": INTRANS, "blocks": 0}]
)
async def test_a_transaction_of_its_own_is_begun_and_ended(way: Way, state: dict[str, Any]) -> None:
    conn = way.connect(**state)
    await way.write(conn)
    assert conn.happened == ["begin", "fence", "write", "commit"]


async def test_a_transaction_block_that_is_open_is_joined(way: Way) -> None:
    conn = way.connect(status=INTRANS, blocks=1)
    await way.write(conn)
    assert conn.happened == ["fence", "write"]


@pytest.mark.parametrize(
    ("state", "error", "says"),
    [
        ({"closed": True}, ConnectionError, "closed"),
        ({"pipeline": pq.PipelineStatus.ON}, ConfigurationError, "pipeline"),
        ({"status": pq.TransactionStatus.INERROR}, ConfigurationError, "failed transaction"),
        ({"status": pq.TransactionStatus.ACTIVE}, ConfigurationError, "busy"),
        ({"autocommit": False}, ConfigurationError, "autocommit is off and no transaction is open"),
    ],
    ids=["closed", "in a pipeline", "failed", "busy", "committed by its owner"],
)
async def test_on_a_connection_that_is_not_usable_nothing_is_sent(
    way: Way, state: dict[str, Any], error: type[Exception], says: str
) -> None:
    conn = way.connect(**state)
    with pytest.raises(error, match=says):
        await way.write(conn)
    assert conn.happened == []


@pytest.mark.parametrize("joined", [True, False])
async def test_a_transaction_that_ended_within_the_block_has_not_been_fenced_to_its_end(way: Way, joined: bool) -> None:
    conn = way.connect(**({"status": INTRANS, "blocks": 1} if joined else {}))
    way.in_block = lambda: setattr(conn.pgconn, "transaction_status", IDLE)
    with pytest.raises(FenceLost):
        await way.write(conn)
    assert conn.happened == (["fence", "write"] if joined else ["begin", "fence", "write", "rollback"])


async def test_another_transaction_that_is_open_at_the_end_of_the_block_is_not_the_fenced_one(way: Way) -> None:
    conn = way.connect()
    way.in_block = lambda: setattr(conn, "application_name", b"app")
    conn.marks = "[fence 00000000]"
    with pytest.raises(FenceLost):
        await way.write(conn)


@pytest.mark.parametrize("reported", [None, b"changed by the application"])
async def test_where_the_name_does_not_tell_the_server_is_asked_for_the_marks(way: Way, reported: bytes | None) -> None:
    conn = way.connect()

    def write() -> None:
        conn.marks = f"[fence 00000000] {conn.mark}"
        conn.application_name = reported

    way.in_block = write
    await way.write(conn)
    assert conn.happened == ["begin", "fence", "write", "marks", "commit"]


async def test_a_block_that_leaves_a_failed_transaction_is_left_to_the_end_of_that(way: Way) -> None:
    conn = way.connect()
    way.in_block = lambda: setattr(conn.pgconn, "transaction_status", pq.TransactionStatus.INERROR)
    await way.write(conn)
    assert conn.happened == ["begin", "fence", "write", "commit"]


# --- Once more


async def test_a_fence_that_was_overtaken_is_tried_again_in_a_new_transaction(way: Way) -> None:
    conn = way.connect(refused(RACED), refused(RACED))
    await way.write(conn)
    assert conn.happened == [*["begin", "fence", "rollback"] * 2, "begin", "fence", "write", "commit"]


async def test_a_fence_is_tried_three_times_and_no_more(way: Way) -> None:
    conn = way.connect(*[refused(RACED)] * 10)
    with pytest.raises(StaleEpoch):
        await way.write(conn)
    assert conn.happened == ["begin", "fence", "rollback"] * 3


async def test_a_definite_answer_is_not_asked_for_again(way: Way) -> None:
    conn = way.connect(refused(STALE))
    with pytest.raises(StaleEpoch):
        await way.write(conn)
    assert conn.happened == ["begin", "fence", "rollback"]


@pytest.mark.parametrize("blocks", [0, 1])
async def test_a_transaction_that_was_open_before_keeps_its_snapshot_and_is_not_tried_again(
    way: Way, blocks: int
) -> None:
    conn = way.connect(refused(RACED), status=INTRANS, blocks=blocks)
    with pytest.raises(StaleEpoch):
        await way.write(conn)
    assert conn.happened.count("fence") == 1


async def test_a_block_that_was_entered_is_not_run_twice_whatever_it_raises(way: Way) -> None:
    conn = way.connect()
    with pytest.raises(StaleEpoch):
        await way.write(conn, race())
    assert conn.happened == ["begin", "fence", "write", "rollback"]


def test_only_a_serialization_failure_is_a_race_by_whichever_name_a_driver_calls_it() -> None:
    assert fence.raced(race())
    assert not fence.raced(race(STALE))
    assert not fence.raced(StaleEpoch("without a cause"))
    other = StaleEpoch("of another driver")
    other.__cause__ = cast("BaseException", _Of())
    assert fence.raced(other)


class _Of(Exception):
    pgcode = RACED


# --- The answer


async def test_the_holder_is_compared_once_for_each_token_and_connection(way: Way) -> None:
    first, second = way.connect(), way.connect()
    for conn, token in ((first, TOKEN), (first, TOKEN), (second, TOKEN), (first, OTHER), (first, OTHER)):
        await way.write(conn, token=token)
    assert first.holders == ["node-a", None, "node-a", None]
    assert second.holders == ["node-a"]


async def test_a_holder_that_was_refused_is_compared_again(way: Way) -> None:
    conn = way.connect(refused(STALE))
    with pytest.raises(StaleEpoch):
        await way.write(conn)
    await way.write(conn)
    assert conn.holders == ["node-a", "node-a"]


async def test_an_error_that_is_none_of_the_fences_stays_what_it_is(way: Way) -> None:
    error = refused("57014")
    conn = way.connect(error)
    with pytest.raises(psycopg.Error) as raised:
        await way.write(conn)
    assert raised.value is error
    assert conn.happened == ["begin", "fence", "rollback"]
