"""The lock server's client for asyncio: a lease, the task that renews all leases of a client, and the client.

What a lease does not promise: that no write of yours is still under way when it ends. If nothing may be done twice,
pass `lease.fencing_token` to the resource that you write to, and let that refuse a lower token than it has seen.

Cancelling is safe everywhere. The client cleans up after a cancelled acquire in the background, and releases the lease
that it may have got; if that is not possible, the lease ends with its ttl.

Must never decide what a flow or the heartbeat plan decides.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from pgleaderlock._base.aio import cancel_and_wait, within
from pgleaderlock._base.clock import LOOK_S, Clock
from pgleaderlock._base.logging import get_logger
from pgleaderlock.client import _flows as flows
from pgleaderlock.client._aio_transport import AsyncPool
from pgleaderlock.client._core import BaseClient, Core, NoAnswer, Send
from pgleaderlock.client._lease import BaseHeartbeat, BaseLease, HeartbeatPlan, LeaseState, Renewal
from pgleaderlock.client._wire import Granted, LockInfo
from pgleaderlock.errors import LeaseLost, LockServerError

__all__ = ["AsyncHeart", "AsyncHeartbeat", "AsyncLease", "AsyncLockClient"]

T = TypeVar("T")

# How long the client tries to clean up after a cancelled call.
CLEAN_UP_TIMEOUT_S = 5.0

_log = get_logger("pgleaderlock")


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
            # The loop's clock stops while the machine sleeps: check the boot-time clock at least once per LOOK_S.
            await within(min(left_s, LOOK_S), self._over.wait())
        return self.state is LeaseState.LOST


class AsyncHeartbeat(BaseHeartbeat[AsyncLease]):
    """Renews one lease in a task until it ends or `stop()` is called."""


class AsyncHeart:
    """Runs the heartbeat plan in a task that exists while there is a lease to renew. It never waits for a response."""

    def __init__(self, core: Core, run: Callable[[flows.Flow[None]], Any]) -> None:
        self._core = core
        self._run_flow = run
        self._plan = HeartbeatPlan(core)
        self._task: asyncio.Task[None] | None = None
        self._renewing: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()

    def add(self, lease: AsyncLease, interval_s: float | None) -> None:
        self._plan.add(lease, interval_s)
        lease._watch(self._wake.set)  # noqa: SLF001 - the plan drops it as soon as it ends
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._beat(), name="pgleaderlock-heartbeat")

    def discard(self, lease: BaseLease) -> None:
        self._plan.discard(lease)
        self._wake.set()

    async def _beat(self) -> None:
        while True:
            self._wake.clear()
            due = self._plan.due()
            for batch in due.batches:
                task = asyncio.get_running_loop().create_task(self._renew(batch), name="pgleaderlock-renew")
                self._renewing.add(task)
                task.add_done_callback(self._renewing.discard)
            if due.wake_at is None:
                return
            delay_s = min(LOOK_S, max(0.0, due.wake_at - self._core.clock.now()))
            await within(delay_s, self._wake.wait())

    async def _renew(self, batch: list[Renewal]) -> None:
        try:
            await self._run_flow(flows.renew_together(self._core, self._plan, batch))
        except Exception as error:
            # The heartbeat must survive every failure: only the leases' own deadlines end them.
            self._plan.failed(batch, error)
        self._wake.set()

    async def close(self) -> None:
        await cancel_and_wait(*(task for task in (self._task, *self._renewing) if task is not None))


class AsyncLockClient(BaseClient):
    """Leases from a lock server. Use it as an async context manager, in one event loop."""

    def _open(self) -> None:
        self._pool = AsyncPool(self._core)
        self._heart = AsyncHeart(self._core, self._run)
        self._background: set[asyncio.Task[None]] = set()

    async def acquire(self, lock_name: str, ttl_s: float = 30.0, *, wait_s: float = 0.0) -> AsyncLease:
        """A lease of this lock, or `LockHeld`. With `wait_s`, waits at the server for its turn, first in, first out."""
        attempt = flows.new_attempt(self._core, lock_name, ttl_s, wait_s)
        return await self._attempt(attempt, flows.acquire(attempt, self._lease, attempt.wait_s))

    async def acquire_with_retry(
        self,
        lock_name: str,
        ttl_s: float = 30.0,
        *,
        wait_s: float = 0.0,
        max_retries: int = 10,
        max_total_wait_s: float = 30.0,
    ) -> AsyncLease:
        """Like `acquire`, but tries again when the lock is held or no server answers, as the server recommends.

        Delays are jittered. Raises the last reason (`LockHeld`, `LockServerUnreachable`, …) after `max_retries` more
        tries, or when the next one would come later than `max_total_wait_s` after the first.
        """
        attempt = flows.new_attempt(self._core, lock_name, ttl_s, wait_s)
        plan = flows.RetryPlan(self._core, max_retries, max_total_wait_s)
        return await self._attempt(attempt, flows.acquire_with_retry(attempt, self._lease, plan))

    async def renew(self, lease: AsyncLease, ttl_s: float | None = None) -> None:
        """Renew the lease from now, for its ttl or another one. Raises `LeaseLost` if it has ended."""
        await self._run(flows.renew(self._core, lease, ttl_s))

    async def release(self, lease: AsyncLease) -> bool:
        """Release the lease. True if that ended it, False if it had ended before; a second call is not an error.

        Raises `LockServerUnreachable` if no server answers. The lease is over here in any case; at the server it ends
        with its ttl. If the call is cancelled, the release goes on in the background.
        """
        return await self._release(lease, flows.release(self._core, lease))

    def release_later(self, lease: AsyncLease) -> None:
        """Release the lease in the background, for code that must not wait. Never raises; `aclose` waits for it."""
        lease._end(LeaseState.RELEASED)  # noqa: SLF001 - the lease is over here from now on
        self._in_background(flows.release_again(self._core, lease))

    async def get(self, lock_name: str) -> LockInfo:
        """The lock as the server sees it. For people and monitoring: it may have changed before you read it."""
        return await self._run(flows.get(self._core, lock_name))

    async def list_locks(self, prefix: str = "", *, page_size: int = 200) -> AsyncIterator[LockInfo]:
        """Every lock whose name starts with `prefix`, in the order of names, page by page."""
        cursor: str | None = None
        while True:
            page = await self._run(flows.list_page(self._core, prefix, cursor, page_size))
            for info in page.locks:
                yield info
            cursor = page.next_cursor
            if cursor is None:
                return

    async def break_lock(self, lock_name: str) -> LockInfo:
        """Free a lock by force (needs an admin token); returns its state before that. The holder finds out when it
        renews."""
        return await self._run(flows.break_lock(self._core, lock_name))

    async def batch(self, operations: "Sequence[flows.Operation]") -> "list[flows.Outcome[AsyncLease]]":
        """Up to 500 `Acquire`, `Renew` and `Release` in one call and one transaction; one outcome each, in order.

        The outcome of an acquire is a lease or a `LockHeld` (returned, not raised); that of renew and release is a
        bool.
        """
        attempt = flows.BatchAttempt(self._core, operations)
        return await self._attempt(attempt, flows.batch(attempt, self._lease))

    def start_heartbeat(self, lease: AsyncLease, interval_s: float | None = None) -> AsyncHeartbeat:
        """Renew the lease in the background, every third of its ttl by default, until it ends.

        A loss is reported at once: `lease.lost` is set and `lease.wait_lost()` returns when the server refuses a
        renewal, or when none was acknowledged by the lease's deadline. All leases of a client are renewed together.
        """
        self._heart.add(lease, interval_s)
        return AsyncHeartbeat(lease, self._heart.discard)

    def lock(
        self,
        lock_name: str,
        ttl_s: float = 30.0,
        *,
        wait_s: float = 0.0,
        interval_s: float | None = None,
        max_retries: int = 0,
        max_total_wait_s: float = 30.0,
    ) -> "_Held":
        """`async with client.lock("job") as lease:` holds the lock while its body runs.

        The lease is renewed meanwhile. When it is lost, the body is cancelled and `LeaseLost` is raised from the block.
        At the end the lease is released.
        """

        def acquire() -> Awaitable[AsyncLease]:
            return self.acquire_with_retry(
                lock_name, ttl_s, wait_s=wait_s, max_retries=max_retries, max_total_wait_s=max(wait_s, max_total_wait_s)
            )

        return _Held(self, acquire, interval_s)

    async def aclose(self) -> None:
        """End heartbeats, clean up after cancelled calls (for a bounded time), and close the connections. Releases no
        lease."""
        await self._heart.close()
        try:
            if self._background:
                await asyncio.wait(self._background, timeout=CLEAN_UP_TIMEOUT_S)
        finally:
            for task in self._background:
                task.cancel()
            await self._pool.close()

    async def __aenter__(self) -> Self:
        self._pool.check_open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --- Inside

    def _lease(self, granted: Granted, ttl_s: float, counted_from: float) -> AsyncLease:
        return AsyncLease(granted, ttl_s, counted_from, self._core.clock)

    async def _run(self, flow: flows.Flow[T]) -> T:
        """Carry out the steps of a flow until it is done."""
        try:
            step = next(flow)
            while True:
                try:
                    if isinstance(step, Send):
                        response = await self._pool.exchange(step)
                    else:
                        response = None
                        await self._core.clock.sleep(step.delay_s)
                except NoAnswer as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(response)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            flow.close()

    async def _attempt(self, attempt: flows.Attempt, flow: flows.Flow[T]) -> T:
        try:
            return await self._run(flow)
        except BaseException:
            # Cancelled, timed out or refused: the server may have granted a lease that the caller has not received.
            if attempt.may_hold:
                self._in_background(attempt.clean_up())
            raise

    async def _release(self, lease: AsyncLease, flow: flows.Flow[T]) -> T:
        sent = lease.state is not LeaseState.RELEASED
        try:
            return await self._run(flow)
        except asyncio.CancelledError:
            if sent:
                self.release_later(lease)
            raise

    async def _give_back(self, lease: AsyncLease) -> LeaseLost | None:
        """Release at the end of a `lock` block; returns the loss if the lease was lost while the block ran."""
        if lease.state is LeaseState.LOST:
            loss = lease.loss()
            self.release_later(lease)  # the block must raise the loss without delay
            return loss
        return await self._release(lease, flows.give_back(self._core, lease))

    def _in_background(self, flow: flows.Flow[Any]) -> None:
        async def run() -> None:
            try:
                async with asyncio.timeout(CLEAN_UP_TIMEOUT_S):
                    await self._run(flow)
            except (LockServerError, TimeoutError) as error:
                _log.info("clean_up_failed", error=error)  # the ttl ends the lease

        task = asyncio.get_running_loop().create_task(run(), name="pgleaderlock-clean-up")
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class _Held:
    """The block of `client.lock`. Like `asyncio.timeout`, it cancels its body, but at the loss of the lease."""

    def __init__(
        self, client: AsyncLockClient, acquire: Callable[[], Awaitable[AsyncLease]], interval_s: float | None
    ) -> None:
        self._client = client
        self._acquire = acquire
        self._interval_s = interval_s
        self._lease: AsyncLease | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._telling: asyncio.Handle | None = None
        self._told = False

    async def __aenter__(self) -> AsyncLease:
        lease = await self._acquire()
        # There is no await between here and the body, so a cancellation cannot lose the lease.
        self._lease = lease
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        try:
            self._client.start_heartbeat(lease, self._interval_s)
        except BaseException:  # the interval is too long for the ttl, for example
            self._client.release_later(lease)
            raise
        lease._watch(self._interrupt)  # noqa: SLF001 - the lease is our own
        return lease

    def _interrupt(self) -> None:
        # Do not cancel within this call: the body itself may have found the loss by its own renewal, which raises it
        # there. And a task that cancels itself could not undo that.
        if self._lease is not None and self._lease.state is LeaseState.LOST:
            self._telling = asyncio.get_running_loop().call_soon(self._cancel_body)

    def _cancel_body(self) -> None:
        if self._task is not None:
            self._told = True
            self._task.cancel("the lease is lost")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        lease, task = self._lease, self._task
        assert lease is not None
        assert task is not None
        lease._unwatch(self._interrupt)  # noqa: SLF001 - from here on the task is not interrupted
        if self._telling is not None:
            self._telling.cancel()
        # Undo our own cancellation; one that came from elsewhere stays in force.
        cancelled_from_outside = self._told and task.uncancel() > self._cancelling
        loss = await self._client._give_back(lease)  # noqa: SLF001
        ours = kind is None or (self._told and kind is asyncio.CancelledError and not cancelled_from_outside)
        if loss is not None and ours:
            raise loss from error
