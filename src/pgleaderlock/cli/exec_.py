"""`exec`: runs a command only while this node leads.

What it does not promise, first. When the server ends our session (a restart, `pg_terminate_backend`), the lock is free
at once, and a successor may start its command while ours is still ending within `--grace`. A supervisor that is frozen
cannot stop its command. Who must never act twice needs a fence in the database, not only a supervisor.

What it does: the command is started after the lock was won, and at most once; it is told to end in the same turn of
the event loop in which leadership ends; the lock is given back only after the whole process group has gone, and so is
our own exit.

With `--fenced` the gate is asked instead of the lock: a successor's command starts only after ours has had its grace,
and it gets the epoch of its term, to hand on to whatever must refuse a leader of the past.

Imports click, `lock`, `election`, `retry`, `errors`, `models`, its neighbours, and inside, for `--embedded` alone,
`embedded` and `migrate`. It must never start the command twice, never give the lock back while somebody of its group
lives, and never print a DSN.
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from pgleaderlock import _systemd as systemd
from pgleaderlock.cli._command import find_executable
from pgleaderlock.cli._fenced import check_fenced, fenced_options, given, make_election
from pgleaderlock.cli._logging import LEVELS, configure
from pgleaderlock.cli._one_run import CommandStopped, Ended, Job, NotWon, OneRun
from pgleaderlock.cli._output import (
    DURATION,
    LockKey,
    exit_code_for_signal,
    lock_options,
    optional_dsn_option,
    resolve_dsn,
)
from pgleaderlock.cli._probes import Watched, check_probes, probe_options
from pgleaderlock.cli._reach import Look, explained, hopeless
from pgleaderlock.cli._timing import (
    allow_pooler_option,
    in_option_words,
    lease_or_default_s,
    make_lock,
    timing_options,
)
from pgleaderlock.cli.status import describe, look_at
from pgleaderlock.election import LeaderElection
from pgleaderlock.errors import LockError, NotLeader, PgLeaderLockError, ShutdownError, UnsafeSessionError
from pgleaderlock.lock import LeaderLock, LockOptions
from pgleaderlock.models import LeaderToken, LockState, RetryContext
from pgleaderlock.retry import ExponentialBackoff

__all__ = ["exec_"]

GRACE_S = 3.0
# While competing. Short, because somebody waits for the command to begin; `--standby-wait` is faster still.
RETRY_BASE_S, RETRY_MAX_S = 0.2, 2.0
# The command has ended: a server that does not answer must not hold up its exit code.
SHUTDOWN_TIMEOUT_S = 5.0
HOLDER_TIMEOUT_S = 2.0


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
    lock_key: LockKey,
    wait_s: float,
    grace_s: float,
    health_interval: float,
    health_timeout: float | None,
    session_lease: float | None,
    fenced: bool,
    late_threshold: float | None,
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
    """
    configure(log_level or "ERROR")
    check_fenced(ctx, lock_key, fenced=fenced)
    check_probes(ctx, fenced=fenced, port=metrics_port)
    # It is we whom systemd listens to and watches.
    env = {name: value for name, value in os.environ.items() if name not in systemd.VARIABLES} | _variables(lock_key)
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
    with _database(ctx, dsn, embedded, fenced) as resolved:
        if not fenced:
            return asyncio.run(_compete_and_run(resolved, job, timing))
        election = make_election(
            resolved,
            lock_key,
            interval_s=health_interval if given(ctx, "health_interval") else None,
            late_threshold_s=late_threshold,
            session_lease_s=session_lease,
            standby_wait_s=timing["standby_wait_s"],
            allow_pooler=allow_pooler,
            grace_s=grace_s,
        )
        return asyncio.run(FencedRun(resolved, job, election).watched(metrics_host, metrics_port))


def _variables(lock_key: LockKey) -> dict[str, str]:
    return {
        "PGLEADERLOCK_NAME": str(lock_key),
        "PGLEADERLOCK_KEY1": str(lock_key.key1),
        "PGLEADERLOCK_KEY2": str(lock_key.key2),
        "PGLEADERLOCK_NODE": f"{socket.gethostname()}/{os.getpid()}",
    }


@contextlib.contextmanager
def _database(ctx: click.Context, dsn: str | None, embedded: bool, fenced: bool) -> Iterator[str]:
    if not embedded:
        yield resolve_dsn(dsn)
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
    attempts = Attempts(run, _warn)
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
        return _outcome(run)
    if run.interrupted_by.done():
        return exit_code_for_signal(run.interrupted_by.result())
    if attempts.last_error is not None:
        raise _for_people(attempts.last_error)
    raise NotWon(await _not_won(dsn, job))


class FencedRun:
    """Competes in an election, and runs the command behind its gate."""

    def __init__(self, dsn: str, job: Job, election: LeaderElection) -> None:
        assert job.lock_key.name is not None
        self._dsn = dsn
        self._job = job
        self._election = election
        self._role = job.lock_key.name
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._warned: str | None = None
        self._looked = False
        """The first try is over, however it went."""

    async def watched(self, host: str, port: int | None) -> int:
        async with Watched(self._election, host=host, port=port) as around:
            return await self.run(around)

    async def run(self, around: Watched) -> int:
        self._run = run = OneRun(self._job)
        self._listen()
        run.catch_signals()
        watching = asyncio.ensure_future(self._watch())
        await asyncio.sleep(0)  # it watches from now on
        leading: asyncio.Future[None] | None = None
        try:
            await self._election.start()
            leading = asyncio.ensure_future(self._election.lead(self._role, self._work))
            around.ready()
            await self._compete(leading)
            if run.began:
                await asyncio.wait([leading])
            run.called_off = True
        finally:
            watching.cancel()
            around.stopping()
            with contextlib.suppress(ShutdownError):
                await self._election.shutdown(SHUTDOWN_TIMEOUT_S)
        with contextlib.suppress(Ended, LockError):
            await leading
        if run.began:
            return _outcome(run)
        if run.interrupted_by.done():
            return exit_code_for_signal(run.interrupted_by.result())
        error = self._error or self._election.last_error
        if error is not None and self._election.leader(self._role) is None:
            raise _for_people(error)
        raise NotWon(await _not_won(self._dsn, self._job))

    @property
    def last_error(self) -> Exception | None:
        """Why the gate is shut; for `OneRun`."""
        try:
            self._election.gate(self._role).require_leader()
        except NotLeader as refused:
            return (self._election.last_error if refused.reason == "lost" else None) or refused
        return None

    async def _work(self, token: LeaderToken) -> None:
        await self._run.work(self, {"PGLEADERLOCK_ROLE": token.role, "PGLEADERLOCK_EPOCH": str(token.epoch)})

    async def _compete(self, leading: "asyncio.Future[None]") -> None:
        """Return when the command runs or never will. Once the lock is won, the gate is waited for, however long."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._job.wait_s
        while not (self._run.began or leading.done() or self._run.interrupted_by.done()):
            left_s = None
            if self._election.state(self._role) is not LockState.LEADER:
                left_s = deadline - loop.time() if self._job.wait_s else None
                if self._hopeless() or (self._looked if left_s is None else left_s <= 0):
                    return
            self._news.clear()
            news = asyncio.ensure_future(self._news.wait())
            ends: list[asyncio.Future[Any]] = [leading, self._run.interrupted_by, news]
            await asyncio.wait(ends, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()

    def _hopeless(self) -> bool:
        return self._error is not None and not self._connected and hopeless(self._error)

    async def _watch(self) -> None:
        """Whatever becomes of the first try, the election tells of it: who leads, or that it does not know."""
        async for _ in self._election.changes():
            self._looked = True
            self._news.set()

    def _listen(self) -> None:
        election = self._election
        self._connected = False

        @election.on_state_change
        def changed(_role: str, _old: LockState, new: LockState) -> None:
            if new is LockState.LEADER:
                self._connected, self._error = True, None
            self._news.set()

        @election.on_error
        def failed(error: Exception) -> None:
            self._error = error
            if self._job.wait_s and not self._run.began and str(error) != self._warned:
                self._warned = str(error)
                _warn(f"{error} (trying again for up to {self._job.wait_s:g} s)")
            self._news.set()


def _outcome(run: OneRun) -> int:
    name = run.job.lock_key
    if not run.all_gone:
        _warn("a process of the command has survived SIGKILL and may still act")
    if run.lost:
        raise CommandStopped(f"lost leadership of {name}, so the command was stopped: {run.reason}")
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
