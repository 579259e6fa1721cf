"""The one proof that a server session is ours alone: for lock, guard, sync guard, election, server and doctor.

A pooler in transaction or statement mode gives each transaction any free server session of its pool, and there a lock
excludes nobody. It cannot be asked for its mode, so it is observed: our client and a second one send single statements
in turn, and each says which backend it ran on. In session mode each client stays on a backend of its own.

What decides (`_proof`) is a generator without I/O; `prove` and `prove_sync` only carry out its steps. Every sample is
one statement in a transaction of its own: the proof never opens a transaction, so it can neither leave one open nor
have one cut off by the pooler, and it sets nothing on any session.

Imports psycopg, `_conninfo`, `_sql`, `errors` and the standard library.
"""

import asyncio
import enum
import selectors
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any, NamedTuple

import psycopg
from psycopg import pq

from pgleaderlock._conninfo import scrub
from pgleaderlock._sql import statement
from pgleaderlock.errors import ConnectionError, UnsafeSessionError

__all__ = ["Backend", "prove", "prove_sync", "shared_error"]

# Each round has a new second client: behind one address there may be several poolers with a pool each.
ROUNDS = 4
SECOND_CLIENTS_MAX = 32
POOL_WAIT_S = 0.5
CONNECT_TIMEOUT_S = 5


class Backend(NamedTuple):
    """The server session that one statement ran on. A pid alone may be that of another server behind the pooler."""

    pid: int
    started: str | None
    client: str | None
    """The address that PostgreSQL sees: the pooler's. None for a Unix socket."""


class _Step(enum.Enum):
    OURS = enum.auto()
    """A sample of our own session: its `Backend`."""
    NEXT = enum.auto()
    """Close the second client, if any, and open another one."""
    OTHER = enum.auto()
    """A sample of the second client: its `Backend`, or None while the pooler makes it wait for one."""


# Each client follows itself and the other one: taking turns alone would look like two sessions in a pool of two that
# hands out its sessions in rotation.
_ROUND = (_Step.OTHER, _Step.OURS, _Step.OURS, _Step.OTHER, _Step.OTHER, _Step.OURS)


def _proof() -> Generator[_Step, Backend | None, Backend]:
    """Returns our backend when it is proven to be ours alone; raises when it is not."""
    ours = yield _Step.OURS
    assert ours is not None
    rounds = 0
    for _ in range(SECOND_CLIENTS_MAX):
        yield _Step.NEXT
        other: Backend | None = None
        for step in _ROUND:
            found = yield step
            if step is _Step.OURS:
                moved = found != ours
            else:
                moved = found is not None and (found == ours or (other is not None and found != other))
                other = found or other
            if moved:
                raise shared_error()
        # A second client that waits for a session while ours answers: a shared pool would have served it from ours, or
        # would have made us wait behind it. One that came by another pooler has shown nothing.
        if other is None or other.client == ours.client:
            rounds += 1
        if rounds == ROUNDS:
            return ours
    raise ConnectionError(
        f"the server session could not be proven to be ours alone: of {SECOND_CLIENTS_MAX} connections too few came by "
        "the same pooler as ours; connect to one pooler, or to PostgreSQL itself"
    )


async def prove(connection: psycopg.AsyncConnection[Any], ask: Callable[[], Awaitable[Backend]]) -> Backend:
    """Our backend, proven to be ours alone; `ask` runs `same_backend` on the connection, in autocommit.

    Raises `UnsafeSessionError` if the pooler shares it. Raises `ConnectionError` if that cannot be found out because no
    second connection can be opened or used: a lock on a session that may be shared is worse than none.
    """
    params = _params_of_second_client(connection.pgconn)
    steps, answer = _proof(), None
    other: _SecondClient | None = None
    try:
        while True:
            step = steps.send(answer)
            if step is _Step.OURS:
                answer = await ask()
                continue
            try:
                if step is _Step.NEXT:
                    _close(other)
                    opened = await psycopg.AsyncConnection.connect("", **params)  # type: ignore[arg-type]
                    other, answer = _SecondClient(opened.pgconn), None
                else:
                    assert other is not None
                    answer = await _sample(other)
            except psycopg.Error as error:
                raise _not_proven(error, params) from None
    except StopIteration as proven:
        backend: Backend = proven.value
        return backend
    finally:
        _close(other)


def prove_sync(connection: psycopg.Connection[Any], ask: Callable[[], Backend]) -> Backend:
    """The same for a blocking connection."""
    params = _params_of_second_client(connection.pgconn)
    steps, answer = _proof(), None
    other: _SecondClient | None = None
    try:
        while True:
            step = steps.send(answer)
            if step is _Step.OURS:
                answer = ask()
                continue
            try:
                if step is _Step.NEXT:
                    _close(other)
                    opened = psycopg.Connection.connect("", **params)  # type: ignore[arg-type]
                    other, answer = _SecondClient(opened.pgconn), None
                else:
                    assert other is not None
                    answer = _sample_sync(other)
            except psycopg.Error as error:
                raise _not_proven(error, params) from None
    except StopIteration as proven:
        backend: Backend = proven.value
        return backend
    finally:
        _close(other)


# --- The second client


class _SecondClient:
    """Sends a sample and reads its answer without blocking: the pooler may keep it waiting for longer than we do."""

    def __init__(self, pgconn: pq.abc.PGconn) -> None:
        self._pgconn = pgconn
        self._found: Backend | None = None
        self._asked = False

    @property
    def socket(self) -> int:
        return self._pgconn.socket

    def close(self) -> None:
        self._pgconn.finish()

    def ask(self) -> float:
        """Send a sample unless one is under way. Returns how long to wait for its answer."""
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
            pid, started, client = (result.get_value(0, column) for column in range(3))
            self._found = Backend(int(pid or 0), _text(started), _text(client))
        return None


def _close(second: _SecondClient | None) -> None:
    if second is not None:
        second.close()


async def _sample(second: _SecondClient) -> Backend | None:
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
        return second.answer()  # a loop that was held up finds the answer here
    finally:
        loop.remove_reader(descriptor)


def _sample_sync(second: _SecondClient) -> Backend | None:
    deadline = time.monotonic() + second.ask()
    with selectors.DefaultSelector() as selector:
        selector.register(second.socket, selectors.EVENT_READ)
        while (found := second.answer()) is None and (left_s := deadline - time.monotonic()) > 0:
            selector.select(left_s)
    return found


def _params_of_second_client(pgconn: pq.abc.PGconn) -> dict[str, str]:
    """What our connection was opened with, and exactly the server that it found; secrets included."""
    given = {option.keyword.decode(): option.val.decode() for option in pgconn.info if option.val}
    here = {"host": pgconn.host, "hostaddr": pgconn.hostaddr, "port": pgconn.port, "password": pgconn.password}
    given.pop("hostaddr", None)
    return {
        **given,
        **{name: value.decode() for name, value in here.items() if value},
        "connect_timeout": str(CONNECT_TIMEOUT_S),
        "target_session_attrs": "any",
    }


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


# --- What went wrong


def shared_error() -> UnsafeSessionError:
    return UnsafeSessionError(
        "pooler",
        "the pooler hands one server session to several clients (pool_mode transaction or statement), where a "
        "lock excludes nobody: use pool_mode=session or connect to PostgreSQL itself",
    )


def _not_proven(error: psycopg.Error, params: dict[str, str]) -> ConnectionError:
    return ConnectionError(
        "the server session could not be proven to be ours alone, because the second connection that this needs failed "
        f"({scrub(str(error), params)}): leave room for one more client at the pooler, or connect to PostgreSQL itself"
    )
