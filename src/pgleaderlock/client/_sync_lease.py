"""A lease for threads, and the thread that keeps all leases of a client.

Imports the client's lease and plan, `_clock` and the standard library. Must never decide what the plan decides.
"""

import threading
from collections.abc import Callable

from pgleaderlock._clock import LOOK_S, Clock
from pgleaderlock.client import _flows as flows
from pgleaderlock.client._beat import Beat, HeartbeatPlan, renew_together
from pgleaderlock.client._core import Core
from pgleaderlock.client._lease import BaseLease, LeaseState
from pgleaderlock.client._wire import Granted

__all__ = ["Heart", "Heartbeat", "Lease"]

# A heart without a lease waits this long for the next one before its thread ends.
IDLE_S = 10.0
END_TIMEOUT_S = 5.0


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


class Heart:
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
            thread.join(END_TIMEOUT_S)
