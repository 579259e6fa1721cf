"""`pgleaderlock acquire`: one attempt, answered by the exit code; with `--hold` the lock is kept until a signal.

It uses a `LeaderLock` that never tries twice: a failing database is an error at once, not a reason to wait.

It must never leave the lock held when it ends.
"""

import asyncio
import logging

import click

from pgleaderlock._base.aio import first_of
from pgleaderlock._pg.explain import explained
from pgleaderlock.cli.logging import LEVELS, configure
from pgleaderlock.cli.options import allow_pooler_option, make_lock, timing_options
from pgleaderlock.cli.output import (
    DURATION,
    EXIT_LOST,
    EXIT_NO,
    EXIT_OK,
    LockKey,
    dsn_option,
    exit_code_for_signal,
    lock_options,
)
from pgleaderlock.cli.service import Stopper
from pgleaderlock.cli.status import who_holds
from pgleaderlock.errors import PgLeaderLockError
from pgleaderlock.lock import LeaderLock
from pgleaderlock.models import RetryContext

__all__ = ["acquire"]


class _Once:
    """A retry strategy for one try. To wait at the server, the lock needs a second attempt: the first never waits."""

    def __init__(self, *, waits: bool) -> None:
        self._attempts = 2 if waits else 1

    def next_delay_s(self, ctx: RetryContext) -> float | None:
        return 0.0 if ctx.last_error is None and ctx.attempt < self._attempts else None


@click.command(short_help="Try once to take a lock.")
@dsn_option
@lock_options(takes_it=True)
@click.option("--hold", is_flag=True, help="Keep the lock until SIGINT or SIGTERM, instead of releasing it at once.")
@click.option(
    "--wait", type=DURATION, default=0.0, help="Wait at the server for the lock, up to this long.  [default: 0]"
)
@timing_options
@allow_pooler_option
@click.option(
    "--log-level",
    type=click.Choice(LEVELS, case_sensitive=False),
    help="Show the library's log too, from this level on.  [default: off]",
)
def acquire(
    *,
    dsn: str,
    lock_key: LockKey,
    hold: bool,
    wait: float,
    health_interval: float,
    health_timeout: float | None,
    session_lease: float | None,
    allow_pooler: bool,
    log_level: str | None,
) -> int:
    """Try once to take a lock, and say whether that worked.

    Without --hold the lock is released again before the command ends: exit code 0 means that it was free, not that
    you have it now. To run something while holding it, use `exec`.

    Exit codes: 0 acquired, 1 somebody else holds it, 2 usage or database, 76 lost while holding, 128+n when signal n
    came before there was an answer.
    """
    if log_level is None:
        # The outcome is printed below, once.
        logging.getLogger("pgleaderlock").setLevel(logging.CRITICAL + 1)
    else:
        configure(log_level)
    lock = make_lock(
        dsn,
        lock_key,
        retry_strategy=_Once(waits=wait > 0),
        standby_wait_s=wait,
        auto_reacquire=False,
        health_interval_s=health_interval,
        health_timeout_s=health_timeout,
        session_lease_s=session_lease,
        allow_pooler=allow_pooler,
    )
    with Stopper() as stopper:
        return asyncio.run(_acquire(lock, stopper, dsn, lock_key, hold=hold))


async def _acquire(lock: LeaderLock, stopper: Stopper, dsn: str, lock_key: LockKey, *, hold: bool) -> int:
    async with lock:
        if await _won(lock, stopper):
            return await (_keep(lock, stopper, lock_key) if hold else _give_back(lock, lock_key))
    if stopper.signum is not None:
        return exit_code_for_signal(stopper.signum)
    if lock.last_error is not None:
        raise _for_people(lock.last_error)
    click.echo(f"not acquired: {lock_key} is held by {await _holders(dsn, lock_key)}")
    return EXIT_NO


async def _won(lock: LeaderLock, stopper: Stopper) -> bool:
    """Was the lock won before it gave up, and before a signal asked for the end?"""
    winning, _ = await first_of(lock.wait_for_leadership(), stopper.asked())
    return not winning.cancelled() and winning.result()


async def _give_back(lock: LeaderLock, lock_key: LockKey) -> int:
    await lock.shutdown()
    if lock.last_error is not None:
        raise _for_people(lock.last_error)
    click.echo(f"acquired: {lock_key} was free; it has been released again (--hold keeps it)")
    return EXIT_OK


async def _keep(lock: LeaderLock, stopper: Stopper, lock_key: LockKey) -> int:
    stopped = asyncio.Event()
    lock.on_stopped(stopped.set)
    click.echo(f"acquired: {lock_key} is held until SIGINT or SIGTERM")
    await first_of(stopped.wait(), stopper.asked())
    if stopper.signum is None:
        click.echo(f"lost: {lock_key}: {lock.last_error}", err=True)
        return EXIT_LOST
    await lock.shutdown()
    click.echo(f"released: {lock_key}")
    return EXIT_OK


async def _holders(dsn: str, lock_key: LockKey) -> str:
    try:
        return await who_holds(dsn, "pgleaderlock acquire", lock_key)
    except PgLeaderLockError as error:
        return f"somebody else (who it is cannot be seen: {error})"


def _for_people(error: Exception) -> Exception:
    return explained(error) if isinstance(error, PgLeaderLockError) else error
