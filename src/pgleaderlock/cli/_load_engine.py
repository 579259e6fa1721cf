"""The clients of a load run: each takes a lock, writes to what it guards, and lets go; some of them fail on purpose.

A client that **crashes** stops without a word: no heartbeat, no release. One that **stalls** wakes up after its lease
has ended, and then does what it must not be able to do: it writes, renews and releases as if nothing had happened.

Imports `client`, `_clock`, `errors`, its neighbours. Must never look at the server's answer to judge the server: the
guarded resource does that, by the clients' own clocks and tokens.
"""

import asyncio
import contextlib
import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from pgleaderlock._clock import BOOT_CLOCK
from pgleaderlock.cli._load_check import GuardedResource, Violations
from pgleaderlock.cli._load_figures import COUNTED, Figures
from pgleaderlock.client import AsyncLease, AsyncLockClient, LeaseLost, LeaseState, LockHeld
from pgleaderlock.client._lease import margin_s
from pgleaderlock.client._wire import Granted
from pgleaderlock.errors import LockServerError, LockServerRefused

__all__ = ["LoadSettings", "Run"]

NOT_ALLOWED = (401, 403)
PAUSE_AFTER_ERROR_S = 0.1
# A client that has to end may be in the middle of a hold, or waiting for its turn.
END_GRACE_S = 3.0


@dataclass(frozen=True)
class LoadSettings:
    clients: int
    duration_s: float
    ttl_s: float
    hold_s: float
    jitter_s: float
    failrate: float
    wait_s: float
    locks: tuple[str, ...]
    seed: int | None = None


@dataclass
class Run:
    """One run: its settings, what was seen, and how long it took."""

    settings: LoadSettings
    make_client: Callable[[str], AsyncLockClient]
    """For an owner."""
    figures: Figures = field(default_factory=Figures)
    violations: Violations = field(default_factory=Violations)
    elapsed_s: float = 0.0
    refused: LockServerRefused | None = None
    """Why the run ended early: we may not do this at all."""

    def __post_init__(self) -> None:
        self.resources = {name: GuardedResource(name, self.violations) for name in self.settings.locks}
        self._over = asyncio.Event()
        self._random = random.Random(self.settings.seed)
        self._name = uuid.uuid4().hex[:8]
        self._began = BOOT_CLOCK.now()

    def stop(self) -> None:
        """Every client ends with what it is doing."""
        self._over.set()

    @property
    def running_s(self) -> float:
        return self.elapsed_s or BOOT_CLOCK.now() - self._began

    async def run(self) -> None:
        """For as long as the settings say, or until `stop`."""
        self._began = BOOT_CLOCK.now()
        tasks = [asyncio.create_task(self._client(number)) for number in range(self.settings.clients)]
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.duration_s):
                    await self._over.wait()
            self._over.set()
            self.elapsed_s = BOOT_CLOCK.now() - self._began
            await asyncio.wait(tasks, timeout=self.settings.hold_s + self.settings.jitter_s + END_GRACE_S)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in ended:
            # A defect of ours must not look like a quiet run.
            if isinstance(outcome, Exception) and not isinstance(outcome, LockServerError):
                raise outcome

    def as_json(self) -> dict[str, object]:
        seconds = max(self.running_s, 1e-9)
        resources = self.resources.values()
        return {
            "settings": {**asdict(self.settings), "locks": len(self.settings.locks), "names": self.settings.locks[:10]},
            "elapsed_s": round(self.running_s, 3),
            "counts": {
                **{name: self.figures.counts[name] for name in COUNTED},
                "writes": sum(resource.writes for resource in resources),
                "writes_refused": sum(resource.writes_refused for resource in resources),
            },
            "per_second": {
                "operations": round(self.figures.operations / seconds, 1),
                "acquired": round(self.figures.counts["acquired"] / seconds, 1),
            },
            "latency": {name: latencies.as_json() for name, latencies in self.figures.latencies.items()},
            "violations": {"total": self.violations.total, **self.violations.counts},
            "first_violations": [asdict(violation) for violation in self.violations.kept],
            "last_error": self.figures.last_error,
        }

    # -- one client ---------------------------------------------------------------------------------------------------

    async def _client(self, number: int) -> None:
        async with self.make_client(f"load-{self._name}-{number}") as client:
            await self._pause(self.settings.jitter_s)  # not all at the same moment
            while not self._over.is_set():
                try:
                    await self._round(client)
                except LockServerRefused as error:
                    if error.status in NOT_ALLOWED:
                        self.refused = error
                        self.stop()
                        return
                    await self._failed(error)
                except LockServerError as error:
                    await self._failed(error)

    async def _failed(self, error: LockServerError) -> None:
        self.figures.counts["errors"] += 1
        self.figures.last_error = str(error)
        await self._pause(PAUSE_AFTER_ERROR_S)

    async def _round(self, client: AsyncLockClient) -> None:
        resource = self.resources[self._random.choice(self.settings.locks)]
        try:
            with self._timed("acquire"):
                lease = await client.acquire(resource.lock_name, self.settings.ttl_s, wait_s=self.settings.wait_s)
        except LockHeld as held:
            self.figures.counts["held"] += 1
            await self._pause(min(held.recommended_retry_s, self.settings.hold_s + self.settings.jitter_s))
            return
        except LeaseLost:
            self.figures.counts["lost"] += 1
            return
        self.figures.counts["acquired"] += 1
        resource.granted(lease)
        fails = self._random.random() < self.settings.failrate
        if not fails:
            await self._work(client, lease, resource)
        elif self._random.random() < 0.5:
            resource.write(lease.fencing_token)
            self.figures.counts["crashed"] += 1
        else:
            self.figures.counts["stalled"] += 1
            await self._stall(client, lease, resource)

    async def _work(self, client: AsyncLockClient, lease: AsyncLease, resource: GuardedResource) -> None:
        client.start_heartbeat(lease)
        resource.write(lease.fencing_token)
        hold_s = self.settings.hold_s + self._random.uniform(0.0, self.settings.jitter_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(hold_s):
                await lease.lost.wait()
        if lease.valid:
            resource.write(lease.fencing_token)
        lost = lease.state is LeaseState.LOST
        with self._timed("release"):
            released = await client.release(lease)
        self.figures.counts["lost" if lost or not released else "released"] += 1

    async def _stall(self, client: AsyncLockClient, lease: AsyncLease, resource: GuardedResource) -> None:
        """Sleeps through the end of its lease, by the server's clock too, and goes on as if nothing had happened."""
        late_s = 2 * margin_s(lease.ttl_s) + self._random.uniform(0.0, self.settings.hold_s)
        await asyncio.sleep(lease.remaining_s + late_s)
        if not resource.write(lease.fencing_token):
            self.figures.counts["stale_writes_refused"] += 1
        # The lease itself would not even ask: its twin believes to be good.
        grant = Granted(lease.lock_name, lease.owner_id, lease.lease_id, lease.fencing_token, 0, False)
        twin = AsyncLease(grant, lease.ttl_s, BOOT_CLOCK.now(), BOOT_CLOCK)
        try:
            with self._timed("renew"):
                await client.renew(twin)
        except LeaseLost:
            self.figures.counts["stale_renewals_refused"] += 1
        else:
            # A server that was started again lets every lease begin anew: fine, unless it is somebody else's by now.
            resource.revived(twin)
            await client.release(twin)
            return
        before = resource.holder
        with self._timed("release"):
            await client.release(lease)
        resource.stale_released(before, await client.get(resource.lock_name))

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = BOOT_CLOCK.now()
        try:
            yield
        finally:
            self.figures.latencies[what].add(BOOT_CLOCK.now() - began)

    async def _pause(self, least_s: float) -> None:
        """So long, or up to the jitter longer; ends with the run."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(least_s + self._random.uniform(0.0, self.settings.jitter_s)):
                await self._over.wait()
