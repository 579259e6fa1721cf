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
from typing import Any

import click

from pgleaderlock.cli._command import find_executable
from pgleaderlock.cli._logging import LEVELS, configure
from pgleaderlock.cli._output import (
    DURATION,
    EXIT_LOST,
    EXIT_NOT_WON,
    LockKey,
    exit_code_for_signal,
    lock_options,
    optional_dsn_option,
    resolve_dsn,
)
from pgleaderlock.cli._reach import Look, explained, hopeless
from pgleaderlock.cli._timing import (
    allow_pooler_option,
    in_option_words,
    lease_or_default_s,
    make_lock,
    timing_options,
)
from pgleaderlock.cli.status import describe, look_at
from pgleaderlock.cli.supervise import Supervised
from pgleaderlock.errors import LockError, PgLeaderLockError, ShutdownError, UnsafeSessionError
from pgleaderlock.lock import LeaderLock, LockOptions
from pgleaderlock.models import RetryContext
from pgleaderlock.retry import ExponentialBackoff

__all__ = ["exec_"]

GRACE_S = 3.0
# While competing. Short, because somebody waits for the command to begin; `--standby-wait` is faster still.
RETRY_BASE_S, RETRY_MAX_S = 0.2, 2.0
# The command has ended: a server that does not answer must not hold up its exit code.
SHUTDOWN_TIMEOUT_S = 5.0
HOLDER_TIMEOUT_S = 2.0


class NotWon(PgLeaderLockError):
    """Somebody else leads. The command was not run."""

    exit_code = EXIT_NOT_WON


class LeadershipLost(PgLeaderLockError):
    """The command was stopped, because this node no longer leads."""

    exit_code = EXIT_LOST


class Attempts:
    """The retry strategy while competing. It is told why each attempt failed, and remembers the last reason."""

    def __init__(self, run: OneRun, warn: Callable[[str], None]) -> None:
        self.last_error: Exception | None = None
        self._run = run
        self._warn = warn
        self._warned: str | None = None
        self._completed_one = False
        self._back_off = ExponentialBackoff(RETRY_BASE_S, RETRY_MAX_S)

    def next_delay_s(self, ctx: RetryContext) -> float | None:
        if self._run.began:
            return RETRY_MAX_S  # The competition is over; what goes on is the end of the command.
        self.last_error = error = ctx.last_error
        wait_s = self._run.job.wait_s
        if error is None:
            self._completed_one = True
        # What has worked before may work again: a password may be in the middle of its rotation.
        if wait_s == 0 or (error is not None and hopeless(error) and not self._completed_one):
            return None
        if error is not None and str(error) != self._warned:
            self._warned = str(error)
            self._warn(f"{error} (trying again for up to {wait_s:g} s)")
        return self._back_off.next_delay_s(ctx)


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Run a command only while leading.",
    epilog="Exit codes: the command's own (128+n if signal n ended it), 2 usage or database, 75 not won, 76 leadership "
    "lost, 126 and 127 as a shell.",
)
@optional_dsn_option
@lock_options
@click.option("--wait", "wait_s", type=DURATION, default=0.0, show_default="0: one try", help="How long to compete.")
@click.option(
    "--grace",
    "grace_s",
    type=DURATION,
    default=GRACE_S,
    show_default=f"{GRACE_S:g}s",
    help="How long a command that has to end has between SIGTERM and SIGKILL.",
)
@timing_options
@click.option(
    "--standby-wait",
    type=DURATION,
    default=0.0,
    show_default="0: try and back off",
    help="With --wait: wait at the server for this long per try, and win within milliseconds.",
)
@allow_pooler_option
@click.option(
    "--embedded", is_flag=True, help="Use a private PostgreSQL of this user on this machine, started if need be."
)
@click.option(
    "--log-level",
    type=click.Choice(LEVELS, case_sensitive=False),
    show_default="ERROR, and WARNING while the command runs",
    help="What to log on standard error.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def exec_(
    ctx: click.Context,
    *,
    dsn: str | None,
    lock_key: LockKey,
    wait_s: float,
    grace_s: float,
    health_interval: float,
    health_timeout: float | None,
    session_lease: float | None,
    standby_wait: float,
    allow_pooler: bool,
    embedded: bool,
    log_level: str | None,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND only while leading: pgleaderlock exec --name N -- COMMAND ...

    It is started when the lock is won, and stopped with its whole process group when leadership is lost. Signals are
    passed on to it. It sees PGLEADERLOCK_NAME, PGLEADERLOCK_KEY1, PGLEADERLOCK_KEY2 and PGLEADERLOCK_NODE in its
    environment. Durations are seconds, or 200ms, 5s, 1m.
    """
    configure(log_level or "ERROR")
    env = {**os.environ, **_variables(lock_key)}
    # A command that cannot run must not take the lock from one that can.
    find_executable(command[0], env)
    timing = LockOptions(
        health_interval_s=health_interval,
        health_timeout_s=health_timeout,
        session_lease_s=session_lease,
        standby_wait_s=standby_wait if wait_s else 0.0,
        allow_pooler=allow_pooler,
    )
    job = Job(lock_key, command, env, wait_s, grace_s, log_level)
    with _database(ctx, dsn, embedded) as resolved:
        return asyncio.run(_compete_and_run(resolved, job, timing))


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


async def _compete_and_run(dsn: str, job: Job, timing: LockOptions) -> int:
    run = OneRun(job)
    attempts = Attempts(run, _warn)
    # No reconnect grace: the lock is not held while reconnecting, so the command would have to be stopped anyway.
    options = timing.copy()
    options["retry_strategy"] = attempts
    lock = make_lock(dsn, job.lock_key, **options)
    _warn_of_overlap(job, timing)
    run.catch_signals()
    await lock.start()
    leading = asyncio.ensure_future(lock.lead(lambda: run.work(lock)))
    enough: list[asyncio.Future[Any]] = [leading, run.interrupted_by]
    try:
        await asyncio.wait(enough, timeout=job.wait_s or None, return_when=asyncio.FIRST_COMPLETED)
        if run.began:
            await asyncio.wait([leading])
        run.called_off = True
    finally:
        with contextlib.suppress(ShutdownError):
            await lock.shutdown(SHUTDOWN_TIMEOUT_S)
    # Whatever made it end: `lead` has heard of it by now. What the command's start raised (126, 127) is raised here.
    with contextlib.suppress(Ended, LockError):
        await leading
    if run.began:
        return _outcome(run)
    if run.interrupted_by.done():
        return exit_code_for_signal(run.interrupted_by.result())
    if attempts.last_error is not None:
        raise _for_people(attempts.last_error)
    raise NotWon(await _not_won(dsn, job))


def _outcome(run: OneRun) -> int:
    name = run.job.lock_key
    if not run.all_gone:
        _warn("a process of the command has survived SIGKILL and may still act")
    if run.lost:
        raise LeadershipLost(f"lost leadership of {name}, so the command was stopped: {run.reason}")
    assert run.exit_code is not None
    return run.exit_code


async def _not_won(dsn: str, job: Job) -> str:
    waited = f" (waited {job.wait_s:g} s)" if job.wait_s else ""
    return f"not won: {job.lock_key} is held by {await _holder(dsn, job.lock_key)}{waited}"


async def _holder(dsn: str, key: LockKey) -> str:
    """Who leads, if that is quickly said. It may have changed since we asked for the lock."""
    with contextlib.suppress(PgLeaderLockError, TimeoutError):
        async with asyncio.timeout(HOLDER_TIMEOUT_S), await Look.open(dsn, "pgleaderlock exec") as look:
            holders = (await look_at(look, key)).holders
        return " and ".join(describe(holder) for holder in holders) or "nobody any more; a moment ago it was"
    return "somebody else"


def _for_people(error: Exception) -> PgLeaderLockError:
    if isinstance(error, UnsafeSessionError):
        return UnsafeSessionError(error.reason, in_option_words(str(error)))
    return explained(error) if isinstance(error, PgLeaderLockError) else LockError(str(error))


def _warn_of_overlap(job: Job, timing: LockOptions) -> None:
    interval_s = timing["health_interval_s"]
    noticed_s = interval_s + (timing["health_timeout_s"] or interval_s)
    margin_s = lease_or_default_s(timing["session_lease_s"], interval_s) - noticed_s
    if job.grace_s > margin_s:
        _warn(
            f"--grace {job.grace_s:g}s is longer than --session-lease less --health-interval and --health-timeout, "
            f"{margin_s:g}s: after a cut connection a successor may start while this command is still ending; lower "
            "--grace or raise --session-lease"
        )


def _warn(text: str) -> None:
    print("warning:", " ".join(text.split()), file=sys.stderr, flush=True)
