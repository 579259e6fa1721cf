"""pgleaderlock for threads and scripts: the names of the package itself, without `await`.

`LeaderLock` and `LeaderElection` run on one event loop per process, on a thread of its own (`background`), and are the
async ones driven from outside: nothing of the protocol is written twice. The work of `lead` runs in the thread that
calls it (`leading`). `acquire_leadership` on a borrowed connection starts nothing.
"""

from pgleaderlock.sync.easy import advisory_lock, leader_only
from pgleaderlock.sync.election import LeaderElection, LeaderGate
from pgleaderlock.sync.guard import (
    LeadershipGuard,
    acquire_leadership,
    acquire_leadership_blocking,
    acquire_leadership_with_retry,
)
from pgleaderlock.sync.lock import LeaderLock
from pgleaderlock.sync.slots import once

__all__ = [
    "LeaderElection",
    "LeaderGate",
    "LeaderLock",
    "LeadershipGuard",
    "acquire_leadership",
    "acquire_leadership_blocking",
    "acquire_leadership_with_retry",
    "advisory_lock",
    "leader_only",
    "once",
]
