"""Opens and cuts connections, and proves that a server session belongs to us alone.

Client-side cursors send each statement as one simple-query message, and nothing is prepared: the server never waits
between a Parse and its Sync, and a pooler may run the next statement on another backend.

Must never explain why a connect failed: the caller knows whether a program or a person will read it.
"""

import asyncio
import contextlib
import enum
import os
import secrets
import selectors
import socket
import time
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple, Protocol

import psycopg
from psycopg import pq
from psycopg.rows import dict_row, tuple_row

from pgleaderlock._base.aio import being_cancelled
from pgleaderlock._base.steps import Steps
from pgleaderlock._pg.conninfo import CONNECT_TIMEOUT_S, Dsn, resolve, scrub
from pgleaderlock._pg.explain import shared_error
from pgleaderlock._pg.statements import statement
from pgleaderlock.errors import ConfigurationError, ConnectionError

__all__ = [
    "AnyConnection",
    "Backend",
    "Sample",
    "connect",
    "patience_s",
    "plain_cursor",
    "prove",
    "resolved",
    "retrieve",
    "sample_of",
    "sampled",
    "sever",
]

AnyConnection = psycopg.AsyncConnection[Any] | psycopg.Connection[Any]

UNLIMITED_CONNECT_S = 130.0


async def connect(params: Mapping[str, str]) -> psycopg.AsyncConnection[dict[str, Any]]:
    """Open a connection. Raises `psycopg.Error`, also when the server does not answer in time."""
    try:
        async with asyncio.timeout(patience_s(params)):
            return await psycopg.AsyncConnection.connect(
                "",
                autocommit=True,
                prepare_threshold=None,
                cursor_factory=psycopg.AsyncClientCursor,
                row_factory=dict_row,
                **params,  # type: ignore[arg-type]  # every value is text, which is one of the accepted types
            )
    except TimeoutError:
        raise psycopg.errors.ConnectionTimeout(f"the server did not answer within {patience_s(params):g} s") from None


def patience_s(params: Mapping[str, str]) -> float:
    """How long a connect may take: psycopg gives each listed host its connect_timeout; a name may have several
    addresses."""
    hosts = max(params.get(key, "").count(",") + 1 for key in ("host", "hostaddr"))
    try:
        each_s = float(params.get("connect_timeout", CONNECT_TIMEOUT_S))
    except ValueError:
        each_s = CONNECT_TIMEOUT_S
    if each_s <= 0:  # "no limit" in libpq, but psycopg limits it to about two minutes
        each_s = UNLIMITED_CONNECT_S
    return max(2.0, each_s) * hosts + 1.0


async def resolved(dsn: Dsn) -> str:
    """The DSN as text. If the user's callable fails, its error is not quoted: the text may contain the password."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            return await resolve(dsn)
    except ConfigurationError:
        raise
    except TimeoutError:
        raise ConnectionError(f"the DSN callable did not return within {CONNECT_TIMEOUT_S} s") from None
    except (Exception, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and being_cancelled():
            raise
        raise ConnectionError(f"the DSN callable failed with {type(error).__name__}") from None


def plain_cursor(connection: AnyConnection) -> Any:
    """A cursor that returns tuples, whatever cursor and row factories the caller's connection has."""
    if isinstance(connection, psycopg.AsyncConnection):
        return psycopg.AsyncCursor(connection, row_factory=tuple_row)
    return psycopg.Cursor(connection, row_factory=tuple_row)


def sever(connection: psycopg.AsyncConnection[Any]) -> None:
    """Shut the socket down in both directions without closing the descriptor, so that a task that waits on it wakes up.

    Cancelling that task instead would make psycopg send a cancel request to a silent server, and wait for it.
    """
    with contextlib.suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(connection.pgconn.socket)) as twin:
        twin.shutdown(socket.SHUT_RDWR)


def retrieve(future: "asyncio.Future[Any]") -> None:
    """A done callback of a future: retrieves its exception, so that asyncio does not report it as never retrieved."""
    if not future.cancelled():
        future.exception()


# --- The proof that a server session is ours alone
#
# A pooler in transaction or statement mode runs each transaction on any free server session of its pool, where an
# advisory lock excludes no other client. The pooler does not report its mode, so we observe it: our client and a second
# one send single statements in turn, and each statement returns the backend that it ran on. In session mode, each
# client keeps a backend to itself.
#
# `_proof` decides, as a generator without I/O; `prove` carries out its steps. Every sample is a single statement: the
# proof never opens a transaction, so it cannot leave one open, and the pooler cannot cut one off. It changes no session
# except in the last round. There our session, which looks like ours alone by then, is marked with a setting that
# nothing else reads. The second client must not see the mark, and we must see it every time.

# Each round has a new second client, because one address may lead to several poolers, each with its own pool.
ROUNDS = 4
SECOND_CLIENTS_MAX = 32
POOL_WAIT_S = 0.5
PROOF_CONNECT_TIMEOUT_S = 5


class Backend(NamedTuple):
    """The server session that a statement ran on. The pid is not enough: behind a pooler there may be several
    servers."""

    pid: int
    started: str | None
    client: str | None
    """The client address that PostgreSQL sees: the pooler's. None for a Unix socket."""
    mark: str | None = None
    """The mark that the last round has set on the session."""

    def is_same(self, other: "Backend") -> bool:
        return (self.pid, self.started) == (other.pid, other.started)


class _Step(enum.Enum):
    OURS = enum.auto()
    """A sample of our own session: its `Backend`."""
    NEXT = enum.auto()
    """Close the second client, if any, and open another one."""
    OTHER = enum.auto()
    """A sample of the second client: its `Backend`, or None while the pooler keeps it waiting."""
    MARK = enum.auto()
    """A sample of our own session that also marks it."""
    UNMARK = enum.auto()
    """The same, and removes the mark."""


# Each client sends both after itself and after the other one. If they only took turns, a shared pool of two sessions
# that are handed out in rotation would look like two separate sessions.
_ROUND = (_Step.OTHER, _Step.OURS, _Step.OURS, _Step.OTHER, _Step.OTHER, _Step.OURS)


def _proof() -> Generator[_Step, Backend | None, Backend]:
    """Returns our backend once it is proven to be ours alone; raises if it is shared."""
    ours = yield _Step.OURS
    assert ours is not None
    rounds = 0
    for _ in range(SECOND_CLIENTS_MAX):
        marked = rounds == ROUNDS - 1
        if marked:
            last, ours = ours, (yield _Step.MARK)
            assert ours is not None
            if not ours.is_same(last):
                raise shared_error()
        yield _Step.NEXT
        other: Backend | None = None
        for step in _ROUND:
            found = yield step
            if step is _Step.OURS:
                assert found is not None
                moved = not found.is_same(ours) or found.mark != ours.mark
            elif found is None:
                moved = False
            else:
                moved = found.is_same(ours) or (other is not None and not found.is_same(other))
                moved = moved or (marked and found.mark == ours.mark)
                other = found
            if moved:
                raise shared_error()
        # A second client that waits while ours is served proves that the pool is not shared: a shared pool would have
        # run its statement on our session, or would have made us wait behind it. A client of another pooler proves
        # nothing.
        if other is None or other.client == ours.client:
            rounds += 1
        if rounds == ROUNDS:
            yield _Step.UNMARK
            return ours
    raise ConnectionError(
        f"the server session could not be proven to be ours alone: of {SECOND_CLIENTS_MAX} connections too few came by "
        "the same pooler as ours; connect to one pooler, or to PostgreSQL itself"
    )


class Sample(Protocol):
    """Runs `same_backend` on our connection in autocommit mode, or `mark_backend` if there is a mark."""

    def __call__(self, mark: str | None = None) -> Steps[Backend]: ...


def prove(connection: AnyConnection, sample: Sample) -> Steps[Backend]:
    """Prove that our backend serves this connection only, and return it.

    Raises `UnsafeSessionError` if the pooler shares it. Raises `ConnectionError` if that cannot be found out because no
    second connection can be opened or used: a lock on a session that may be shared is worse than none.
    """
    is_async = isinstance(connection, psycopg.AsyncConnection)
    kind: Any = psycopg.AsyncConnection if is_async else psycopg.Connection
    params = _params_of_second_client(connection.pgconn)
    steps, answer = _proof(), None
    marks = {_Step.OURS: None, _Step.MARK: secrets.token_hex(8), _Step.UNMARK: ""}
    other: _SecondClient | None = None
    try:
        while True:
            step = steps.send(answer)
            if step in marks:
                answer = yield from sample(marks[step])
                continue
            try:
                if step is _Step.NEXT:
                    _close(other)
                    other, answer = _SecondClient((yield kind.connect("", **params))), None
                else:
                    assert other is not None
                    answer = yield _asked(other) if is_async else _asked_blocking(other)
            except psycopg.Error as error:
                raise _not_proven(error, params) from None
    except StopIteration as proven:
        return proven.value  # type: ignore[no-any-return]  # what `_proof` returns is a Backend
    finally:
        _close(other)


def sampled(connection: AnyConnection, mark: str | None = None) -> Steps[Backend]:
    """The backend that a statement runs on. Never prepared: the backend may be shared, and would keep the statement."""
    name, params = sample_of(mark)
    cursor = yield plain_cursor(connection).execute(statement(name), params, prepare=False)
    return Backend(*(yield cursor.fetchone()))


def sample_of(mark: str | None) -> tuple[str, dict[str, str]]:
    """The statement of a sample, and its parameters."""
    return ("same_backend", {}) if mark is None else ("mark_backend", {"mark": mark})


# --- The second client


class _SecondClient:
    """Sends samples and reads their answers without blocking, because the pooler may let it wait longer than we
    want."""

    def __init__(self, connection: AnyConnection) -> None:
        self._connection = connection  # keep a reference: psycopg warns if a connection is dropped before it is closed
        self._pgconn = connection.pgconn
        self._found: Backend | None = None
        self._asked = False

    @property
    def socket(self) -> int:
        return self._pgconn.socket

    def close(self) -> None:
        self._pgconn.finish()

    def ask(self) -> float:
        """Send a sample unless one is under way. Returns how long to wait for the answer."""
        if self._asked:
            return 0.0
        self._pgconn.send_query(statement("same_backend"))
        self._pgconn.flush()
        self._asked = True
        return POOL_WAIT_S

    def answer(self) -> Backend | None:
        """The answer if it has come; raises if it is an error."""
        self._pgconn.consume_input()
        while not self._pgconn.is_busy():
            result = self._pgconn.get_result()
            if result is None:
                self._asked = False
                return self._found
            if result.ntuples != 1:
                raise psycopg.OperationalError(result.error_message.decode(errors="replace") or "no row")
            pid, *texts = (result.get_value(0, column) for column in range(4))
            self._found = Backend(int(pid or 0), *(None if text is None else text.decode() for text in texts))
        return None


def _close(second: _SecondClient | None) -> None:
    if second is not None:
        second.close()


async def _asked(second: _SecondClient) -> Backend | None:
    wait_s = second.ask()
    loop, readable, descriptor = asyncio.get_running_loop(), asyncio.Event(), second.socket
    loop.add_reader(descriptor, readable.set)
    try:
        async with asyncio.timeout(wait_s):
            while (found := second.answer()) is None:
                await readable.wait()
                readable.clear()
            return found
    except TimeoutError:
        return second.answer()  # the answer may have come while the loop was busy
    finally:
        loop.remove_reader(descriptor)


def _asked_blocking(second: _SecondClient) -> Backend | None:
    deadline = time.monotonic() + second.ask()
    with selectors.DefaultSelector() as selector:
        selector.register(second.socket, selectors.EVENT_READ)
        while (found := second.answer()) is None and (left_s := deadline - time.monotonic()) > 0:
            selector.select(left_s)
    return found


def _params_of_second_client(pgconn: pq.abc.PGconn) -> dict[str, str]:
    """The parameters of our connection, secrets included, with the exact server that it is connected to."""
    given = {option.keyword.decode(): option.val.decode() for option in pgconn.info if option.val}
    here = {"host": pgconn.host, "hostaddr": pgconn.hostaddr, "port": pgconn.port, "password": pgconn.password}
    given.pop("hostaddr", None)
    return {
        **given,
        **{name: value.decode() for name, value in here.items() if value},
        "connect_timeout": str(PROOF_CONNECT_TIMEOUT_S),
        "target_session_attrs": "any",
    }


def _not_proven(error: psycopg.Error, params: dict[str, str]) -> ConnectionError:
    return ConnectionError(
        "the server session could not be proven to be ours alone, because the second connection that this needs failed "
        f"({scrub(str(error), params)}): leave room for one more client at the pooler, or connect to PostgreSQL itself"
    )
