"""Leader election, fencing and leases for Python on the PostgreSQL you already run.

Only the public names. Each is imported at its first use, so that a program loads only what it needs: `pgleaderlock
--help` needs no database driver. They import nothing but psycopg and the standard library.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgleaderlock.election import LeaderElection
    from pgleaderlock.errors import (
        ConfigurationError,
        CoordinationError,
        FenceLost,
        LockError,
        LockNotAcquired,
        NotFenced,
        NotLeader,
        PgLeaderLockError,
        SchemaError,
        ShutdownError,
        StaleEpoch,
        UnsafeSessionError,
    )
    from pgleaderlock.fence import fenced
    from pgleaderlock.gate import LeaderGate
    from pgleaderlock.guard import (
        LeadershipGuard,
        acquire_leadership,
        acquire_leadership_blocking,
        acquire_leadership_with_retry,
    )
    from pgleaderlock.keys import key_pair, key_pair_from_bigint
    from pgleaderlock.lock import LeaderLock
    from pgleaderlock.models import (
        Callback,
        ErrorCallback,
        LeaderStateChanged,
        LeaderToken,
        LockState,
        RetryContext,
        StateChangeCallback,
    )
    from pgleaderlock.observer import ElectionObserver
    from pgleaderlock.retry import DecorrelatedJitter, ExponentialBackoff, FixedInterval, RetryStrategy
    from pgleaderlock.slots import Once, once

__all__ = [
    "Callback",
    "ConfigurationError",
    "CoordinationError",
    "DecorrelatedJitter",
    "ElectionObserver",
    "ErrorCallback",
    "ExponentialBackoff",
    "FenceLost",
    "FixedInterval",
    "LeaderElection",
    "LeaderGate",
    "LeaderLock",
    "LeaderStateChanged",
    "LeaderToken",
    "LeadershipGuard",
    "LockError",
    "LockNotAcquired",
    "LockState",
    "NotFenced",
    "NotLeader",
    "Once",
    "PgLeaderLockError",
    "RetryContext",
    "RetryStrategy",
    "SchemaError",
    "ShutdownError",
    "StaleEpoch",
    "StateChangeCallback",
    "UnsafeSessionError",
    "acquire_leadership",
    "acquire_leadership_blocking",
    "acquire_leadership_with_retry",
    "fenced",
    "key_pair",
    "key_pair_from_bigint",
    "once",
]

__version__: str

# The module of each public name.
_HOMES = {
    "election": ("LeaderElection",),
    "errors": (
        "ConfigurationError",
        "CoordinationError",
        "FenceLost",
        "LockError",
        "LockNotAcquired",
        "NotFenced",
        "NotLeader",
        "PgLeaderLockError",
        "SchemaError",
        "ShutdownError",
        "StaleEpoch",
        "UnsafeSessionError",
    ),
    "fence": ("fenced",),
    "gate": ("LeaderGate",),
    "guard": (
        "LeadershipGuard",
        "acquire_leadership",
        "acquire_leadership_blocking",
        "acquire_leadership_with_retry",
    ),
    "keys": (
        "key_pair",
        "key_pair_from_bigint",
    ),
    "lock": ("LeaderLock",),
    "models": (
        "Callback",
        "ErrorCallback",
        "LeaderStateChanged",
        "LeaderToken",
        "LockState",
        "RetryContext",
        "StateChangeCallback",
    ),
    "observer": ("ElectionObserver",),
    "retry": (
        "DecorrelatedJitter",
        "ExponentialBackoff",
        "FixedInterval",
        "RetryStrategy",
    ),
    "slots": (
        "Once",
        "once",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # a type checker must not take every name for one of ours

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return importlib.import_module("pgleaderlock._base.version").VERSION
        if name in _HOMES or name in ("config", "migrate"):  # `pgleaderlock.errors` without an import of its own
            return importlib.import_module(f"pgleaderlock.{name}")
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(importlib.import_module(f"pgleaderlock.{_HOME_OF[name]}"), name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, "__version__"})
