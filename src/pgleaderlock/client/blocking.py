"""The lock server's client for threads and scripts. The same as `aio`, waiting with threads instead of tasks.

What a lease does not promise: that nothing of yours is still on its way when it ends. Nobody can interrupt a thread:
ask `lease.raise_if_lost()` (or `lease.valid`) before each step, and give `lease.fencing_token` to what is acted upon.

Imports the client's other modules, `errors`, `_clock`, `_logging`. Must never decide what a flow decides.
"""

import contextlib
import os
import ssl
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Self, TypeVar

from pgleaderlock._clock import Clock
from pgleaderlock._logging import get_logger
from pgleaderlock.client import _batch
from pgleaderlock.client import _flows as flows
from pgleaderlock.client._core import Core, NoAnswer, Send
from pgleaderlock.client._lease import BaseLease, LeaseState
from pgleaderlock.client._sync_lease import Heart, Heartbeat, Lease
from pgleaderlock.client._sync_transport import SyncPool
from pgleaderlock.client._wire import Granted, LockInfo
from pgleaderlock.errors import LeaseLost, LockServerError

__all__ = ["LockClient"]

T = TypeVar("T")

CLEAN_UP_TIMEOUT_S = 5.0

_log = get_logger("pgleaderlock")
_clients: "weakref.WeakSet[LockClient]" = weakref.WeakSet()


class LockClient:
    """Leases from a lock server. Use it as a context manager, from any number of threads."""

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token: str | None = None,
        owner_id: str | None = None,
        connect_timeout_s: float = 2.0,
        request_timeout_s: float = 5.0,
        connections_max: int = 64,
        ssl_context: ssl.SSLContext | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._core = Core(
            urls,
            token=token,
            owner_id=owner_id,
            connect_timeout_s=connect_timeout_s,
            request_timeout_s=request_timeout_s,
            connections_max=connections_max,
            ssl_context=ssl_context,
            clock=clock,
        )
        self._pool = SyncPool(self._core)
        self._begin()
        _clients.add(self)

    def _begin(self) -> None:
        self._heart = Heart(self._core, self._run)
        self._background: set[threading.Thread] = set()

    @property
    def owner_id(self) -> str:
        """Who we are to the server; by default host, pid and a random part."""
        return self._core.owner_id

    def acquire(self, lock_name: str, ttl_s: float = 30.0, *, wait_s: float = 0.0) -> Lease:
        """A lease of this lock, or `LockHeld`. With `wait_s`, waits at the server for its turn, first in, first out."""
        attempt = flows.new_attempt(self._core, lock_name, ttl_s, wait_s)
        return self._attempt(attempt, flows.acquire(self._core, attempt, self._lease, attempt.wait_s))

    def acquire_with_retry(
        self,
        lock_name: str,
        ttl_s: float = 30.0,
        *,
        wait_s: float = 0.0,
        max_retries: int = 10,
        max_total_wait_s: float = 30.0,
    ) -> Lease:
        """Tries again when the lock is held or no server answers, as the server recommends, with jitter.

        Raises the last reason (`LockHeld`, `LockServerUnreachable`, …) after `max_retries` more tries, or when the next
        one would come later than `max_total_wait_s` after the first.
        """
        attempt = flows.new_attempt(self._core, lock_name, ttl_s, wait_s)
        plan = flows.RetryPlan(self._core, max_retries, max_total_wait_s)
        return self._attempt(attempt, flows.acquire_with_retry(self._core, attempt, self._lease, plan))

    def renew(self, lease: Lease, ttl_s: float | None = None) -> None:
        """Extends the lease from now, by its ttl or another one. Raises `LeaseLost` when it is gone."""
        self._run(flows.renew(self._core, lease, ttl_s))

    def release(self, lease: Lease) -> bool:
        """Gives the lease back. True if that ended it, False if it had ended before; a second time is no error.

        Raises `LockServerUnreachable` when no server answers: the lease is over for us all the same, and its ttl ends
        it at the server.
        """
        return self._run(flows.release(self._core, lease))

    def release_later(self, lease: Lease) -> None:
        """Gives the lease back in the background: for code that must not wait. Never raises; `close` waits for it."""
        lease._end(LeaseState.RELEASED)  # noqa: SLF001 - it is over for us from now on
        self._in_background(flows.release_again(self._core, lease))

    def get(self, lock_name: str) -> LockInfo:
        """The lock as the server sees it. For people and monitoring: it may have changed before you read it."""
        return self._run(flows.get(self._core, lock_name))

    def list_locks(self, prefix: str = "", *, page_size: int = 200) -> Iterator[LockInfo]:
        """Every lock whose name starts with `prefix`, in the order of names, page by page."""
        cursor: str | None = None
        while True:
            page = self._run(flows.list_page(self._core, prefix, cursor, page_size))
            yield from page.locks
            cursor = page.next_cursor
            if cursor is None:
                return

    def break_lock(self, lock_name: str) -> LockInfo:
        """Frees a lock by force (needs an admin token); gives it as it was. Its holder finds out when it renews."""
        return self._run(flows.break_lock(self._core, lock_name))

    def batch(self, operations: "Sequence[_batch.Operation]") -> "list[_batch.Outcome[Lease]]":
        """Up to 500 `Acquire`, `Renew` and `Release` in one call and one transaction; one outcome each, in order.

        An acquire gives a lease or a `LockHeld` (returned, not raised); renew and release give True or False.
        """
        attempt = _batch.BatchAttempt(self._core, operations)
        try:
            return self._run(_batch.batch(self._core, attempt, self._lease))
        except BaseException:
            if attempt.may_hold:
                self._in_background(_batch.clean_up(self._core, attempt))
            raise

    def start_heartbeat(self, lease: Lease, interval_s: float | None = None) -> Heartbeat:
        """Renews the lease in a thread, every third of its ttl by default, until it ends.

        A loss shows at once: `lease.lost` is set when the server says no, and when no renewal was acknowledged by the
        lease's deadline. All leases of a client are renewed together.
        """
        self._heart.add(lease, interval_s)
        return Heartbeat(lease, self._stop_heartbeat)

    @contextlib.contextmanager
    def lock(
        self,
        lock_name: str,
        ttl_s: float = 30.0,
        *,
        wait_s: float = 0.0,
        interval_s: float | None = None,
        max_retries: int = 0,
        max_total_wait_s: float = 30.0,
    ) -> Iterator[Lease]:
        """`with client.lock("job") as lease:` holds the lock while its body runs, and renews it in a thread.

        A thread cannot be interrupted: call `lease.raise_if_lost()` before each step. When the lease was lost,
        `LeaseLost` is raised at the end of the block in any case. At the end the lease is released.
        """
        lease = self.acquire_with_retry(
            lock_name, ttl_s, wait_s=wait_s, max_retries=max_retries, max_total_wait_s=max(wait_s, max_total_wait_s)
        )
        try:
            self.start_heartbeat(lease, interval_s)
            yield lease
        except BaseException:
            self._give_back(lease)
            raise
        loss = self._give_back(lease)
        if loss is not None:
            raise loss

    def close(self) -> None:
        """Ends heartbeats, finishes what was interrupted (bounded), and closes the connections. Releases no lease."""
        self._heart.close()
        until = time.monotonic() + CLEAN_UP_TIMEOUT_S
        for thread in list(self._background):
            thread.join(max(0.0, until - time.monotonic()))
        self._pool.close()

    def __enter__(self) -> Self:
        self._pool.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stop_heartbeat(self, lease: BaseLease) -> None:
        self._heart.discard(lease)  # that of this process, which may have been forked since

    # -- inside -------------------------------------------------------------------------------------------------------

    def _lease(self, granted: Granted, ttl_s: float, counted_from: float) -> Lease:
        return Lease(granted, ttl_s, counted_from, self._core.clock)

    def _give_back(self, lease: Lease) -> LeaseLost | None:
        """Releases; says whether the lease had been lost before, while its work went on."""
        if lease.state is LeaseState.RELEASED:
            return None
        if not lease.valid:
            loss = lease.loss()
            self.release_later(lease)  # who has lost it has to know now
            return loss
        try:
            return None if self.release(lease) else flows.found_lost(lease)
        except LockServerError as error:
            _log.warning("release_failed", lock=lease.lock_name, error=error)
            return None  # by our own clock it was ours until now

    def _run(self, flow: flows.Flow[T]) -> T:
        """Does what the flow asks for, until it is done. Whatever happens meanwhile is thrown into it."""
        try:
            step = next(flow)
            while True:
                try:
                    if isinstance(step, Send):
                        reply = self._pool.exchange(step)
                    else:
                        reply = None
                        time.sleep(step.delay_s)
                except NoAnswer as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(reply)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            flow.close()

    def _attempt(self, attempt: flows.AcquireAttempt, flow: flows.Flow[Lease]) -> Lease:
        try:
            return self._run(flow)
        except BaseException:
            # Interrupted, timed out or refused: the server may have granted what nobody here has received.
            if attempt.may_hold:
                self._in_background(flows.clean_up(self._core, attempt))
            raise

    def _in_background(self, flow: flows.Flow[Any]) -> None:
        def run() -> None:
            try:
                self._run(flow)
            except LockServerError as error:
                _log.info("clean_up_failed", error=error)  # the ttl does it
            finally:
                self._background.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="pgleaderlock-clean-up", daemon=True)
        self._background.add(thread)
        thread.start()


def _begin_anew() -> None:
    """In a forked child, which has none of its parent's threads, and perhaps what they had locked."""
    for client in _clients:
        client._pool.begin_anew()  # noqa: SLF001 - they are our own
        client._begin()  # noqa: SLF001


os.register_at_fork(after_in_child=_begin_anew)
