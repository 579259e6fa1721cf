"""The lock server's client for threads and scripts: like `aio`, but with threads instead of tasks.

What a lease does not promise: that no write of yours is still under way when it ends. A thread cannot be interrupted:
call `lease.raise_if_lost()` (or check `lease.valid`) before each step, and pass `lease.fencing_token` to the resource
that you write to.

Must never decide what a flow or the heartbeat plan decides.
"""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar

from pgleaderlock._base.clock import LOOK_S, Clock
from pgleaderlock._base.logging import get_logger
from pgleaderlock.client import _flows as flows
from pgleaderlock.client._core import BaseClient, Core, NoAnswer, Send
from pgleaderlock.client._lease import BaseHeartbeat, BaseLease, HeartbeatPlan, LeaseState, Renewal
from pgleaderlock.client._sync_transport import SyncPool
from pgleaderlock.client._wire import Granted, LockInfo
from pgleaderlock.errors import LeaseLost, LockServerError

__all__ = ["Heart", "Heartbeat", "Lease", "LockClient"]

T = TypeVar("T")

# How long the heartbeat thread waits for a lease before it ends.
IDLE_S = 10.0
END_TIMEOUT_S = 5.0
CLEAN_UP_TIMEOUT_S = 5.0

_log = get_logger("pgleaderlock")
_clients: "weakref.WeakSet[LockClient]" = weakref.WeakSet()


class Lease(BaseLease):
    """A lease, for threads."""

    def __init__(self, granted: Granted, ttl_s: float, counted_from: float, clock: Clock) -> None:
        super().__init__(granted, ttl_s, counted_from, clock)
        self._lost: threading.Event | None = None  # made at the first use: most leases end without one

    @property
    def lost(self) -> threading.Event:
        """Set when the lease is lost, at the latest when a heartbeat or this property checks; never by a release."""
        if self.forked:
            lost = threading.Event()
            lost.set()
            return lost
        if self.state is LeaseState.LOST:
            self._end(LeaseState.LOST, "deadline")
        with self._mutex:
            if self._lost is None:
                self._lost = threading.Event()
                if self._state is LeaseState.LOST:
                    self._lost.set()
            return self._lost

    def _ended(self) -> None:
        if self._lost is not None and self._state is LeaseState.LOST:
            self._lost.set()

    def wait_lost(self, timeout_s: float | None = None) -> bool:
        """True once the lease is lost: the server said so, or the deadline has passed. False once it is released, or on
        a timeout."""
        until = None if timeout_s is None else self._clock.now() + timeout_s
        over = threading.Event()
        self._watch(over.set)
        try:
            while self._state is LeaseState.HELD and not self.forked:
                left_s = self.remaining_s
                if left_s <= 0:
                    self._end(LeaseState.LOST, "deadline")
                    break
                wait_s = min(left_s, LOOK_S)
                if until is not None:
                    if until <= self._clock.now():
                        return False
                    wait_s = min(wait_s, until - self._clock.now())
                over.wait(wait_s)
        finally:
            self._unwatch(over.set)
        return self.state is LeaseState.LOST


class Heartbeat(BaseHeartbeat[Lease]):
    """Renews one lease in a thread until it ends or `stop()` is called."""


class Heart:
    """Runs the heartbeat plan in a thread that exists while there is a lease to renew. It never waits for a response.

    Each call runs in a separate thread, so that a deadline is noticed while a server is silent.
    """

    def __init__(self, core: Core, run: Callable[[flows.Flow[None]], None]) -> None:
        self._core = core
        self._run_flow = run
        self._plan = HeartbeatPlan(core)
        self._changed = threading.Condition()
        self._news = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, lease: Lease, interval_s: float | None) -> None:
        self._plan.add(lease, interval_s)
        lease._watch(self._wake)  # noqa: SLF001 - the plan drops it as soon as it ends
        with self._changed:
            self._news = True
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._beat, name="pgleaderlock-heartbeat", daemon=True)
                self._thread.start()

    def discard(self, lease: BaseLease) -> None:
        self._plan.discard(lease)
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._news = True
            self._changed.notify()

    def _beat(self) -> None:
        while True:
            with self._changed:
                self._news = False
            due = self._plan.due()
            for batch in due.batches:
                threading.Thread(target=self._renew, args=(batch,), name="pgleaderlock-renew", daemon=True).start()
            now = self._core.clock.now()
            # The thread's clock stops while the machine sleeps: check the boot-time clock at least once per LOOK_S.
            wait_s = IDLE_S if due.wake_at is None else min(LOOK_S, max(0.0, due.wake_at - now))
            with self._changed:
                if not self._news and not self._closed:
                    self._changed.wait(wait_s)
                if self._closed or (due.wake_at is None and not self._news):
                    self._thread = None
                    return

    def _renew(self, batch: list[Renewal]) -> None:
        try:
            self._run_flow(flows.renew_together(self._core, self._plan, batch))
        except Exception as error:
            # The heartbeat must survive every failure: only the leases' own deadlines end them.
            self._plan.failed(batch, error)
        self._wake()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(END_TIMEOUT_S)


class LockClient(BaseClient):
    """Leases from a lock server. Use it as a context manager, from any number of threads."""

    def _open(self) -> None:
        self._pool = SyncPool(self._core)
        self._begin()
        _clients.add(self)

    def _begin(self) -> None:
        self._heart = Heart(self._core, self._run)
        self._background: set[threading.Thread] = set()

    def acquire(self, lock_name: str, ttl_s: float = 30.0, *, wait_s: float = 0.0) -> Lease:
        """A lease of this lock, or `LockHeld`. With `wait_s`, waits at the server for its turn, first in, first out."""
        attempt = flows.new_attempt(self._core, lock_name, ttl_s, wait_s)
        return self._attempt(attempt, flows.acquire(attempt, self._lease, attempt.wait_s))

    def acquire_with_retry(
        self,
        lock_name: str,
        ttl_s: float = 30.0,
        *,
        wait_s: float = 0.0,
        max_retries: int = 10,
        max_total_wait_s: float = 30.0,
    ) -> Lease:
        """Like `acquire`, but tries again when the lock is held or no server answers, as the server recommends.

        Delays are jittered. Raises the last reason (`LockHeld`, `LockServerUnreachable`, …) after `max_retries` more
        tries, or when the next one would come later than `max_total_wait_s` after the first.
        """
        attempt = flows.new_attempt(self._core, lock_name, ttl_s, wait_s)
        plan = flows.RetryPlan(self._core, max_retries, max_total_wait_s)
        return self._attempt(attempt, flows.acquire_with_retry(attempt, self._lease, plan))

    def renew(self, lease: Lease, ttl_s: float | None = None) -> None:
        """Renew the lease from now, for its ttl or another one. Raises `LeaseLost` if it has ended."""
        self._run(flows.renew(self._core, lease, ttl_s))

    def release(self, lease: Lease) -> bool:
        """Release the lease. True if that ended it, False if it had ended before; a second call is not an error.

        Raises `LockServerUnreachable` if no server answers. The lease is over here in any case; at the server it ends
        with its ttl.
        """
        return self._run(flows.release(self._core, lease))

    def release_later(self, lease: Lease) -> None:
        """Release the lease in the background, for code that must not wait. Never raises; `close` waits for it."""
        lease._end(LeaseState.RELEASED)  # noqa: SLF001 - the lease is over here from now on
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
        """Free a lock by force (needs an admin token); returns its state before that. The holder finds out when it
        renews."""
        return self._run(flows.break_lock(self._core, lock_name))

    def batch(self, operations: "Sequence[flows.Operation]") -> "list[flows.Outcome[Lease]]":
        """Up to 500 `Acquire`, `Renew` and `Release` in one call and one transaction; one outcome each, in order.

        The outcome of an acquire is a lease or a `LockHeld` (returned, not raised); that of renew and release is a
        bool.
        """
        attempt = flows.BatchAttempt(self._core, operations)
        return self._attempt(attempt, flows.batch(attempt, self._lease))

    def start_heartbeat(self, lease: Lease, interval_s: float | None = None) -> Heartbeat:
        """Renew the lease in a thread, every third of its ttl by default, until it ends.

        A loss is reported at once: `lease.lost` is set when the server refuses a renewal, or when none was acknowledged
        by the lease's deadline. All leases of a client are renewed together.
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
        """End heartbeats, clean up after interrupted calls (for a bounded time), and close the connections. Releases no
        lease."""
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

    # --- Inside

    def _stop_heartbeat(self, lease: BaseLease) -> None:
        self._heart.discard(lease)  # looked up now, because the process may have been forked since

    def _lease(self, granted: Granted, ttl_s: float, counted_from: float) -> Lease:
        return Lease(granted, ttl_s, counted_from, self._core.clock)

    def _give_back(self, lease: Lease) -> LeaseLost | None:
        """Release at the end of a `lock` block; returns the loss if the lease was lost while the block ran."""
        if lease.state is LeaseState.LOST:
            loss = lease.loss()
            self.release_later(lease)  # the block must raise the loss without delay
            return loss
        return self._run(flows.give_back(self._core, lease))

    def _run(self, flow: flows.Flow[T]) -> T:
        """Carry out the steps of a flow until it is done."""
        try:
            step = next(flow)
            while True:
                try:
                    if isinstance(step, Send):
                        response = self._pool.exchange(step)
                    else:
                        response = None
                        time.sleep(step.delay_s)
                except NoAnswer as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(response)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            flow.close()

    def _attempt(self, attempt: flows.Attempt, flow: flows.Flow[T]) -> T:
        try:
            return self._run(flow)
        except BaseException:
            # Interrupted, timed out or refused: the server may have granted a lease that the caller has not received.
            if attempt.may_hold:
                self._in_background(attempt.clean_up())
            raise

    def _in_background(self, flow: flows.Flow[Any]) -> None:
        def run() -> None:
            try:
                self._run(flow)
            except LockServerError as error:
                _log.info("clean_up_failed", error=error)  # the ttl ends the lease
            finally:
                self._background.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="pgleaderlock-clean-up", daemon=True)
        self._background.add(thread)
        thread.start()


def _begin_anew() -> None:
    """In a forked child: replace the parts of each client. The parent's threads do not exist here, and a mutex that was
    held at the fork stays held."""
    for client in _clients:
        client._pool.begin_anew()  # noqa: SLF001 - the client is our own
        client._begin()  # noqa: SLF001


os.register_at_fork(after_in_child=_begin_anew)
