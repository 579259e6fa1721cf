"""One command, run once, for as long as this node leads: what `exec` does with a lock and with an election alike.

Imports `supervise`, `_logging`, `_output` and `errors`. It must never start the command twice.
"""

import asyncio
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pgleaderlock.cli._logging import configure
from pgleaderlock.cli._output import EXIT_LOST, EXIT_NOT_WON, LockKey
from pgleaderlock.cli.supervise import FORWARDED_SIGNALS, Supervised
from pgleaderlock.errors import PgLeaderLockError

__all__ = ["CommandStopped", "Ended", "Job", "NotWon", "OneRun"]

# These end the wait for the lock; the others mean something to the command alone.
ENDING_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})


class NotWon(PgLeaderLockError):
    """Somebody else leads, or holds the lock. The command was not run."""

    exit_code = EXIT_NOT_WON


class CommandStopped(PgLeaderLockError):
    """Leadership, or the lease, was lost, so the command was stopped."""

    exit_code = EXIT_LOST


@dataclass(frozen=True)
class Job:
    """What is to be run, and under which conditions."""

    lock_key: LockKey
    command: Sequence[str]
    env: Mapping[str, str]
    wait_s: float
    """How long to compete; 0 is one try."""
    grace_s: float
    log_level: str | None


class Leadership(Protocol):
    """A lock or an election: whoever says why leadership has ended."""

    @property
    def last_error(self) -> Exception | None: ...


class Ended(Exception):
    """Leaves `lead` for good: it starts a work again in the next term, but a command runs once."""


@dataclass
class OneRun:
    """The command, from the moment this node leads until nobody of its group is left."""

    job: Job
    began: bool = False
    called_off: bool = False
    lost: bool = False
    exit_code: int | None = None
    all_gone: bool = True
    reason: Exception | None = None
    interrupted_by: "asyncio.Future[int]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _child: Supervised | None = None
    _early_signals: list[int] = field(default_factory=list)

    async def work(self, leadership: Leadership, env: Mapping[str, str] | None = None) -> None:
        """For `lead`: cancelled the moment leadership ends. Always leaves by an exception, so that it runs once."""
        if self.called_off:
            raise Ended
        self.began = True
        configure(self.job.log_level or "WARNING")
        try:
            self._child = child = await Supervised.start(self.job.command, {**self.job.env, **(env or {})})
            await self._see_through(child, leadership)
        except asyncio.CancelledError:
            # Leadership has ended before the command has, or before it was known to have started.
            self.lost = self.exit_code is None
            self.reason = self.reason or leadership.last_error
        raise Ended

    async def _see_through(self, child: Supervised, leadership: Leadership) -> None:
        for signum in self._early_signals:
            child.forward(signum)
        try:
            try:
                self.exit_code = await child.wait()
            except asyncio.CancelledError:
                self.reason = leadership.last_error  # Now: while the command ends, other things may go wrong.
                raise
            finally:
                # Also after it has ended by itself: what it left in the background would go on without the lock.
                self.all_gone = await child.stop(self.job.grace_s)
        finally:
            child.close()

    def on_signal(self, signum: int) -> None:
        if self._child is not None:
            self._child.forward(signum)
        elif self.began:
            self._early_signals.append(signum)
        elif signum in ENDING_SIGNALS and not self.interrupted_by.done():
            self.interrupted_by.set_result(signum)

    def catch_signals(self) -> None:
        """From now on, signals are for the command."""
        loop = asyncio.get_running_loop()
        for signum in FORWARDED_SIGNALS:
            # What our parent wants ignored (nohup, a background job's Ctrl-C) stays ignored, for the command too.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                loop.add_signal_handler(signum, self.on_signal, signum)
