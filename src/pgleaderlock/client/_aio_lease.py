"""A lease for asyncio, and the task that keeps all leases of a client.

Imports the client's lease and plan, `_clock` and the standard library. Must never decide what the plan decides.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from pgleaderlock._clock import LOOK_S, Clock
from pgleaderlock.client import _flows as flows
from pgleaderlock.client._beat import Beat, HeartbeatPlan, renew_together
from pgleaderlock.client._core import Core
from pgleaderlock.client._lease import BaseLease, LeaseState
from pgleaderlock.client._wire import Granted

__all__ = ["AsyncHeart", "AsyncHeartbeat", "AsyncLease"]


class AsyncLease(BaseLease):
    """A lease, for one event loop."""

    def __init__(self, granted: Granted, ttl_s: float, counted_from: float, clock: Clock) -> None:
        super().__init__(granted, ttl_s, counted_from, clock)
        self.lost = asyncio.Event()
        """Set when the lease is lost; never by a release."""
        self._over = asyncio.Event()

    def _ended(self) -> None:
        if self._state is LeaseState.LOST:
            self.lost.set()
        self._over.set()

    async def wait_lost(self) -> bool:
        """True once the lease is lost: the server said so, or the deadline has passed. False once it is released."""
        while self._state is LeaseState.HELD and not self.forked:
            left_s = self.remaining_s
            if left_s <= 0:
                self._end(LeaseState.LOST, "deadline")
                break
            with contextlib.suppress(TimeoutError):
                # The loop's clock stands still while the machine sleeps: look at ours now and then.
                async with asyncio.timeout(min(left_s, LOOK_S)):
                    await self._over.wait()
        return self.state is LeaseState.LOST


class AsyncHeartbeat:
    """Renews one lease until it ends or `stop()` is called."""

    def __init__(self, lease: AsyncLease, stop: Callable[[BaseLease], None]) -> None:
        self.lease = lease
        self._stop = stop

    def stop(self) -> None:
        """No more renewals. The lease stays until it is released or its deadline passes."""
        self._stop(self.lease)


class AsyncHeart:
    """Runs the heartbeat plan in a task that exists while there is a lease to renew, and never waits for a reply."""

    def __init__(self, core: Core, run: Callable[[flows.Flow[None]], Any]) -> None:
        self._core = core
        self._run_flow = run
        self._plan = HeartbeatPlan(core)
        self._task: asyncio.Task[None] | None = None
        self._renewing: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()

    def add(self, lease: AsyncLease, interval_s: float | None) -> None:
        self._plan.add(lease, interval_s)
        lease._watch(self._wake.set)  # noqa: SLF001 - the plan lets go of it at once
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._beat(), name="pgleaderlock-heartbeat")

    def discard(self, lease: BaseLease) -> None:
        self._plan.discard(lease)
        self._wake.set()

    async def _beat(self) -> None:
        while True:
            self._wake.clear()
            look = self._plan.look()
            for batch in look.batches:
                task = asyncio.get_running_loop().create_task(self._renew(batch), name="pgleaderlock-renew")
                self._renewing.add(task)
                task.add_done_callback(self._renewing.discard)
            if look.wake_at is None:
                return
            delay_s = min(LOOK_S, max(0.0, look.wake_at - self._core.clock.now()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._wake.wait()

    async def _renew(self, batch: list[Beat]) -> None:
        try:
            await self._run_flow(renew_together(self._core, self._plan, batch, self._plan.timeout_s(batch)))
        except Exception as error:
            # A heartbeat must survive whatever goes wrong: the leases' own deadlines are the judge.
            self._plan.failed(batch, error)
        self._wake.set()

    async def close(self) -> None:
        tasks = [task for task in (self._task, *self._renewing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
