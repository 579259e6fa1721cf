"""The lock server's client, for asyncio and for threads. Needs the extra `client`.

The public names, and nothing else.
"""

from pgleaderlock.client._flows import Acquire, Release, Renew
from pgleaderlock.client._lease import LeaseState
from pgleaderlock.client._wire import LockInfo
from pgleaderlock.client.aio import AsyncHeartbeat, AsyncLease, AsyncLockClient
from pgleaderlock.client.blocking import Heartbeat, Lease, LockClient
from pgleaderlock.errors import (
    LeaseLost,
    LockHeld,
    LockServerError,
    LockServerRefused,
    LockServerUnreachable,
)

__all__ = [
    "Acquire",
    "AsyncHeartbeat",
    "AsyncLease",
    "AsyncLockClient",
    "Heartbeat",
    "Lease",
    "LeaseLost",
    "LeaseState",
    "LockClient",
    "LockHeld",
    "LockInfo",
    "LockServerError",
    "LockServerRefused",
    "LockServerUnreachable",
    "Release",
    "Renew",
]
