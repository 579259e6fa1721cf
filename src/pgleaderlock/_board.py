"""What the parts of an engine share: its settings, its roles, its session. Decides nothing.

The roles are replaced as a whole and never changed in place: whoever walks through them may await meanwhile, or be on
another thread. Imports `_roles`, `_observers`, `ledger` and what they stand on.
"""

import random
from collections.abc import Collection
from dataclasses import dataclass, field

from pgleaderlock._clock import Clock
from pgleaderlock._logging import StructuredLogger
from pgleaderlock._observers import Observers
from pgleaderlock._roles import IN_TERM, Role
from pgleaderlock.errors import ConnectionError
from pgleaderlock.ledger import Identity, Ledger

__all__ = ["Board", "EngineSettings"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    heartbeat_interval_s: float
    gate_s: float
    lease_s: float
    acquire_delay_s: tuple[float, float]
    standby_wait_s: float
    statement_timeout_s: float
    instant: bool
    evict_stale: bool
    candidate: bool
    channel: str
    retention_s: float | None
    balance: bool


@dataclass(slots=True)
class Board:
    settings: EngineSettings
    identity: Identity
    clock: Clock
    rng: random.Random
    log: StructuredLogger
    observers: Observers
    roles: dict[str, Role] = field(default_factory=dict)
    ledger: Ledger | None = None
    trying: Collection[Role] = ()
    """Whose lock or term a statement is on its way for: if it fails, these attempts have."""
    stopping: bool = False
    forced: bool = False

    def there(self) -> Ledger:
        """The session's ledger, or `ConnectionError`: it may have gone while somebody waited."""
        if self.ledger is None:
            raise ConnectionError("there is no session")
        return self.ledger

    def led(self) -> list[Role]:
        """Those in a term of this node. Asked at every tick, and there may be a thousand."""
        return [role for role in self.roles.values() if role.driver.state in IN_TERM]

    def nothing_held(self) -> bool:
        return not any(role.holds_lock for role in self.roles.values())
