"""Leader election, fencing and leases for Python on the PostgreSQL you already run.

The public names, and nothing else. Importing this imports psycopg and the standard library only.
"""

from pgleaderlock._version import VERSION
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
]

__version__ = VERSION
