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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar

from pgleaderlock._clock import LOOK_S, Clock
from pgleaderlock._logging import get_logger
from pgleaderlock.client import _batch
from pgleaderlock.client import _flows as flows
from pgleaderlock.client._beat import Beat, HeartbeatPlan, renew_together
from pgleaderlock.client._core import Core, NoAnswer, Send
from pgleaderlock.client._lease import BaseLease, LeaseState
from pgleaderlock.client._sync_transport import SyncPool
from pgleaderlock.client._wire import Granted, LockInfo
from pgleaderlock.errors import LeaseLost, LockServerError

__all__ = ["Heartbeat", "Lease", "LockClient"]

T = TypeVar("T")

CLEAN_UP_TIMEOUT_S = 5.0
# A heart without a lease waits this long for the next one before its thread ends.
IDLE_S = 10.0

_log = get_logger("pgleaderlock")
_clients: "weakref.WeakSet[LockClient]" = weakref.WeakSet()


class Lease(BaseLease):
    """A lease, for threads."""

    def __init__(self, granted: Granted, ttl_s: float, counted_from: float, clock: Clock) -> None:
        super().__init__(granted, ttl_s, counted_from, clock)
        self._lost: threading.Event | None = None  # made when somebody asks for it: most leases end without

    @property
    def lost(self) -> threading.Event:
        """Set when the lease is lost, if a heartbeat keeps it or somebody asks; never by a release."""
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
        """True once the lease is lost: the server said so, or the deadline has passed. False once it is released, or
        when `timeout_s` is over first."""
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


class Heartbeat:
    """Renews one lease until it ends or `stop()` is called."""

    def __init__(self, lease: Lease, stop: Callable[[BaseLease], None]) -> None:
        self.lease = lease
        self._stop = stop

    def stop(self) -> None:
        """No more renewals. The lease stays until it is released or its deadline passes."""
        self._stop(self.lease)


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
        """Also in a forked child, which has none of its parent's threads, and perhaps what they had locked."""
        self._heart = _Heart(self._core, self._run)
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
    for client in _clients:
        client._begin()  # noqa: SLF001 - it is our own


os.register_at_fork(after_in_child=_begin_anew)


class _Heart:
    """Runs the heartbeat plan in a thread that exists while there is a lease to renew, and never waits for a reply.

    Each renewal has a thread of its own, so that a deadline is seen while a server is silent.
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
        lease._watch(self._wake)  # noqa: SLF001 - the plan lets go of it at once
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
            look = self._plan.look()
            for batch in look.batches:
                threading.Thread(target=self._renew, args=(batch,), name="pgleaderlock-renew", daemon=True).start()
            now = self._core.clock.now()
            # The thread's clock stands still while the machine sleeps: look at ours now and then.
            wait_s = IDLE_S if look.wake_at is None else min(LOOK_S, max(0.0, look.wake_at - now))
            with self._changed:
                if not self._news and not self._closed:
                    self._changed.wait(wait_s)
                if self._closed or (look.wake_at is None and not self._news):
                    self._thread = None
                    return

    def _renew(self, batch: list[Beat]) -> None:
        try:
            self._run_flow(renew_together(self._core, self._plan, batch, self._plan.timeout_s(batch)))
        except Exception as error:
            # A heartbeat must survive whatever goes wrong: the leases' own deadlines are the judge.
            self._plan.failed(batch, error)
        self._wake()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(CLEAN_UP_TIMEOUT_S)
