"""What a lock store does: the operations, what can come of them, and the protocol that both stores fulfil.

The rules, which one conformance suite checks on every store:

- S1: at any time at most one lease of a lock is good. Only expiry, release and break end one.
- S2: each grant of a lock carries a fencing token higher than every one before, for ever: after a restart, after the
  lock's row has been removed, after a crash of the machine. A grant and a renewal are told only when they are durable.
  A release need only outlive the process: a power cut may take it back, and then the lease runs to its end.
- S3: renew and release match owner, lease and token, and a lease that is still good; a stale one changes nothing.
- L1: an expired lease is no obstacle, whether or not the sweep has seen it.
- L2: a refusal says when to come back.
- A grant that carries an idempotency key is given again, unchanged, to a repeated acquire with the same key and owner
  while that lease is good: a client whose reply was lost gets its lease, and no second one.
- Waiting is first in, first out. Nobody overtakes a waiter: while someone waits for a free lock, others are told HELD.
- A list of operations is one transaction: all of it is durable, or none, and each has an outcome of its own.

Imports msgspec and the standard library. Must never import a store, HTTP or a database driver.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

__all__ = [
    "LOCKS_MAX",
    "WAITERS_MAX",
    "Acquire",
    "Broken",
    "Granted",
    "Held",
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
    "Submit",
    "Sweep",
    "new_lease_id",
]

LOCKS_MAX = 1_000_000
"""How many locks a store keeps unless it is told otherwise."""
WAITERS_MAX = 10_000
"""How many requests may wait in a store unless it is told otherwise: more than a server lets in."""

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
    waited_ms: int = 0
    replayed: bool = False
    """This lease was granted to an earlier request with the same idempotency key."""


def new_lease_id() -> str:
    """Not to be guessed: whoever knows it can act as the holder."""
    return secrets.token_hex(16)


class Held(msgspec.Struct, frozen=True, gc=False):
    """Somebody else's lease is good, or somebody else's turn has come."""

    lock_name: str
    current_owner_id: str
    current_expiry_ms: int
    remaining_ms: int
    """How long the lease is still good, on the store's own clock: what a retry is recommended by."""


class Renewed(msgspec.Struct, frozen=True, gc=False):
    lease_expiry_ms: int


class NotRenewed(msgspec.Struct, frozen=True, gc=False):
    pass


class Released(msgspec.Struct, frozen=True, gc=False):
    pass


class NotReleased(msgspec.Struct, frozen=True, gc=False):
    pass


class StoreFull(msgspec.Struct, frozen=True, gc=False):
    """The lock would be one more than the store may hold. Only an acquire of a name that is new meets this."""

    locks_max: int


Outcome = Granted | Held | Renewed | NotRenewed | Released | NotReleased | StoreFull


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
    """Changes with every change of the lock, and never goes back, except with a release that a power cut takes back."""
    waiters: int = 0


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


class StoreError(Exception):
    """The store cannot be used now: disk full, database gone, file damaged. Says what to do. Nothing was changed, or it
    is not known whether something was; what was granted stays granted."""


class StoreBusy(StoreError):
    """The store is merely contended: the same operation, a little later, will do."""


class Reply(Protocol):
    """Who hears what became of operations. A future is one."""

    def done(self) -> bool: ...

    def cancelled(self) -> bool: ...

    def set_result(self, result: Any, /) -> None: ...

    def set_exception(self, exception: Exception, /) -> None: ...


Submit = Callable[[Reply, Sequence[Operation]], None]


class Store(Protocol):
    """A place that keeps locks. Every method may be called by any number of tasks at once, and each may be cancelled:
    an operation that was handed over before the cancellation may still take effect, except that a cancelled `wait`
    never leaves a lease behind."""

    async def open(self) -> None:
        """Opens, checks and upgrades the store. Raises `StoreError` with the remedy."""

    async def close(self) -> None:
        """Finishes what was begun, wakes every waiter (with `Held`), and closes. Harmless when repeated."""

    async def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """One transaction; outcomes in the order of the operations. An acquire does not wait here."""

    @property
    def submit(self) -> Submit | None:
        """The same without a task of the caller's, for stores that can: the reply hears of it, now or later, on the
        event loop's thread. Whatever goes wrong is told to the reply, too."""

    async def wait(self, acquire: Acquire, wait_ms: int) -> Granted | Held | StoreFull:
        """An acquire that waits for its turn. `waited_ms` of the grant counts from this call to the moment from which
        the lease runs. The ticket goes with the call: answered, timed out or cancelled, it stands in nobody's way."""

    async def get(self, lock_name: str) -> LockView: ...

    async def list_locks(self, prefix: str, cursor: str | None, limit: int) -> Page:
        """Those that are held or have been, and start with `prefix`, after `cursor`."""

    async def break_lock(self, lock_name: str, by: str) -> Broken:
        """Ends whatever lease there is, and records who did it. The next token is higher, as always."""

    async def sweep(self) -> Sweep:
        """Clears expired leases and prunes what is long free, in small steps. Nothing depends on it."""

    async def check(self) -> None:
        """Raises `StoreError` unless an acquire would work now."""
