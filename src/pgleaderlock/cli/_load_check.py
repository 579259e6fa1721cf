"""The guarded resource of `pgleaderlock load`, and what must never be seen there.

All clients of a run live in one process and on one clock, so "at the same time" means just that. Four things are
checked, by whoever is guarded and not by the server's own word:

- **overlap**: when a lease is granted or renewed, no other one of the same lock is valid by its holder's own deadline.
- **token**: each grant of a lock carries a higher fencing token than every one before.
- **write**: no write is accepted with a lower token than one that was accepted before.
- **clobber**: after a stale release, the lease of a later holder is still there.

Imports `client` and the standard library. Must never wait or speak to a server, and never repair what it finds.
"""

from collections import Counter
from dataclasses import dataclass, field

from pgleaderlock.client import LockInfo
from pgleaderlock.client._lease import BaseLease

__all__ = ["GuardedResource", "Violation", "Violations"]

KEPT_MAX = 100


@dataclass(frozen=True, slots=True)
class Violation:
    """Which rule was broken, of which lock, and how."""

    rule: str
    lock_name: str
    text: str


@dataclass
class Violations:
    """All are counted, the first ones are kept."""

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
    """What one lock guards: a value that is written with a fencing token, and refuses a lower one than it has seen."""

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
        """Whose lease was granted last."""
        return self._holder

    def granted(self, lease: BaseLease) -> None:
        """A client has got a lease."""
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
        """Looks at every write that went through, apart from what let it through."""
        if token < self._accepted_last:
            text = f"a write with token {token} was accepted after one with token {self._accepted_last}"
            self._violations.add("write", self.lock_name, text)
        self._accepted_last = max(self._accepted_last, token)

    def stale_released(self, before: BaseLease | None, seen: LockInfo) -> None:
        """A stale lease was released; then the server was asked. `before`: who held the lock before the release."""
        holder = self._holder
        if holder is None or holder is not before or not holder.valid:
            return  # nobody held it all the while
        if not seen.held or seen.fencing_token != holder.fencing_token:
            text = f"after a stale release, the lease with token {holder.fencing_token} is gone"
            self._violations.add("clobber", self.lock_name, text)
