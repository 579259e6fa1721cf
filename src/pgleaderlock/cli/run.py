"""`pgleaderlock run`: take part in an election and log what happens, until a signal.

For experiments, and for watching how a database behaves; `exec` runs a program while leading. With `--fenced`, it
competes for the roles of an election instead of one plain lock, and a signal drains them all before the end.

It must never fall back to a private database by itself: five hosts would get five leaders.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator

import click

from pgleaderlock._base.aio import any_done, first_of
from pgleaderlock._base.logging import StructuredLogger, get_logger
from pgleaderlock._pg.explain import explained, hopeless
from pgleaderlock.cli.logging import LEVELS, configure
from pgleaderlock.cli.options import (
    POSITIVE,
    Contender,
    allow_pooler_option,
    check_fenced,
    contender_options,
    fenced_config,
    fenced_options,
    in_option_words,
    lock_key_of_role,
    make_election,
    make_lock,
    timing_options,
)
from pgleaderlock.cli.output import DURATION, EXIT_LOST, EXIT_OK, optional_dsn_option, resolve_dsn
from pgleaderlock.cli.service import Stopper, Watched, check_probes, private_server, probe_options
from pgleaderlock.election import LeaderElection
from pgleaderlock.errors import ConfigurationError, NotLeader, PgLeaderLockError
from pgleaderlock.lock import LeaderLock
from pgleaderlock.migrate import migrate
from pgleaderlock.retry import DefaultRetry, ExponentialBackoff

__all__ = ["run"]


@click.command(short_help="Take part in an election and log what happens.")
@optional_dsn_option
@contender_options(several=True)
@timing_options
@fenced_options
@click.option(
    "--balance/--no-balance",
    default=None,
    help="With --fenced: share the roles out between the nodes that balance.  [default: no]",
)
@click.option(
    "--retry-base",
    type=DURATION,
    default=1.0,
    help="Between two tries of a lock that is held, and the first delay after an error.  [default: 1s]",
)
@click.option(
    "--retry-max", type=DURATION, default=30.0, help="The longest delay after errors; each doubles.  [default: 30s]"
)
@click.option(
    "--reconnect-grace",
    type=POSITIVE,
    help="After a cut, try for this long to win back quietly before it counts as lost.  [default: off]",
)
@click.option("--no-auto-reacquire", is_flag=True, help="End (exit code 76) after a loss instead of competing again.")
@click.option(
    "--standby-wait",
    type=DURATION,
    default=None,
    help="Wait at the server for this long per try: takeover within milliseconds. 0 only tries.  "
    "[default: 10s; 0 behind a pooler and with --fenced]",
)
@allow_pooler_option
@probe_options
@click.option(
    "--embedded",
    is_flag=True,
    help="Use a private PostgreSQL of this user on this machine, started if need be. For first steps, not for hosts.",
)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--log-level", type=click.Choice(LEVELS, case_sensitive=False), default="INFO", show_default=True)
@click.pass_context
def run(
    ctx: click.Context,
    *,
    dsn: str | None,
    contender: Contender,
    health_interval: float,
    health_timeout: float | None,
    session_lease: float | None,
    fenced: bool,
    late_threshold: float | None,
    node_id: str | None,
    hold: str | None,
    balance: bool | None,
    retry_base: float,
    retry_max: float,
    reconnect_grace: float | None,
    no_auto_reacquire: bool,
    standby_wait: float | None,
    allow_pooler: bool,
    metrics_port: int | None,
    metrics_host: str,
    embedded: bool,
    log_format: str,
    log_level: str,
) -> int:
    """Take part in an election and log every change of state, until SIGINT or SIGTERM.

    The first signal ends cleanly (exit code 0), a second one at once. Durations are seconds, or 200ms, 5s, 1m.

    The server being away is logged and retried. What only a person can change (a wrong password, no such database, a
    pooler in between) ends the command with exit code 2 if it happens before the first try.

    With --fenced, the epoch of each term and every opening and shutting of the gate are logged as well; and a
    configuration counts (--config): without --name, all its roles are competed for on one session. A flag wins over the
    environment, that over the file. A signal drains everything, then ends.
    """
    configure(log_level, json=log_format == "json")
    check_fenced(ctx, contender, fenced=fenced)
    check_probes(ctx, fenced=fenced, port=metrics_port)
    with Stopper() as stopper, contextlib.ExitStack() as at_end, _on_this_machine():
        server = private_server(ctx) if embedded else None
        # Check everything before starting a private server.
        competition: LeaderLock | LeaderElection
        if fenced:
            own = {"late_threshold": late_threshold, "node_id": node_id, "balance": balance, "hold": hold}
            config = fenced_config(ctx, contender, embedded=embedded, **own)
            competition = make_election(config, None if server is None else lambda: server.dsn)
            lock_key = lock_key_of_role(config) if len(competition.roles) == 1 else None
        else:
            lock_key = contender.lock_key()
            where = (lambda: server.dsn) if server is not None else resolve_dsn(contender.plain_dsn(dsn))
            competition = make_lock(
                where,
                lock_key,
                retry_strategy=_strategy(retry_base, retry_max),
                health_interval_s=health_interval,
                health_timeout_s=health_timeout,
                session_lease_s=session_lease,
                reconnect_grace_s=reconnect_grace,
                standby_wait_s=standby_wait,
                auto_reacquire=not no_auto_reacquire,
                allow_pooler=allow_pooler,
            )
        log = get_logger("pgleaderlock.run")
        log = log if lock_key is None else log.bind(lock=lock_key)
        if server is not None:
            at_end.enter_context(server)
            log.info("embedded_server", folder=server.data_dir, version=server.version)
            if fenced:  # a private database, so no other program can have created the ledger
                asyncio.run(migrate(server.dsn))
        if lock_key is not None:
            log.info("run_started", key1=lock_key.key1, key2=lock_key.key2, pid=os.getpid())
        elif isinstance(competition, LeaderElection):
            log.info("run_started", roles=len(competition.roles), pid=os.getpid())
        if isinstance(competition, LeaderElection):
            code = asyncio.run(_ElectionRun(competition, stopper, log).run(metrics_host, metrics_port))
        else:
            code = asyncio.run(_LockRun(competition, stopper, log).run())
    log.info("run_ended", exit_code=code)
    return code


def _strategy(base_s: float, max_s: float) -> DefaultRetry:
    try:
        return DefaultRetry(held_s=base_s, errors=ExponentialBackoff(base_s=base_s, max_s=max_s))
    except ConfigurationError as error:
        raise ConfigurationError(in_option_words(str(error))) from error


@contextlib.contextmanager
def _on_this_machine() -> Iterator[None]:
    """If no database was given, print how to try it without one."""
    try:
        yield
    except click.UsageError as error:
        if not error.message.startswith("no database given"):
            raise
        raise click.UsageError(f"{error.message}; to try it on this machine alone: --embedded") from error


class _LockRun:
    """Runs one lock from start to end; its end decides the exit code."""

    def __init__(self, lock: LeaderLock, stopper: Stopper, log: StructuredLogger) -> None:
        self._lock = lock
        self._stopper = stopper
        self._log = log
        self._over = asyncio.Event()
        """Set when the lock has stopped, or can never be won."""
        self._hopeless: Exception | None = None
        self._tried = False
        self._led = False

    async def run(self) -> int:
        self._listen()
        async with Watched(self._lock) as around:
            await self._lock.start()
            around.ready()
            await first_of(self._stopper.asked(), self._over.wait())
            if self._stopper.signum is not None:
                self._log.info("stopping", signal=signal.Signals(self._stopper.signum).name)
            around.stopping()
            await self._lock.shutdown()
        if self._hopeless is not None:
            raise self._hopeless
        if self._stopper.signum is not None:
            return EXIT_OK
        if self._led:
            return EXIT_LOST
        # Without auto_reacquire, an error in the middle of a try ends the lock before it has ever led.
        raise self._lock.last_error or ConfigurationError("the lock has stopped without a reason")

    def _listen(self) -> None:
        """Log each callback by its name. (The library itself logs the changes of state.)"""
        lock = self._lock

        @lock.on_acquired
        def on_acquired() -> None:
            self._tried = self._led = True
            self._log.info("on_acquired")

        @lock.on_acquire_failed
        def on_acquire_failed() -> None:
            self._tried = True
            self._log.info("on_acquire_failed")

        @lock.on_stopped
        def on_stopped() -> None:
            self._log.info("on_stopped")
            self._over.set()

        lock.on_lost(lambda: self._log.warning("on_lost"))
        lock.on_released(lambda: self._log.info("on_released"))
        lock.on_error(self._on_error)

    def _on_error(self, error: Exception) -> None:
        self._log.warning("on_error", error=error)
        if not self._tried and isinstance(error, PgLeaderLockError) and hopeless(error):
            self._hopeless = explained(error)
            self._over.set()


class _ElectionRun:
    """An election from start to end (`--fenced`): each term's epoch, and each opening and shutting of a gate."""

    def __init__(self, election: LeaderElection, stopper: Stopper, log: StructuredLogger) -> None:
        self._election = election
        self._stopper = stopper
        self._log = log
        self._log_of = {role: log.bind(lock=role) for role in election.roles}

    async def run(self, host: str, port: int | None) -> int:
        async with Watched(self._election, host=host, port=port) as around:
            self._listen()
            watching = asyncio.ensure_future(self._watch())
            asked = asyncio.ensure_future(self._stopper.asked())
            await asyncio.sleep(0)  # let both tasks start before anything happens
            starting = asyncio.ensure_future(self._election.start())
            try:
                await any_done(asked, starting)
                if starting.done():
                    starting.result()  # a missing ledger is raised here
                    error = self._election.last_error
                    if isinstance(error, PgLeaderLockError) and hopeless(error):
                        raise explained(error)
                    around.ready()
                signum = await asked
                around.stopping()
                self._log.info("stopping", signal=signal.Signals(signum).name)
                await self._election.drain()  # work in flight ends before the command does
            finally:
                asked.cancel()
                await self._election.shutdown()
                await asyncio.wait([starting, watching])
        return EXIT_OK

    async def _watch(self) -> None:
        """Log each opening and shutting of a gate. Returns when the election ends."""
        async for change in self._election.changes():
            log = self._log_of[change.role]
            if change.is_leader:
                log.info("gate_open", epoch=change.epoch, holder=change.holder)
                continue
            try:
                self._election.gate(change.role).require_leader()
            except NotLeader as refused:
                log.info("gate_shut", reason=refused.reason, epoch=change.epoch, holder=change.holder)

    def _listen(self) -> None:
        """Log each callback by its name. (The library itself logs the changes of state.)"""
        election, log, log_of = self._election, self._log, self._log_of
        election.on_acquired(lambda role: log_of[role].info("on_acquired", epoch=election.gate(role).current_epoch))
        election.on_released(lambda role: log_of[role].info("on_released"))
        election.on_lost(lambda role: log_of[role].warning("on_lost"))
        election.on_error(lambda error: log.warning("on_error", error=error))
        election.on_stopped(lambda: log.info("on_stopped"))
