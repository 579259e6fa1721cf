"""The rules of the lock store once more, as plainly as they can be written, to compare every store with.

No database, no threads, no time of its own. Written from the rules, not from a store. Imports the store's types only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pgleaderlock.server.store import (
    Acquire,
    Granted,
    Held,
    KeyReused,
    LockView,
    NotReleased,
    NotRenewed,
    Operation,
    Outcome,
    Release,
    Released,
    Renew,
    Renewed,
)

__all__ = ["Model", "ModelLock"]


@dataclass
class ModelLock:
    token: int = 0
    owner_id: str | None = None
    lease_id: str | None = None
    """None while the model waits to hear which one the store has made up."""
    key: str | None = None
    asked_ms: int = 0
    """The ttl_ms of the acquire; a renewal changes `ttl_ms` only."""
    ttl_ms: int = 0
    ends_ms: int = 0
    line: list[Acquire] = field(default_factory=list)


class Model:
    def __init__(self) -> None:
        self.now_ms = 0
        self.locks: dict[str, ModelLock] = {}

    def lock(self, name: str) -> ModelLock:
        return self.locks.setdefault(name, ModelLock())

    def good(self, name: str) -> bool:
        lock = self.lock(name)
        return lock.owner_id is not None and lock.ends_ms > self.now_ms

    # --- Each takes what the store said, says whether that was right, and changes the model accordingly.

    def apply(self, operations: Sequence[Operation], outcomes: Sequence[Outcome]) -> dict[str, Acquire]:
        """Gives those waiters who must have been granted a lock by this, by name of the lock."""
        assert len(operations) == len(outcomes)
        for operation, outcome in zip(operations, outcomes, strict=True):
            match operation:
                case Acquire():
                    self.acquire(operation, outcome)
                case Renew():
                    self._renew(operation, outcome)
                case Release():
                    self._release(operation, outcome)
        return self.serve({operation.lock_name for operation in operations})

    def acquire(self, acquire: Acquire, outcome: object) -> None:
        lock = self.lock(acquire.lock_name)
        if self.good(acquire.lock_name):
            same_key = acquire.idempotency_key is not None and lock.key == acquire.idempotency_key
            if same_key and (lock.owner_id, lock.asked_ms) == (acquire.owner_id, acquire.ttl_ms):
                assert isinstance(outcome, Granted)
                assert outcome.replayed
                assert (outcome.lease_id, outcome.fencing_token) == (lock.lease_id, lock.token)
                assert 0 < outcome.remaining_ms <= lock.ends_ms - self.now_ms
            elif same_key and isinstance(outcome, KeyReused):  # PostgreSQL says HELD if both are in one list
                assert outcome.field == ("ttl_ms" if lock.owner_id == acquire.owner_id else "owner_id")
            else:
                assert isinstance(outcome, Held), outcome
                assert outcome.current_owner_id == lock.owner_id
                assert 0 < outcome.remaining_ms <= lock.ends_ms - self.now_ms
        elif lock.line:
            assert isinstance(outcome, Held), f"overtook a waiter: {outcome}"
        else:
            self.grant(acquire, outcome)

    def grant(self, acquire: Acquire, outcome: object) -> None:
        lock = self.lock(acquire.lock_name)
        assert isinstance(outcome, Granted), outcome
        assert not outcome.replayed
        assert outcome.owner_id == acquire.owner_id
        assert outcome.fencing_token == lock.token + 1
        assert outcome.lease_id != lock.lease_id
        lock.token += 1
        lock.owner_id, lock.lease_id, lock.key = acquire.owner_id, outcome.lease_id, acquire.idempotency_key
        lock.asked_ms = lock.ttl_ms = acquire.ttl_ms
        lock.ends_ms = self.now_ms + acquire.ttl_ms

    def _matches(self, operation: Renew | Release) -> bool:
        lock = self.lock(operation.lock_name)
        asked = (operation.owner_id, operation.lease_id, operation.fencing_token)
        return self.good(operation.lock_name) and asked == (lock.owner_id, lock.lease_id, lock.token)

    def _renew(self, renew: Renew, outcome: Outcome) -> None:
        if self._matches(renew):
            assert isinstance(outcome, Renewed), outcome
            lock = self.lock(renew.lock_name)
            lock.ttl_ms, lock.ends_ms = renew.extend_by_ms, self.now_ms + renew.extend_by_ms
        else:
            assert outcome == NotRenewed(), outcome

    def _release(self, release: Release, outcome: Outcome) -> None:
        if self._matches(release):
            assert outcome == Released(), outcome
            self.free(release.lock_name)
        else:
            assert outcome == NotReleased(), outcome

    def free(self, name: str) -> None:
        self.lock(name).owner_id = None

    def serve(self, names: set[str]) -> dict[str, Acquire]:
        """Of these locks, those that are free and waited for, with the one whose turn it is."""
        return {name: self.lock(name).line.pop(0) for name in names if self.lock(name).line and not self.good(name)}

    def passed(self, passed_ms: int) -> dict[str, Acquire]:
        self.now_ms += passed_ms
        return self.serve(set(self.locks))

    def swept(self) -> tuple[int, int]:
        """How many leases a sweep clears, and how many are good."""
        expired = [name for name, lock in self.locks.items() if lock.owner_id is not None and not self.good(name)]
        for name in expired:
            self.free(name)
        return len(expired), sum(map(self.good, self.locks))

    def restarted(self, *, extends_leases: bool) -> None:
        """A store that has lost its clock counts every lease that it knows of for its full duration again."""
        for lock in self.locks.values():
            if extends_leases and lock.owner_id is not None:
                lock.ends_ms = self.now_ms + lock.ttl_ms

    def check(self, seen: LockView) -> None:
        lock = self.lock(seen.lock_name)
        good = self.good(seen.lock_name)
        assert (seen.held, seen.fencing_token, seen.waiters) == (good, lock.token, len(lock.line)), (seen, lock)
        assert (seen.owner_id, seen.lease_id) == ((lock.owner_id, lock.lease_id) if good else (None, None))
