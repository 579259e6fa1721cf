"""`exec`: runs a command only while this node leads.

What it does not promise, first. When the server ends our session (a restart, `pg_terminate_backend`), the lock is free
at once, and a successor may start its command while ours is still ending within `--grace`. A supervisor that is frozen
cannot stop its command. Who must never act twice needs a fence in the database, not only a supervisor.

What it does: the command is started after the lock was won, and at most once; it is told to end in the same turn of
the event loop in which leadership ends; the lock is given back only after the whole process group has gone, and so is
our own exit.

Imports click, `lock`, `retry`, `errors`, `models`, `embedded` (inside, for `--embedded` alone) and its neighbours. It
must never start the command twice, never give the lock back while somebody of its group lives, and never print a DSN.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import click

from pgleaderlock.cli._command import find_executable
from pgleaderlock.cli._logging import LEVELS, configure
from pgleaderlock.cli._output import (
    DURATION,
    EXIT_LOST,
    EXIT_NOT_WON,
    DurationType,
    LockKey,
    exit_code_for_signal,
    lock_options,
    optional_dsn_option,
    resolve_dsn,
)
from pgleaderlock.cli.supervise import FORWARDED_SIGNALS, Supervised
from pgleaderlock.errors import LockError, PgLeaderLockError, ShutdownError
from pgleaderlock.lock import LeaderLock
from pgleaderlock.models import RetryContext
from pgleaderlock.retry import ExponentialBackoff

__all__ = ["exec_"]

GRACE_S = 3.0
# While competing. Short, because somebody waits for the command to begin; `--standby-wait` is faster still.
RETRY_BASE_S, RETRY_MAX_S = 0.2, 2.0
# The command has ended: a server that does not answer must not hold up its exit code.
SHUTDOWN_TIMEOUT_S = 5.0
# These end the wait for the lock; the others mean something to the command alone.
ENDING_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})

_POSITIVE = DurationType(zero_allowed=False)


class NotWon(PgLeaderLockError):
    """Somebody else leads. The command was not run."""

    exit_code = EXIT_NOT_WON


class LeadershipLost(PgLeaderLockError):
    """The command was stopped, because this node no longer leads."""

    exit_code = EXIT_LOST


@dataclass(frozen=True)
class Timing:
    """How the lock is kept. The defaults are those of `LeaderLock`; they are needed here to compare them."""

    health_interval_s: float
    health_timeout_s: float | None
    session_lease_s: float | None
    standby_wait_s: float

    @property
    def margin_s(self) -> float:
        """Between the latest moment at which we notice a loss and the earliest at which the server drops us."""
        timeout_s = self.health_interval_s if self.health_timeout_s is None else self.health_timeout_s
        lease_s = 3 * self.health_interval_s if self.session_lease_s is None else self.session_lease_s
        return lease_s - (self.health_interval_s + timeout_s)


@dataclass(frozen=True)
class Job:
    """What is to be run, and under which conditions."""

    lock_key: LockKey
    command: Sequence[str]
    env: Mapping[str, str]
    wait_s: float
    grace_s: float
    timing: Timing
    allow_pooler: bool
    log_level: str | None


class Attempts:
    """The retry strategy while competing. It is told why each attempt failed, and remembers the last reason."""

    def __init__(self, wait_s: float, warn: Callable[[str], None]) -> None:
        self.last_error: Exception | None = None
        self._wait_s = wait_s
        self._warn = warn
        self._warned: str | None = None
        self._back_off = ExponentialBackoff(RETRY_BASE_S, RETRY_MAX_S)

    def next_delay_s(self, ctx: RetryContext) -> float | None:
        self.last_error = ctx.last_error
        if self._wait_s == 0:
            return None
        if ctx.last_error is not None and (text := str(ctx.last_error)) != self._warned:
            self._warned = text
            self._warn(f"{text} (tried again for up to {self._wait_s:g} s)")
        return self._back_off.next_delay_s(ctx)


class _Ended(Exception):
    """Leaves `LeaderLock.lead` for good: it starts a work again in the next term, but a command runs once."""


@dataclass
class OneRun:
    """The command, from the moment this node leads until nobody of its group is left."""

    job: Job
    began: bool = False
    called_off: bool = False
    lost: bool = False
    exit_code: int | None = None
    all_gone: bool = True
    interrupted_by: "asyncio.Future[int]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _child: Supervised | None = None
    _early_signals: list[int] = field(default_factory=list)

    async def work(self) -> None:
        """For `lead`: cancelled the moment leadership ends. Always leaves by an exception, so that it runs once."""
        if self.called_off:
            raise _Ended
        self.began = True
        configure(self.job.log_level or "WARNING")
        try:
            await self._run()
        except asyncio.CancelledError:
            # Leadership has ended before the command had ended, or before it was known to have started.
            self.lost = self.exit_code is None
        raise _Ended

    async def _run(self) -> None:
        child = await Supervised.start(self.job.command, self.job.env)
        self._child = child
        for signum in self._early_signals:
            child.forward(signum)
        try:
            try:
                self.exit_code = await child.wait()
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


@click.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Exit codes: the command's own (128+n if signal n ended it), 2 usage or database, 75 not won, 76 leadership "
    "lost, 126 and 127 as a shell.",
)
@lock_options
@optional_dsn_option
@click.option("--embedded", is_flag=True, help="Use the private PostgreSQL of this user on this machine.")
@click.option("--wait", "wait_s", type=DURATION, default=0, show_default="one try", help="How long to compete.")
@click.option(
    "--grace",
    "grace_s",
    type=DURATION,
    default=GRACE_S,
    show_default=f"{GRACE_S:g}s",
    help="After a loss: how long between SIGTERM and SIGKILL.",
)
@click.option(
    "--health-interval", "health_interval_s", type=_POSITIVE, default=5, show_default="5s", help="Between two probes."
)
@click.option("--health-timeout", "health_timeout_s", type=_POSITIVE, help="For one probe.  [default: the interval]")
@click.option(
    "--session-lease",
    "session_lease_s",
    type=_POSITIVE,
    help="After this long without a sign of life the server drops us.  [default: 3 x the interval]",
)
@click.option(
    "--standby-wait",
    "standby_wait_s",
    type=DURATION,
    default=0,
    show_default="off",
    help="With --wait: wait at the server, this long at a time, and win within milliseconds.",
)
@click.option("--allow-pooler", is_flag=True, help="The database is behind a pooler in session mode.")
@click.option(
    "--log-level",
    type=click.Choice(LEVELS, case_sensitive=False),
    help="What to log on standard error.  [default: errors; warnings while the command runs]",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def exec_(
    ctx: click.Context,
    lock_key: LockKey,
    dsn: str | None,
    embedded: bool,
    wait_s: float,
    grace_s: float,
    health_interval_s: float,
    health_timeout_s: float | None,
    session_lease_s: float | None,
    standby_wait_s: float,
    allow_pooler: bool,
    log_level: str | None,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND only while leading: pgleaderlock exec --name N -- COMMAND ...

    It is started when the lock is won, and stopped with its whole process group when leadership is lost. Signals are
    passed on to it. It sees PGLEADERLOCK_NAME, PGLEADERLOCK_KEY1, PGLEADERLOCK_KEY2 and PGLEADERLOCK_NODE in its
    environment.
    """
    timing = Timing(health_interval_s, health_timeout_s, session_lease_s, standby_wait_s if wait_s else 0.0)
    env = {**os.environ, **_variables(lock_key)}
    job = Job(lock_key, command, env, wait_s, grace_s, timing, allow_pooler, log_level)
    # A command that cannot run must not take the lock from one that can.
    find_executable(command[0], env)
    configure(log_level or "ERROR")
    with _database(ctx, dsn, embedded) as resolved:
        return asyncio.run(_compete_and_run(resolved, job))


def _variables(lock_key: LockKey) -> dict[str, str]:
    return {
        "PGLEADERLOCK_NAME": str(lock_key),
        "PGLEADERLOCK_KEY1": str(lock_key.key1),
        "PGLEADERLOCK_KEY2": str(lock_key.key2),
        "PGLEADERLOCK_NODE": f"{socket.gethostname()}/{os.getpid()}",
    }


@contextlib.contextmanager
def _database(ctx: click.Context, dsn: str | None, embedded: bool) -> Iterator[str]:
    if not embedded:
        yield resolve_dsn(dsn)
        return
    if ctx.get_parameter_source("dsn") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("--embedded and --dsn exclude each other: give one or the other")
    from pgleaderlock.embedded import EmbeddedPostgres  # noqa: PLC0415 - only this option needs it.

    with EmbeddedPostgres() as server:
        yield server.dsn


async def _compete_and_run(dsn: str, job: Job) -> int:
    run = OneRun(job)
    attempts = Attempts(job.wait_s, _warn)
    lock = _make_lock(dsn, job, attempts)
    _warn_of_overlap(job)
    _catch_signals(run)
    await lock.start()
    leading = asyncio.ensure_future(lock.lead(run.work))
    try:
        await asyncio.wait([leading, run.interrupted_by], timeout=job.wait_s or None, return_when="FIRST_COMPLETED")
        if run.began:
            await asyncio.wait([leading])
        run.called_off = True
    finally:
        with contextlib.suppress(ShutdownError):
            await lock.shutdown(SHUTDOWN_TIMEOUT_S)
    # Whatever made it end: `lead` has heard of it by now. What the command's start raised (126, 127) is raised here.
    with contextlib.suppress(_Ended, LockError):
        await leading
    if run.began:
        return _outcome(run, lock)
    if run.interrupted_by.done():
        return exit_code_for_signal(run.interrupted_by.result())
    if attempts.last_error is not None:
        raise LockError(str(attempts.last_error)) from attempts.last_error
    raise NotWon(await _not_won(dsn, job))


def _make_lock(dsn: str, job: Job, attempts: Attempts) -> LeaderLock:
    key, timing = job.lock_key, job.timing
    # No reconnect grace: the lock is not held while reconnecting, so the command would have to be stopped anyway.
    return LeaderLock(
        dsn,
        key.key1,
        key.key2,
        retry_strategy=attempts,
        health_interval_s=timing.health_interval_s,
        health_timeout_s=timing.health_timeout_s,
        session_lease_s=timing.session_lease_s,
        standby_wait_s=timing.standby_wait_s,
        allow_pooler=job.allow_pooler,
    )


def _catch_signals(run: OneRun) -> None:
    loop = asyncio.get_running_loop()
    for signum in FORWARDED_SIGNALS:
        # What our parent wants ignored (nohup, a background job's Ctrl-C) stays ignored, for the command too.
        if signal.getsignal(signum) is not signal.SIG_IGN:
            loop.add_signal_handler(signum, run.on_signal, signum)


def _outcome(run: OneRun, lock: LeaderLock) -> int:
    name = run.job.lock_key
    if not run.all_gone:
        _warn("a process of the command has survived SIGKILL and may still act")
    if run.lost:
        reason = lock.last_error or "the lock is held by another"
        raise LeadershipLost(f"lost leadership of {name}, so the command was stopped: {reason}")
    assert run.exit_code is not None
    return run.exit_code


async def _not_won(dsn: str, job: Job) -> str:
    waited = f" (waited {job.wait_s:g} s)" if job.wait_s else ""
    return f"not won: somebody else leads {job.lock_key}{waited}"


def _warn_of_overlap(job: Job) -> None:
    margin_s = job.timing.margin_s
    if job.grace_s > margin_s:
        _warn(
            f"--grace {job.grace_s:g}s is longer than the {margin_s:g}s between noticing a cut connection and the end "
            "of the session lease: a successor may start while this command is still ending. Lower --grace, or raise "
            f"--session-lease by {job.grace_s - margin_s:g}s or more"
        )


def _warn(text: str) -> None:
    print("warning:", " ".join(text.split()), file=sys.stderr, flush=True)
