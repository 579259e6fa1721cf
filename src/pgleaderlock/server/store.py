"""What a lock store does: the operations, their outcomes, and the protocol that both stores implement.

The rules, which one conformance suite checks on every store:

- S1: at any time at most one lease of a lock is valid. Only expiry, release and break end one.
- S2: each grant of a lock carries a fencing token higher than every one before: also after a restart, after the lock's
  row has been removed, after a crash of the machine. A grant and a renewal are answered only when they are durable.
  A release need only outlive the process: a power cut may undo it, and then the lease runs to its end.
- S3: renew and release match owner, lease and token, and a lease that is still valid; a stale request changes nothing.
- L1: an expired lease does not block a grant, whether or not the sweep has seen it.
- L2: a refusal says when to try again.
- An acquire that repeats an idempotency key with the same owner and `ttl_ms` gets the same grant again, unchanged,
  while that lease is valid: a client whose reply was lost gets its lease, and no second one. The same key with another
  lock, owner or `ttl_ms` is refused.
- Waiting is first in, first out. No request overtakes a waiter: while one waits for a free lock, others get HELD.
- A list of operations is one transaction: all of it is durable, or nothing, and each operation has its own outcome.

Must never import a store, HTTP or a database driver.
"""

import asyncio
import os
from collections import OrderedDict
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
"""The default for the most locks that a store keeps."""
WAITERS_MAX = 10_000
"""The default for the most requests that wait in a store: more than a server lets in."""
KNOWN_KEYS_MAX = 100_000

# --- Operations. The caller has checked names and ranges.


class Acquire(msgspec.Struct, frozen=True, gc=False):
    lock_name: str
    owner_id: str
    ttl_ms: int
    idempotency_key: str | None = None


class Renew(msgspec.Struct, frozen=True, gc=False):
    """Renews from now: the lease is valid for `extend_by_ms` from this moment, be that more or less than before."""

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
    """Unix time, for people. Holders do not use it: they count from before they sent the request."""
    ttl_ms: int
    """The ttl that was asked for and granted."""
    remaining_ms: int
    """How long the lease is still valid, on the store's clock, rounded down."""
    waited_ms: int = 0
    replayed: bool = False
    """This lease was granted to an earlier request with the same idempotency key."""


def new_lease_id() -> str:
    """A random id. It must not be guessable: anyone who knows it can act as the holder."""
    return os.urandom(16).hex()


def stored_key(acquire: Acquire) -> str | None:
    """What a store records of an acquire with a key, to recognise a repetition: the key and, after a blank, its
    `ttl_ms`. No key contains a blank. Unlike the lease's duration, this does not change with a renewal."""
    return None if acquire.idempotency_key is None else f"{acquire.idempotency_key} {acquire.ttl_ms}"


class KnownKeys:
    """The lock for which each idempotency key last got a lease, in bounded memory. It is a hint: the store then checks
    whether that lease is still valid. An index in the database would make every grant slower."""

    def __init__(self) -> None:
        # An OrderedDict finds its oldest entry at once; a dict walks over all that were deleted before.
        self._locks: OrderedDict[str, str] = OrderedDict()

    def note(self, acquire: Acquire) -> None:
        if acquire.idempotency_key is not None:
            self._locks[acquire.idempotency_key] = acquire.lock_name
            if len(self._locks) > KNOWN_KEYS_MAX:
                self._locks.popitem(last=False)

    def other_lock(self, acquire: Acquire) -> str | None:
        """The other lock that this acquire's key may belong to; None if there is none."""
        known = None if acquire.idempotency_key is None else self._locks.get(acquire.idempotency_key)
        return None if known == acquire.lock_name else known


class Held(msgspec.Struct, frozen=True, gc=False):
    """Another owner's lease is valid, or it is another waiter's turn."""

    lock_name: str
    current_owner_id: str
    current_expiry_ms: int
    remaining_ms: int
    """How long the lease is still valid, on the store's clock. The recommended retry delay follows from it."""


class KeyReused(msgspec.Struct, frozen=True, gc=False):
    """The key belongs to a valid lease that was acquired with another lock, owner or `ttl_ms`."""

    field: str
    """What differs: lock, owner_id or ttl_ms."""


class Renewed(msgspec.Struct, frozen=True, gc=False):
    lease_expiry_ms: int
    ttl_ms: int
    """How long the lease is valid from now on."""


class NotRenewed(msgspec.Struct, frozen=True, gc=False):
    pass


class Released(msgspec.Struct, frozen=True, gc=False):
    pass


class NotReleased(msgspec.Struct, frozen=True, gc=False):
    pass


class StoreFull(msgspec.Struct, frozen=True, gc=False):
    """The store has as many locks as it may keep. Only an acquire of a new name gets this."""

    locks_max: int


Outcome = Granted | Held | KeyReused | Renewed | NotRenewed | Released | NotReleased | StoreFull


class LockView(msgspec.Struct, frozen=True, gc=False):
    """The state of a lock. A lock that was never granted is free, with token and version 0."""

    lock_name: str
    held: bool
    owner_id: str | None
    lease_id: str | None
    fencing_token: int
    """The highest that was ever granted for this lock."""
    lease_expiry_ms: int | None
    version: int
    """Rises with every change of the lock. It only falls if a power cut has undone a release, or if a damaged file has
    lost changes."""
    waiters: int = 0


class Adopted(msgspec.Struct, frozen=True, gc=False):
    """A lock of another, stopped server, which this store takes over. `owner_id` is None if the lock is free."""

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
    """The outcome of a break: `was` is the lock before it."""

    was: LockView


class Sweep(msgspec.Struct, frozen=True, gc=False):
    """The outcome of a sweep: leases that had expired and were cleared, and leases that are valid."""

    expired: int
    held: int


class Found(msgspec.Struct, frozen=True):
    """The result of opening a store."""

    store_id: str
    """The store id: set when the store was created, and never changed."""
    unclean: bool = False
    """The last run did not end cleanly, so tokens have jumped."""
    lost: str | None = None
    """Durable data that is known to be missing: leases may have been lost. No token is granted again."""


class StoreError(Exception):
    """The store cannot be used now: disk full, database unreachable, file damaged. The text says what to do. Nothing
    was changed, or the outcome is unknown; earlier grants stay valid."""


class StoreBusy(StoreError):
    """The store is only contended: the same operation will work a little later."""


Reply = asyncio.Future[list[Outcome]]
"""A store's answer to operations, as a future: their outcomes in order, or a `StoreError`."""


class Store(Protocol):
    """A lock store. Any number of tasks may call every method at the same time."""

    found: Found
    """Set by `open`."""

    async def open(self) -> None:
        """Opens, checks and upgrades the store. Raises `StoreError` with the remedy."""

    async def examine(self) -> Found:
        """What `open` would find, without changing anything. Only for a store that is not open."""

    async def close(self) -> None:
        """Finishes the operations under way, answers every waiter with `Held`, and closes. May be called repeatedly."""

    def submit(self, operations: Sequence[Operation], wait_ms: int = 0) -> Reply:
        """Carries out operations in one transaction. Must be called on the event loop's thread. The reply may be done
        when this returns. This method raises nothing: every failure is the reply's exception.

        With `wait_ms`, `operations` is one acquire that waits for its turn. `waited_ms` of the grant counts from this
        call to the moment from which the lease runs.

        A reply that is cancelled (`cancel()` returns True) gives up its place in the queue and leaves no lease behind.
        A reply that was done before may contain a lease, which the caller must then use or release. Operations that do
        not wait may still take effect after the cancellation."""

    async def get(self, lock_name: str) -> LockView: ...

    async def list_locks(self, prefix: str, cursor: str | None, limit: int) -> Page:
        """The locks that are or were held, whose names start with `prefix` and come after `cursor`."""

    async def break_lock(self, lock_name: str, by: str) -> Broken:
        """Ends the lock's lease, if there is one, and records who did so. The next token is higher, as always."""

    async def adopt(self, locks: Sequence[Adopted]) -> int:
        """Takes over locks: the next token of each is higher, and a lease goes on for its remaining time. A lock whose
        token, or a higher one, is stored here already does not change. Returns how many have changed."""

    async def sweep(self) -> Sweep:
        """Clears expired leases and prunes locks that have been free for long, in small steps. Correctness does not
        depend on it."""

    async def check(self) -> None:
        """Raises `StoreError` unless an acquire would work now."""
