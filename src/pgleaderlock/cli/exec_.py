"""`exec`: runs a command only while this node leads.

What it does not promise, first. When the server ends our session (a restart, `pg_terminate_backend`), the lock is free
at once, and a successor may start its command while ours is still ending within `--grace`. A supervisor that is frozen
cannot stop its command. Who must never act twice needs a fence in the database, not only a supervisor.

What it does: the command is started after the lock was won, and at most once; it is told to end in the same turn of
the event loop in which leadership ends; the lock is given back only after the whole process group has gone, and so is
our own exit.

With `--fenced` the gate is asked instead of the lock: a successor's command starts only after ours has had its grace,
and it gets the epoch of its term, to hand on to whatever must refuse a leader of the past.

Imports click, `lock`, `retry`, `errors`, `models`, its neighbours, and inside, for `--embedded` alone, `embedded` and
`migrate`. It must never start the command twice, never give the lock back while somebody of its group
lives, and never print a DSN.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import click

from pgleaderlock import _systemd as systemd
from pgleaderlock.cli._command import find_executable
from pgleaderlock.cli._contender import Contender, contender_options, warn
from pgleaderlock.cli._exec_ends import for_people, not_won, outcome
from pgleaderlock.cli._fenced import check_fenced, fenced_config, fenced_options, lock_key_of_role, make_election
from pgleaderlock.cli._fenced_exec import SHUTDOWN_TIMEOUT_S, FencedRun
from pgleaderlock.cli._logging import LEVELS, configure
from pgleaderlock.cli._one_run import Ended, Job, OneRun
from pgleaderlock.cli._output import (
    DURATION,
    LockKey,
    exit_code_for_signal,
    optional_dsn_option,
    resolve_dsn,
)
from pgleaderlock.cli._probes import Watched, check_probes, probe_options
from pgleaderlock.cli._reach import hopeless
from pgleaderlock.cli._timing import allow_pooler_option, lease_or_default_s, make_lock, timing_options
from pgleaderlock.errors import LockError, ShutdownError
from pgleaderlock.lock import LeaderLock, LockOptions
from pgleaderlock.models import RetryContext
from pgleaderlock.retry import ExponentialBackoff

__all__ = ["exec_"]

GRACE_S = 3.0
# While competing. Short, because somebody waits for the command to begin; `--standby-wait` is faster still.
RETRY_BASE_S, RETRY_MAX_S = 0.2, 2.0


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
@contender_options(several=False)
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
@fenced_options
@click.option(
    "--standby-wait",
    type=DURATION,
    default=0.0,
    show_default="0: try and back off",
    help="With --wait: wait at the server for this long per try, and win within milliseconds.",
)
@allow_pooler_option
@probe_options
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
    contender: Contender,
    wait_s: float,
    grace_s: float,
    health_interval: float,
    health_timeout: float | None,
    session_lease: float | None,
    fenced: bool,
    late_threshold: float | None,
    node_id: str | None,
    standby_wait: float,
    allow_pooler: bool,
    metrics_port: int | None,
    metrics_host: str,
    embedded: bool,
    log_level: str | None,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND only while leading: pgleaderlock exec --name N -- COMMAND ...

    It is started when the lock is won, and stopped with its whole process group when leadership is lost. Signals are
    passed on to it. It sees PGLEADERLOCK_NAME, PGLEADERLOCK_KEY1, PGLEADERLOCK_KEY2 and PGLEADERLOCK_NODE in its
    environment; with --fenced, also PGLEADERLOCK_ROLE and PGLEADERLOCK_EPOCH. Durations are seconds, or 200ms, 5s, 1m.

    With --fenced a configuration counts (--config): a flag wins over the environment, that over the file.
    """
    configure(log_level or "ERROR")
    check_fenced(ctx, contender, fenced=fenced)
    check_probes(ctx, fenced=fenced, port=metrics_port)
    own = {"late_threshold": late_threshold, "node_id": node_id}
    config = fenced_config(ctx, contender, embedded=embedded, **own) if fenced else None
    lock_key = contender.lock_key() if config is None else lock_key_of_role(config)
    # It is we whom systemd listens to and watches.
    env = {name: value for name, value in os.environ.items() if name not in systemd.VARIABLES} | _variables(lock_key)
    # A command that cannot run must not take the lock from one that can.
    find_executable(command[0], env)
    job = Job(lock_key, command, env, wait_s, grace_s, log_level)
    if config is not None:
        with _embedded(ctx, embedded, fenced=True) as private:
            election = make_election(config, private, grace_s=grace_s, hot=wait_s > 0)
            switched_off = "" if config["enabled"] else f"enabled = false: {config.values['enabled'].origin}"
            run = FencedRun(private or config.dsn, job, election, switched_off=switched_off)
            return asyncio.run(run.watched(metrics_host, metrics_port))
    timing = LockOptions(
        health_interval_s=health_interval,
        health_timeout_s=health_timeout,
        session_lease_s=session_lease,
        standby_wait_s=standby_wait if wait_s else 0.0,
        allow_pooler=allow_pooler,
    )
    with _embedded(ctx, embedded, fenced=False) as private:
        resolved = resolve_dsn(contender.plain_dsn(dsn)) if private is None else private
        return asyncio.run(_compete_and_run(resolved, job, timing))


def _variables(lock_key: LockKey) -> dict[str, str]:
    return {
        "PGLEADERLOCK_NAME": str(lock_key),
        "PGLEADERLOCK_KEY1": str(lock_key.key1),
        "PGLEADERLOCK_KEY2": str(lock_key.key2),
        "PGLEADERLOCK_NODE": f"{socket.gethostname()}/{os.getpid()}",
    }


@contextlib.contextmanager
def _embedded(ctx: click.Context, embedded: bool, *, fenced: bool) -> Iterator[str | None]:
    """The DSN of a private server; None if none is wanted."""
    if not embedded:
        yield None
        return
    if ctx.get_parameter_source("dsn") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("--embedded and --dsn exclude each other: give one or the other")
    from pgleaderlock.embedded import EmbeddedPostgres  # noqa: PLC0415 - only this option needs it.
    from pgleaderlock.migrate import migrate  # noqa: PLC0415

    with EmbeddedPostgres() as server:
        if fenced:  # a private database: there is nobody else who could have made its ledger
            asyncio.run(migrate(server.dsn))
        yield server.dsn


async def _compete_and_run(dsn: str, job: Job, timing: LockOptions) -> int:
    run = OneRun(job)
    attempts = Attempts(run, warn)
    # No reconnect grace: the lock is not held while reconnecting, so the command would have to be stopped anyway.
    options = timing.copy()
    options["retry_strategy"] = attempts
    lock = make_lock(dsn, job.lock_key, **options)
    _warn_of_overlap(job, timing)
    async with Watched(lock) as around:
        return await _run_with(lock, run, attempts, dsn, around)


async def _run_with(lock: LeaderLock, run: OneRun, attempts: Attempts, dsn: str, around: Watched) -> int:
    job = run.job
    run.catch_signals()
    await lock.start()
    leading = asyncio.ensure_future(lock.lead(lambda: run.work(lock)))
    enough: list[asyncio.Future[Any]] = [leading, run.interrupted_by]
    around.ready()
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
        return outcome(run)
    if run.interrupted_by.done():
        return exit_code_for_signal(run.interrupted_by.result())
    if attempts.last_error is not None:
        raise for_people(attempts.last_error)
    raise await not_won(dsn, job)


def _warn_of_overlap(job: Job, timing: LockOptions) -> None:
    interval_s = timing["health_interval_s"]
    noticed_s = interval_s + (timing["health_timeout_s"] or interval_s)
    margin_s = lease_or_default_s(timing["session_lease_s"], interval_s) - noticed_s
    if job.grace_s > margin_s:
        warn(
            f"--grace {job.grace_s:g}s is longer than --session-lease less --health-interval and --health-timeout, "
            f"{margin_s:g}s: after a cut connection a successor may start while this command is still ending; lower "
            "--grace or raise --session-lease"
        )
