"""pgleaderlock for threads and scripts: the names of the package itself, without `await`.

`LeaderLock` and `LeaderElection` wrap the async ones, which run on one event loop per process in a background thread
(`background`): no part of the protocol is written twice. The work of `lead` runs in the thread that calls it
(`leading`). `acquire_leadership` on a borrowed connection starts no thread.
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
