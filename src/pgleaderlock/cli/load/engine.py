"""A load run: `Run` is its clients, `GuardedResource` what their locks guard, `Figures` what is counted and measured.

Each client takes a lock, writes to the resource that the lock guards, and releases; some of them fail on purpose. One
that **crashes** just stops: no heartbeat, no release. One that **stalls** wakes up after its lease has ended, and then
does what must have no effect: it writes, renews and releases as if nothing had happened.

All clients of a run are in one process with one clock, so "at the same time" is exact. The guarded resource checks four
rules, by the clients' own clocks and tokens; the server's answers must never be used to judge the server:

- **overlap**: when a lease is granted or renewed, no other lease of the lock is valid by its holder's own deadline.
- **token**: each grant of a lock carries a higher fencing token than every one before.
- **write**: no write is accepted with a lower token than one that was accepted before.
- **clobber**: after a stale release, the lease of a later holder is still there.

Memory is bounded however long the run lasts.
"""

import asyncio
import contextlib
import math
import random
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from pgleaderlock._base.aio import within
from pgleaderlock._base.clock import BOOT_CLOCK
from pgleaderlock.client import AsyncLease, AsyncLockClient, LeaseLost, LeaseState, LockHeld, LockInfo
from pgleaderlock.client._lease import BaseLease, margin_s
from pgleaderlock.client._wire import Granted
from pgleaderlock.errors import LockServerError, LockServerRefused

__all__ = ["COUNTED", "Figures", "GuardedResource", "Latencies", "LoadSettings", "Run", "Violation", "Violations"]

KEPT_MAX = 100
NOT_ALLOWED = (401, 403)
PAUSE_AFTER_ERROR_S = 0.1
# A client that has to end may be in the middle of a hold, or waiting for its turn.
END_GRACE_S = 3.0
# Neighbouring buckets differ by 2 %, which is the precision of a percentile.
_STEP = math.log(1.02)
_LEAST_S = 1e-6

COUNTED = {
    "acquired": "acquired",
    "held": "refused: held by another",
    "released": "released",
    "lost": "lost while holding",
    "crashed": "crashed on purpose",
    "stalled": "stalled on purpose",
    "stale_writes_refused": "stale writes refused",
    "stale_renewals_refused": "stale renewals refused",
    "errors": "no answer, or an error",
}
"""The counters, with their labels for people."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule: which one, for which lock, and how."""

    rule: str
    lock_name: str
    text: str


@dataclass
class Violations:
    """Counts all violations, and keeps the first ones."""

    counts: "Counter[str]" = field(default_factory=Counter)
    kept: list[Violation] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def add(self, rule: str, lock_name: str, text: str) -> None:
        self.counts[rule] += 1
        if len(self.kept) < KEPT_MAX:
            self.kept.append(Violation(rule, lock_name, text))


class GuardedResource:
    """The resource of one lock: a value that is written with a fencing token, and refuses a lower one than it has seen.

    It must never wait or talk to a server, and never repair what it finds.
    """

    def __init__(self, lock_name: str, violations: Violations) -> None:
        self.lock_name = lock_name
        self._violations = violations
        self._holder: BaseLease | None = None
        self._granted_max = 0
        self._written_max = 0
        self._accepted_last = 0
        self.writes = 0
        self.writes_refused = 0

    @property
    def holder(self) -> BaseLease | None:
        """The lease that was granted last."""
        return self._holder

    def granted(self, lease: BaseLease) -> None:
        """A client has acquired a lease."""
        self._alone(lease, "granted")
        if lease.fencing_token <= self._granted_max:
            text = f"token {lease.fencing_token} was granted after token {self._granted_max}"
            self._violations.add("token", self.lock_name, text)
        self._granted_max = max(self._granted_max, lease.fencing_token)
        self._holder = lease

    def revived(self, lease: BaseLease) -> None:
        """A stale lease was renewed after all."""
        if self._holder is None or self._holder.fencing_token != lease.fencing_token:
            self._alone(lease, "renewed")
        self._holder = lease

    def _alone(self, lease: BaseLease, what: str) -> None:
        other = self._holder
        if other is not None and other is not lease and other.valid:
            self._violations.add(
                "overlap",
                self.lock_name,
                f"token {lease.fencing_token} was {what} while token {other.fencing_token} of {other.owner_id} was "
                f"valid for another {other.remaining_s:.3f} s",
            )

    def write(self, token: int) -> bool:
        """One write: True if it was accepted. A stale writer is refused, which is what the token is for."""
        if not self._accepts(token):
            self.writes_refused += 1
            return False
        self.writes += 1
        self.accepted(token)
        return True

    def _accepts(self, token: int) -> bool:
        if token < self._written_max:
            return False
        self._written_max = token
        return True

    def accepted(self, token: int) -> None:
        """Check an accepted write, independently of the code that accepted it."""
        if token < self._accepted_last:
            text = f"a write with token {token} was accepted after one with token {self._accepted_last}"
            self._violations.add("write", self.lock_name, text)
        self._accepted_last = max(self._accepted_last, token)

    def stale_released(self, before: BaseLease | None, seen: LockInfo) -> None:
        """A stale lease was released, and then the server was asked. `before`: the holder's lease before the
        release."""
        holder = self._holder
        if holder is None or holder is not before or not holder.valid:
            return  # no single lease was valid from before the release until now
        if not seen.held or seen.fencing_token != holder.fencing_token:
            text = f"after a stale release, the lease with token {holder.fencing_token} is gone"
            self._violations.add("clobber", self.lock_name, text)


class Latencies:
    """Durations in buckets that grow by a fixed ratio: some 900 of them cover a microsecond to a minute."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.max_s = 0.0

    def add(self, duration_s: float) -> None:
        self.count += 1
        self.max_s = max(self.max_s, duration_s)
        self._buckets[int(math.log(max(duration_s, _LEAST_S) / _LEAST_S) / _STEP)] += 1

    def percentile_s(self, share: float) -> float:
        """The duration that this share of all did not exceed, rounded up by at most 2 %."""
        if not self.count:
            return 0.0
        wanted = math.ceil(self.count * share)
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return min(self.max_s, _LEAST_S * math.exp((bucket + 1) * _STEP))
        return self.max_s

    def as_json(self) -> dict[str, float]:
        shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
        figures = {f"{name}_ms": round(self.percentile_s(share) * 1000, 3) for name, share in shares.items()}
        return {"count": self.count, **figures, "max_ms": round(self.max_s * 1000, 3)}


@dataclass
class Figures:
    """The figures so far."""

    counts: "Counter[str]" = field(default_factory=Counter)
    """By the keys of `COUNTED`."""
    latencies: dict[str, Latencies] = field(
        default_factory=lambda: {"acquire": Latencies(), "renew": Latencies(), "release": Latencies()}
    )
    last_error: str = ""

    @property
    def operations(self) -> int:
        return sum(latencies.count for latencies in self.latencies.values())


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
    """One run: its settings, its results, and how long it took."""

    settings: LoadSettings
    make_client: Callable[[str], AsyncLockClient]
    """Creates a client with this owner id."""
    figures: Figures = field(default_factory=Figures)
    violations: Violations = field(default_factory=Violations)
    elapsed_s: float = 0.0
    refused: LockServerRefused | None = None
    """Why the run ended early: the server does not allow it."""

    def __post_init__(self) -> None:
        self.resources = {name: GuardedResource(name, self.violations) for name in self.settings.locks}
        self._over = asyncio.Event()
        self._random = random.Random(self.settings.seed)
        self._name = uuid.uuid4().hex[:8]
        self._began = BOOT_CLOCK.now()

    def stop(self) -> None:
        """Let every client end after its current action."""
        self._over.set()

    @property
    def running_s(self) -> float:
        return self.elapsed_s or BOOT_CLOCK.now() - self._began

    async def run(self) -> None:
        """Run the clients for as long as the settings say, or until `stop`."""
        self._began = BOOT_CLOCK.now()
        tasks = [asyncio.create_task(self._client(number)) for number in range(self.settings.clients)]
        try:
            await within(self.settings.duration_s, self._over.wait())
            self._over.set()
            self.elapsed_s = BOOT_CLOCK.now() - self._began
            await asyncio.wait(tasks, timeout=self.settings.hold_s + self.settings.jitter_s + END_GRACE_S)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in ended:
            # A bug of ours must not look like a run without violations.
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

    async def _client(self, number: int) -> None:
        async with self.make_client(f"load-{self._name}-{number}") as client:
            await self._pause(self.settings.jitter_s)  # not all at the same moment
            while not self._over.is_set():
                try:
                    await self._round(client)
                except LockServerError as error:
                    if isinstance(error, LockServerRefused) and error.status in NOT_ALLOWED:
                        self.refused = error
                        self.stop()
                        return
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
        await within(hold_s, lease.lost.wait())
        if lease.valid:
            resource.write(lease.fencing_token)
        lost = lease.state is LeaseState.LOST
        with self._timed("release"):
            released = await client.release(lease)
        self.figures.counts["lost" if lost or not released else "released"] += 1

    async def _stall(self, client: AsyncLockClient, lease: AsyncLease, resource: GuardedResource) -> None:
        """Sleeps past the end of its lease, also by the server's clock, and goes on as if nothing had happened."""
        late_s = 2 * margin_s(lease.ttl_s) + self._random.uniform(0.0, self.settings.hold_s)
        await asyncio.sleep(lease.remaining_s + late_s)
        if not resource.write(lease.fencing_token):
            self.figures.counts["stale_writes_refused"] += 1
        # The ended lease would not send a renewal, so use a copy that still counts as valid.
        grant = Granted(lease.lock_name, lease.owner_id, lease.lease_id, lease.fencing_token, 0, False)
        twin = AsyncLease(grant, lease.ttl_s, BOOT_CLOCK.now(), BOOT_CLOCK)
        try:
            with self._timed("renew"):
                await client.renew(twin)
        except LeaseLost:
            self.figures.counts["stale_renewals_refused"] += 1
        else:
            # A restarted server gives every lease its full duration again: allowed, unless another client has the lock.
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
        """Wait for `least_s` and up to the jitter longer; less if the run ends."""
        await within(least_s + self._random.uniform(0.0, self.settings.jitter_s), self._over.wait())
