"""One-shot leadership: try once, and get a guard or an error.

For services that leave retrying to Kubernetes, systemd or cron. `acquire_leadership` sends one statement over your
connection: it neither waits nor retries. `acquire_leadership_with_retry` and `acquire_leadership_blocking` do, on a
separate connection.

A guard does not promise more than any lock: see the docstring of `lock`. On your own connection there is no lease
either: a frozen process keeps the lock until its connection ends. The helpers' connections have a lease.

Must never leave a lock behind that no guard holds.
"""

import asyncio
import os
import warnings
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, Self, TypeVar

import psycopg

from pgleaderlock._base.aio import cancel_and_wait, first_of, settle
from pgleaderlock._base.clock import BOOT_CLOCK, Clock
from pgleaderlock._base.logging import get_logger
from pgleaderlock._base.steps import run
from pgleaderlock._config.durations import check_timeout
from pgleaderlock._lock import guarding
from pgleaderlock._lock.guarding import Hangup, Holder
from pgleaderlock._pg.conninfo import ConnectionSettings, Dsn, check_dsn, default_application_name
from pgleaderlock._pg.session import DedicatedSession
from pgleaderlock.errors import (
    ConfigurationError,
    ConnectionError,
    DatabaseError,
    LockError,
    LockNotAcquired,
    PgLeaderLockError,
    UnsafeSessionError,
)
from pgleaderlock.keys import DEFAULT_NAMESPACE, KeyPair, key_pair
from pgleaderlock.models import RetryContext
from pgleaderlock.retry import JITTER, RetryStrategy, checked_delay_s, reconnect_jitter_s

__all__ = [
    "LeadershipGuard",
    "acquire_leadership",
    "acquire_leadership_blocking",
    "acquire_leadership_with_retry",
]

T = TypeVar("T")

# The helpers' own sessions are probed this often, and dropped by the server after a silence of the lease.
PROBE_INTERVAL_S = 5.0
STATEMENT_TIMEOUT_S = 5.0
LEASE_S = 15.0
# The session cuts a wait at the server into slices; this only bounds a single call of it.
SLICE_S_MAX = 60.0

_log = get_logger("pgleaderlock")


class _Backing(Protocol):
    """What holds a guard's lock: the caller's connection, or a session of our own."""

    @property
    def closed(self) -> bool: ...
    async def unlock(self, *, abandon: bool) -> bool: ...
    async def check(self) -> bool: ...
    async def lost(self) -> None: ...
    async def close(self) -> None: ...


class LeadershipGuard:
    """Leadership that was obtained. Call `release()` or leave the guard's block to end it; `lost()` returns if it is
    lost.

    It belongs to the process that obtained it: in a forked child it is not held, and sends nothing.
    """

    def __init__(self, name: str, key: KeyPair, backing: _Backing) -> None:
        self.name = name
        self.key = key
        self._backing: _Backing | None = backing
        self._owner_pid = os.getpid()
        self._turn = asyncio.Lock()

    @property
    def held(self) -> bool:
        """True while leadership was not released and the connection is not known to be closed. `check()` asks the
        server."""
        return self._backing is not None and os.getpid() == self._owner_pid and not self._backing.closed

    async def release(self) -> None:
        """Release leadership. A second call does nothing, and neither does a call in a forked child.

        Raises `DatabaseError` if the session had ended before: another node may have led in between.
        """
        await self._release(abandon=False)

    async def _release(self, *, abandon: bool) -> None:
        if os.getpid() == self._owner_pid:
            # One at a time: the unlock of a second call would free a lock that the connection has taken again in
            # between.
            async with self._turn:
                await self._release_once(abandon=abandon)

    async def _release_once(self, *, abandon: bool) -> None:
        backing = self._backing
        if backing is None:
            return
        if backing.closed:
            self._backing = None
            await backing.close()
            raise guarding.lost_before(self.name)
        try:
            unlocked = await backing.unlock(abandon=abandon)
        except PgLeaderLockError:
            if backing.closed:  # the session has ended: there is nothing left to release
                self._backing = None
                await backing.close()
            raise
        self._backing = None
        await backing.close()
        if not unlocked:
            raise guarding.not_held(self.name)

    async def check(self) -> bool:
        """Ask the server for proof that this same session holds the lock. False if it does not."""
        return self.held and self._backing is not None and await self._backing.check()

    async def lost(self) -> None:
        """Return when the session has died, noticed at the socket. Returns at once if nothing is held.

        Never reads from the connection. A network that drops packets silently is not noticed: call `check()` at
        intervals, or use a helper, whose sessions are probed.
        """
        if self.held and self._backing is not None:
            await self._backing.lost()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _kind: object, leaving: BaseException | None, _trace: object) -> None:
        if leaving is None:
            await self.release()
            return
        try:
            await self._release(abandon=True)
        except PgLeaderLockError as error:
            _log.failed_at_exit("release_failed", error, leaving, lock=self.name)

    def __del__(self) -> None:
        if getattr(self, "_backing", None) is not None and self.held:
            warnings.warn(
                f"the guard of {self.name!r} was dropped while it held leadership: release it, or use `async with`",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )


async def acquire_leadership(
    conn: psycopg.AsyncConnection[Any], name: str, *, namespace: str = DEFAULT_NAMESPACE, allow_pooler: bool = False
) -> LeadershipGuard:
    """Try once to lead `name` on this open connection, which must be in autocommit. Neither waits nor retries.

    Raises `LockNotAcquired` if another session leads, and `DatabaseError` for every other failure. If it is cancelled
    during the statement, the connection is closed, because it is unknown whether the lock was granted.
    """
    keys = key_pair(name, namespace)
    guarding.check_kind(conn, psycopg.AsyncConnection)
    holder = await run(guarding.take(conn, name, keys, allow_pooler=allow_pooler))
    return LeadershipGuard(name, keys, _OnConnection(conn, name, keys, holder))


async def acquire_leadership_with_retry(
    dsn: Dsn,
    name: str,
    policy: RetryStrategy,
    *,
    namespace: str = DEFAULT_NAMESPACE,
    allow_pooler: bool = False,
) -> LeadershipGuard:
    """Try repeatedly to lead `name` on a separate connection, with the policy's delays.

    When the policy gives up (None), the last error is raised: `LockNotAcquired` or `DatabaseError`. Cancelling it
    leaves nothing held. The guard's connection is probed, has a lease at the server, and is closed by `release()`.
    """
    if isinstance(policy, type) or not isinstance(policy, RetryStrategy):
        raise ConfigurationError("policy needs a method next_delay_s(ctx): see pgleaderlock.retry")
    seeker = _Seeker(dsn, name, namespace, allow_pooler=allow_pooler)
    policy = policy.copy() if hasattr(policy, "copy") else policy
    began = seeker.clock.now()
    attempt = 0
    async with seeker:
        while True:
            attempt += 1
            try:
                if await seeker.take():
                    return seeker.guard()
                error: LockNotAcquired | ConnectionError = await seeker.not_acquired()
            except UnsafeSessionError as refusal:
                raise DatabaseError(str(refusal)) from refusal  # a retry would not change the pooler
            except ConnectionError as failure:
                error = failure
            reason = None if isinstance(error, LockNotAcquired) else error
            _log.info("attempt_failed", lock=name, attempt=attempt, error=error)
            delay_s = checked_delay_s(policy.next_delay_s(RetryContext(attempt, seeker.clock.now() - began, reason)))
            if delay_s is None:
                raise error if isinstance(error, LockNotAcquired) else DatabaseError(str(error)) from error
            if reason is not None:
                delay_s += reconnect_jitter_s(delay_s, seeker.rng)
            await seeker.clock.sleep(delay_s)


async def acquire_leadership_blocking(
    dsn: Dsn,
    name: str,
    timeout_s: float | None = None,
    *,
    namespace: str = DEFAULT_NAMESPACE,
    allow_pooler: bool = False,
) -> LeadershipGuard:
    """Wait at the server to lead `name`, on a separate connection. Raises `LockNotAcquired` after `timeout_s`.

    The wait is cut into slices of about half a second, so that it delays neither vacuum nor the creation of an index;
    within a slice, waiters are served first come, first served. Cancelling it leaves nothing held.
    """
    check_timeout(timeout_s)
    seeker = _Seeker(dsn, name, namespace, allow_pooler=allow_pooler)
    deadline = None if timeout_s is None else seeker.clock.now() + timeout_s
    async with seeker:
        try:
            granted = await seeker.take()
            while not granted:
                left_s = SLICE_S_MAX if deadline is None else deadline - seeker.clock.now()
                if left_s <= 0:
                    raise await seeker.not_acquired()
                granted = await seeker.wait(min(left_s, SLICE_S_MAX))
        except (ConnectionError, LockError) as error:
            raise DatabaseError(str(error)) from error
        return seeker.guard()


# --- On the caller's connection


class _OnConnection:
    def __init__(self, conn: psycopg.AsyncConnection[Any], name: str, keys: KeyPair, holder: Holder) -> None:
        self._conn, self._name, self._keys, self._holder = conn, name, keys, holder
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def closed(self) -> bool:
        return self._ended.done() or self._conn.closed

    async def unlock(self, *, abandon: bool) -> bool:
        return await run(guarding.unlock(self._conn, self._name, self._keys, abandon=abandon))

    async def check(self) -> bool:
        return await run(guarding.check(self._conn, self._keys, self._holder))

    async def lost(self) -> None:
        loop = asyncio.get_running_loop()
        hangup = Hangup(self._conn.fileno())
        loop.add_reader(hangup.fileno(), settle, self._ended)
        try:
            await asyncio.shield(self._ended)
        finally:
            if not hangup.closed:  # in a forked child it is closed, and the copied loop must not be touched
                loop.remove_reader(hangup.fileno())
                hangup.close()

    async def close(self) -> None:
        guarding.forget(self._conn, self._keys)  # the connection belongs to the caller, and stays open
        settle(self._ended)


# --- On a session of our own


class _Seeker:
    """Opens a dedicated session and tries; closes it unless a guard has taken it over."""

    clock: Clock = BOOT_CLOCK
    rng = JITTER

    def __init__(self, dsn: Dsn, name: str, namespace: str, *, allow_pooler: bool) -> None:
        check_dsn(dsn)
        self._dsn = dsn
        self._name = name
        self._keys = key_pair(name, namespace)
        self._settings = ConnectionSettings(
            application_name=default_application_name(name),
            statement_timeout_s=STATEMENT_TIMEOUT_S,
            lease_s=LEASE_S,
            allow_pooler=allow_pooler,
        )
        self._session: DedicatedSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def take(self) -> bool:
        return await self._using(lambda session: session.take(self._keys))

    async def wait(self, wait_s: float) -> bool:
        return await self._using(lambda session: session.wait(self._keys, wait_s))

    async def not_acquired(self) -> LockNotAcquired:
        return guarding.not_acquired(self._name, await self._using(lambda session: session.holder(self._keys)))

    def guard(self) -> LeadershipGuard:
        assert self._session is not None
        session, self._session = self._session, None
        return LeadershipGuard(self._name, self._keys, _OnSession(session, self._name, self._keys, self.clock))

    async def _using(self, use: Callable[[DedicatedSession], Awaitable[T]]) -> T:
        """Use the session, opening one if there is none. If it fails, the next call opens another one."""
        if self._session is None:
            self._session = await DedicatedSession.open(self._dsn, self._settings)
        session = self._session
        try:
            return await use(session)
        except BaseException:
            self._session = None
            await session.close()
            raise


class _OnSession:
    """Renews the lease by probing, and notices the end of the session at the socket or at a failed probe."""

    def __init__(self, session: DedicatedSession, name: str, keys: KeyPair, clock: Clock) -> None:
        self._session, self._name, self._keys, self._clock = session, name, keys, clock
        self._turn = asyncio.Lock()  # probes and the guard's own statements take turns
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.ensure_future(self._keep())

    @property
    def closed(self) -> bool:
        return self._ended.done()

    async def unlock(self, *, abandon: bool) -> bool:
        try:
            async with self._turn:
                await self._session.unlock(self._keys)
            return True
        except ConnectionError as error:
            raise DatabaseError(f"releasing {self._name!r} failed: {error}") from error
        finally:
            await self.close()  # in any case: closing the session frees the lock

    async def check(self) -> bool:
        try:
            async with self._turn:
                return await self._session.held(self._keys)
        except UnsafeSessionError:
            return False  # another backend has answered
        except ConnectionError as error:
            raise DatabaseError(f"checking {self._name!r} failed: {error}") from error

    async def lost(self) -> None:
        await asyncio.shield(self._ended)

    async def close(self) -> None:
        try:
            await cancel_and_wait(self._keeper)
        finally:
            await self._session.close()
            settle(self._ended)

    async def _keep(self) -> None:
        try:
            while True:
                loss, _ = await first_of(self._session.lost(), self._clock.sleep(PROBE_INTERVAL_S))
                if not loss.cancelled():
                    break
                async with self._turn:
                    await self._session.probe(self._keys)
        except ConnectionError as error:
            _log.warning("leadership_lost", lock=self._name, error=error)
        await self._session.close()
        settle(self._ended)
