"""What a lock store does: the operations, their outcomes, and the protocol that both stores fulfil.

The rules, which one conformance suite checks on every store:

- S1: at any time at most one lease of a lock is good. Only expiry, release and break end one.
- S2: each grant of a lock carries a fencing token higher than every one before: also after a restart, after the lock's
  row has been removed, after a crash of the machine. A grant and a renewal are answered only when they are durable.
  A release need only outlive the process: a power cut may undo it, and then the lease runs to its end.
- S3: renew and release match owner, lease and token, and a lease that is still good; a stale one changes nothing.
- L1: an expired lease is no obstacle, whether or not the sweep has seen it.
- L2: a refusal says when to come back.
- A grant that carries an idempotency key is given again, unchanged, to a repeated acquire with the same key, owner and
  `ttl_ms` while that lease is good: a client whose reply was lost gets its lease, and no second one. A key that comes
  with another body is given nothing.
- Waiting is first in, first out. No request overtakes a waiter: while one waits for a free lock, others are told HELD.
- A list of operations is one transaction: all of it is durable, or none, and each has an outcome of its own.

Must never import a store, HTTP or a database driver.
"""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Protocol

import msgspec

__all__ = [
    "LOCKS_MAX",
    "WAITERS_MAX",
    "Acquire",
    "Adopted",
    "Broken",
    "Found",
    "Granted",
    "Held",
    "KeyReused",
    "KnownKeys",
    "LockView",
    "NotReleased",
    "NotRenewed",
    "Operation",
    "Outcome",
    "Page",
    "Release",
    "Released",
    "Renew",
    "Renewed",
    "Reply",
    "Store",
    "StoreBusy",
    "StoreError",
    "StoreFull",
    "Sweep",
    "new_lease_id",
    "stored_key",
]

LOCKS_MAX = 1_000_000
"""How many locks a store keeps unless it is told otherwise."""
WAITERS_MAX = 10_000
"""How many requests may wait in a store unless it is told otherwise: more than a server lets in."""
KNOWN_KEYS_MAX = 100_000

# --- Operations. Names and ranges have been checked before they come here.


class Acquire(msgspec.Struct, frozen=True, gc=False):
    lock_name: str
    owner_id: str
    ttl_ms: int
    idempotency_key: str | None = None


class Renew(msgspec.Struct, frozen=True, gc=False):
    """Extends from now: the lease is good for `extend_by_ms` from this moment, be that more or less than before."""

    lock_name: str
    owner_id: str
    lease_id: str
    fencing_token: int
    extend_by_ms: int


class Release(msgspec.Struct, frozen=True, gc=False):
    lock_name: str
    owner_id: str
    lease_id: str
    fencing_token: int


Operation = Acquire | Renew | Release

# --- Outcomes


class Granted(msgspec.Struct, frozen=True, gc=False):
    lock_name: str
    owner_id: str
    lease_id: str
    fencing_token: int
    lease_expiry_ms: int
    """Unix time, for people to read: holders count from before they asked."""
    ttl_ms: int
    """What was asked for, and granted."""
    remaining_ms: int
    """How long the lease is still good, on the store's own clock, rounded down."""
    waited_ms: int = 0
    replayed: bool = False
    """This lease was granted to an earlier request with the same idempotency key."""


def new_lease_id() -> str:
    """Not to be guessed: whoever knows it can act as the holder."""
    return secrets.token_hex(16)


def stored_key(acquire: Acquire) -> str | None:
    """What a store keeps of an acquire with a key, to recognise it by: the key and, after a blank, its `ttl_ms`. No key
    has a blank in it. The lease's own duration changes with a renewal, and this does not."""
    return None if acquire.idempotency_key is None else f"{acquire.idempotency_key} {acquire.ttl_ms}"


class KnownKeys:
    """For which lock each key was granted a lease last. A hint, with a bound: the store looks whether that lease is
    good. Not an index in the database, which would make every grant slower."""

    def __init__(self) -> None:
        self._locks: dict[str, str] = {}

    def note(self, acquire: Acquire) -> None:
        if acquire.idempotency_key is not None:
            self._locks[acquire.idempotency_key] = acquire.lock_name
            if len(self._locks) > KNOWN_KEYS_MAX:
                del self._locks[next(iter(self._locks))]

    def other_lock(self, acquire: Acquire) -> str | None:
        """The lock that this key may belong to, if it is not the one that is asked for."""
        known = None if acquire.idempotency_key is None else self._locks.get(acquire.idempotency_key)
        return None if known == acquire.lock_name else known


class Held(msgspec.Struct, frozen=True, gc=False):
    """Somebody else's lease is good, or somebody else's turn has come."""

    lock_name: str
    current_owner_id: str
    current_expiry_ms: int
    remaining_ms: int
    """How long the lease is still good, on the store's own clock: what a retry is recommended by."""


class KeyReused(msgspec.Struct, frozen=True, gc=False):
    """The key belongs to a lease that is good and was asked for with another lock, owner or `ttl_ms`."""

    field: str
    """Which of them differs: lock, owner_id or ttl_ms."""


class Renewed(msgspec.Struct, frozen=True, gc=False):
    lease_expiry_ms: int
    ttl_ms: int
    """How long the lease is good from now on."""


class NotRenewed(msgspec.Struct, frozen=True, gc=False):
    pass


class Released(msgspec.Struct, frozen=True, gc=False):
    pass


class NotReleased(msgspec.Struct, frozen=True, gc=False):
    pass


class StoreFull(msgspec.Struct, frozen=True, gc=False):
    """The lock would be one more than the store may hold. Only an acquire of a name that is new meets this."""

    locks_max: int


Outcome = Granted | Held | KeyReused | Renewed | NotRenewed | Released | NotReleased | StoreFull


class LockView(msgspec.Struct, frozen=True, gc=False):
    """A lock as it is. One that nobody has ever taken is free, with token and version 0."""

    lock_name: str
    held: bool
    owner_id: str | None
    lease_id: str | None
    fencing_token: int
    """The highest that was ever granted for this lock."""
    lease_expiry_ms: int | None
    version: int
    """Changes with every change of the lock, and never goes back, except with a release that a power cut takes back, or
    with what a damaged file has lost."""
    waiters: int = 0


class Adopted(msgspec.Struct, frozen=True, gc=False):
    """A lock of another server that has been stopped, as this store takes it over. `owner_id` is None: it is free."""

    lock_name: str
    fencing_token: int
    """The highest that was ever granted for it."""
    version: int
    owner_id: str | None = None
    lease_id: str | None = None
    remaining_ms: int = 0


class Page(msgspec.Struct, frozen=True, gc=False):
    """Locks in the order of their names (by code point). `next_cursor` is None at the end."""

    locks: list[LockView]
    next_cursor: str | None


class Broken(msgspec.Struct, frozen=True, gc=False):
    """What a break found: `was` is the lock before."""

    was: LockView


class Sweep(msgspec.Struct, frozen=True, gc=False):
    """What the monitor saw: leases that had expired and were cleared now, and those that are good."""

    expired: int
    held: int


class Found(msgspec.Struct, frozen=True):
    """What opening a store has found."""

    store_id: str
    """Made when the store was made, and never changed."""
    unclean: bool = False
    """The last run did not end in order: tokens have jumped."""
    lost: str | None = None
    """What is known to be missing of what was durable: leases may have been forgotten. No token is given again."""


class StoreError(Exception):
    """The store cannot be used now: disk full, database gone, file damaged. Says what to do. Nothing was changed, or it
    is not known whether something was; what was granted stays granted."""


class StoreBusy(StoreError):
    """The store is merely contended: the same operation, a little later, will do."""


Reply = asyncio.Future[list[Outcome]]
"""What a store answers to operations: their outcomes in order, or a `StoreError`."""


class Store(Protocol):
    """A place that keeps locks. Every method may be called by any number of tasks at once."""

    found: Found
    """Set by `open`."""

    async def open(self) -> None:
        """Opens, checks and upgrades the store. Raises `StoreError` with the remedy."""

    async def examine(self) -> Found:
        """What `open` would find, without changing anything. For a store that is not open."""

    async def close(self) -> None:
        """Finishes what was begun, wakes every waiter (with `Held`), and closes. Harmless when repeated."""

    def submit(self, operations: Sequence[Operation], wait_ms: int = 0) -> Reply:
        """Carries out operations in one transaction. Must be called on the event loop's thread. The reply may be done
        when this returns. This method raises nothing: every failure is the reply's exception.

        With `wait_ms`, `operations` is one acquire that waits for its turn. `waited_ms` of the grant counts from this
        call to the moment from which the lease runs.

        A reply that is cancelled (`cancel()` gives True) gives up its place in the queue, and leaves no lease behind.
        One that is done already may hold a lease, which is then the caller's to use or to release. Operations that do
        not wait may still take effect after the cancellation."""

    async def get(self, lock_name: str) -> LockView: ...

    async def list_locks(self, prefix: str, cursor: str | None, limit: int) -> Page:
        """Those that are held or have been, and start with `prefix`, after `cursor`."""

    async def break_lock(self, lock_name: str, by: str) -> Broken:
        """Ends whatever lease there is, and records who did it. The next token is higher, as always."""

    async def adopt(self, locks: Sequence[Adopted]) -> int:
        """Takes over locks: the next token of each is higher, and a lease goes on for the time that is left of it. Of a
        lock whose token is known here, or a higher one, nothing changes. Gives how many have changed."""

    async def sweep(self) -> Sweep:
        """Clears expired leases and prunes what is long free, in small steps. Nothing depends on it."""

    async def check(self) -> None:
        """Raises `StoreError` unless an acquire would work now."""
