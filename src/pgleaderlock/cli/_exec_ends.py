"""How a command that was run, or was not, ends for whoever has called `exec`. With a lock and with an election alike.

Imports `status`, `_one_run`, `_reach`, `_timing` and `errors`. It must never print a DSN.
"""

import asyncio
import contextlib

from pgleaderlock.cli._contender import warn
from pgleaderlock.cli._one_run import CommandStopped, Job, NotWon, OneRun
from pgleaderlock.cli._output import LockKey
from pgleaderlock.cli._reach import Look, explained
from pgleaderlock.cli._timing import in_option_words
from pgleaderlock.cli.status import describe, look_at
from pgleaderlock.errors import LockError, PgLeaderLockError, UnsafeSessionError

__all__ = ["for_people", "not_won", "outcome"]

HOLDER_TIMEOUT_S = 2.0


def outcome(run: OneRun) -> int:
    """The command's own exit code, or why it was stopped."""
    name = run.job.lock_key
    if not run.all_gone:
        warn("a process of the command has survived SIGKILL and may still act")
    if run.lost:
        raise CommandStopped(f"lost leadership of {name}, so the command was stopped: {run.reason}")
    assert run.exit_code is not None
    return run.exit_code


async def not_won(dsn: str, job: Job) -> NotWon:
    """Somebody else leads; it says who."""
    waited = f" (waited {job.wait_s:g} s)" if job.wait_s else ""
    return NotWon(f"not won: {job.lock_key} is held by {await _holder(dsn, job.lock_key)}{waited}")


async def _holder(dsn: str, key: LockKey) -> str:
    """Who leads, if that is quickly said. It may have changed since we asked for the lock."""
    with contextlib.suppress(PgLeaderLockError, TimeoutError):
        async with asyncio.timeout(HOLDER_TIMEOUT_S), await Look.open(dsn, "pgleaderlock exec") as look:
            holders = (await look_at(look, key)).holders
        return " and ".join(describe(holder) for holder in holders) or "nobody any more; a moment ago it was"
    return "somebody else"


def for_people(error: Exception) -> PgLeaderLockError:
    """The error in the words of the command line."""
    if isinstance(error, UnsafeSessionError):
        return UnsafeSessionError(error.reason, in_option_words(str(error)))
    return explained(error) if isinstance(error, PgLeaderLockError) else LockError(str(error))
