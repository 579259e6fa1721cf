"""The lock server's client for asyncio.

What a lease does not promise: that nothing of yours is still on its way when it ends. Whoever must never act twice
gives `lease.fencing_token` to what is acted upon, and that refuses a lower one than it has seen.

Cancelling is safe everywhere: an acquire that is cancelled, at whatever moment, is looked after in the background, and
a lease that it may have got is given back; where that is not possible, its ttl ends it.

Imports the client's other modules, `errors`, `_clock`, `_logging`. Must never decide what a flow decides.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from pgleaderlock._clock import Clock
from pgleaderlock._logging import get_logger
from pgleaderlock.client import _batch
from pgleaderlock.client import _flows as flows
from pgleaderlock.client._aio_lease import AsyncHeart, AsyncHeartbeat, AsyncLease
from pgleaderlock.client._aio_transport import AsyncPool
from pgleaderlock.client._core import Core, NoAnswer, Send
from pgleaderlock.client._lease import LeaseState
from pgleaderlock.client._wire import Granted, LockInfo
from pgleaderlock.errors import LeaseLost, LockServerError

__all__ = ["AsyncLockClient"]

T = TypeVar("T")

# How long something that was cancelled is looked after in the background.
CLEAN_UP_TIMEOUT_S = 5.0

_log = get_logger("pgleaderlock")


class AsyncLockClient:
    """Leases from a lock server. Use it as an async context manager, in one event loop."""

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
        self._pool = AsyncPool(self._core)
        self._heart = AsyncHeart(self._core, self._run)
        self._background: set[asyncio.Task[None]] = set()

    @property
    def owner_id(self) -> str:
        """Who we are to the server; by default host, pid and a random part."""
        return self._core.owner_id

    async def acquire(self, lock_name: str, ttl_s: float = 30.0, *, wait_s: float = 0.0) -> AsyncLease:
        """A lease of this lock, or `LockHeld`. With `wait_s`, waits at the server for its turn, first in, first out."""
        attempt = flows.new_attempt(self._core, lock_name, ttl_s, wait_s)
        return await self._attempt(attempt, flows.acquire(self._core, attempt, self._lease, attempt.wait_s))

    async def acquire_with_retry(
        self,
        lock_name: str,
        ttl_s: float = 30.0,
        *,
        wait_s: float = 0.0,
        max_retries: int = 10,
        max_total_wait_s: float = 30.0,
    ) -> AsyncLease:
        """Tries again when the lock is held or no server answers, as the server recommends, with jitter.

        Raises the last reason (`LockHeld`, `LockServerUnreachable`, …) after `max_retries` more tries, or when the next
        one would come later than `max_total_wait_s` after the first.
        """
        attempt = flows.new_attempt(self._core, lock_name, ttl_s, wait_s)
        plan = flows.RetryPlan(self._core, max_retries, max_total_wait_s)
        return await self._attempt(attempt, flows.acquire_with_retry(self._core, attempt, self._lease, plan))

    async def renew(self, lease: AsyncLease, ttl_s: float | None = None) -> None:
        """Extends the lease from now, by its ttl or another one. Raises `LeaseLost` when it is gone."""
        await self._run(flows.renew(self._core, lease, ttl_s))

    async def release(self, lease: AsyncLease) -> bool:
        """Gives the lease back. True if that ended it, False if it had ended before; a second time is no error.

        Raises `LockServerUnreachable` when no server answers: the lease is over for us all the same, and its ttl ends
        it at the server. Cancelled, it goes on in the background.
        """
        sent = lease.state is not LeaseState.RELEASED
        try:
            return await self._run(flows.release(self._core, lease))
        except asyncio.CancelledError:
            if sent:
                self.release_later(lease)
            raise

    def release_later(self, lease: AsyncLease) -> None:
        """Gives the lease back in the background: for code that must not wait. Never raises; `aclose` waits for it."""
        lease._end(LeaseState.RELEASED)  # noqa: SLF001 - it is over for us from now on
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
        """Frees a lock by force (needs an admin token); gives it as it was. Its holder finds out when it renews."""
        return await self._run(flows.break_lock(self._core, lock_name))

    async def batch(self, operations: "Sequence[_batch.Operation]") -> "list[_batch.Outcome[AsyncLease]]":
        """Up to 500 `Acquire`, `Renew` and `Release` in one call and one transaction; one outcome each, in order.

        An acquire gives a lease or a `LockHeld` (returned, not raised); renew and release give True or False.
        """
        attempt = _batch.BatchAttempt(self._core, operations)
        try:
            return await self._run(_batch.batch(self._core, attempt, self._lease))
        except BaseException:
            if attempt.may_hold:
                self._in_background(_batch.clean_up(self._core, attempt))
            raise

    def start_heartbeat(self, lease: AsyncLease, interval_s: float | None = None) -> AsyncHeartbeat:
        """Renews the lease in the background, every third of its ttl by default, until it ends.

        A loss shows at once: `lease.lost` is set and `lease.wait_lost()` returns when the server says no, and when no
        renewal was acknowledged by the lease's deadline. All leases of a client are renewed together.
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
        """Ends heartbeats, finishes what was cancelled (bounded), and closes the connections. Releases no lease."""
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

    # -- inside -------------------------------------------------------------------------------------------------------

    def _lease(self, granted: Granted, ttl_s: float, counted_from: float) -> AsyncLease:
        return AsyncLease(granted, ttl_s, counted_from, self._core.clock)

    async def _run(self, flow: flows.Flow[T]) -> T:
        """Does what the flow asks for, until it is done. Whatever happens meanwhile is thrown into it."""
        try:
            step = next(flow)
            while True:
                try:
                    if isinstance(step, Send):
                        reply = await self._pool.exchange(step)
                    else:
                        reply = None
                        await self._core.clock.sleep(step.delay_s)
                except NoAnswer as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(reply)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            flow.close()

    async def _attempt(self, attempt: flows.AcquireAttempt, flow: flows.Flow[AsyncLease]) -> AsyncLease:
        try:
            return await self._run(flow)
        except BaseException:
            # Cancelled, timed out or refused: the server may have granted what nobody here has received.
            if attempt.may_hold:
                self._in_background(flows.clean_up(self._core, attempt))
            raise

    def _in_background(self, flow: flows.Flow[Any]) -> None:
        async def run() -> None:
            try:
                async with asyncio.timeout(CLEAN_UP_TIMEOUT_S):
                    await self._run(flow)
            except (LockServerError, TimeoutError) as error:
                _log.info("clean_up_failed", error=error)  # the ttl does it

        task = asyncio.get_running_loop().create_task(run(), name="pgleaderlock-clean-up")
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class _Held:
    """The block of `client.lock`: as `asyncio.timeout`, but for a lease."""

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
        # No await from here to the body: what was granted cannot be cancelled away unnoticed.
        self._lease = lease
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        try:
            self._client.start_heartbeat(lease, self._interval_s)
        except BaseException:  # an interval that does not fit
            self._client.release_later(lease)
            raise
        lease._watch(self._interrupt)  # noqa: SLF001 - it is our own
        return lease

    def _interrupt(self) -> None:
        # Not here and now: the body itself may have found the loss, by a renewal of its own, and then it is told by
        # that. A task that cancels itself cannot take it back.
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
        lease._unwatch(self._interrupt)  # noqa: SLF001 - from here on nobody is interrupted
        if self._telling is not None:
            self._telling.cancel()
        # Our own cancellation is taken back; if somebody else has cancelled too, theirs goes on.
        cancelled_from_outside = self._told and task.uncancel() > self._cancelling
        loss = await self._give_back(lease)
        ours = kind is None or (self._told and kind is asyncio.CancelledError and not cancelled_from_outside)
        if loss is not None and ours:
            raise loss from error

    async def _give_back(self, lease: AsyncLease) -> LeaseLost | None:
        """Releases; says whether the lease had been lost before, while its work went on."""
        if lease.state is LeaseState.RELEASED:
            return None
        if not lease.valid:
            loss = lease.loss()
            self._client.release_later(lease)  # who has lost it has to know now
            return loss
        try:
            return None if await self._client.release(lease) else flows.found_lost(lease)
        except LockServerError as error:
            _log.warning("release_failed", lock=lease.lock_name, error=error)
            return None  # by our own clock it was ours until now
