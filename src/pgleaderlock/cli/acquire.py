"""`pgleaderlock acquire`: one attempt, answered by the exit code; with `--hold` the lock is kept until a signal.

A `LeaderLock` that never tries twice: a database that fails is an error at once, not a reason to wait.

Imports click, `lock` (through `_timing`), and its neighbours. It must never leave the lock held when it ends.
"""

import asyncio
import logging
from typing import Any

import click

from pgleaderlock.cli._logging import LEVELS, configure
from pgleaderlock.cli._output import (
    DURATION,
    EXIT_LOST,
    EXIT_NO,
    EXIT_OK,
    LockKey,
    dsn_option,
    exit_code_for_signal,
    lock_options,
)
from pgleaderlock.cli._reach import Look, explained
from pgleaderlock.cli._signals import Stopper
from pgleaderlock.cli._timing import allow_pooler_option, make_lock, timing_options
from pgleaderlock.cli.status import describe, look_at
from pgleaderlock.errors import ConnectionError, PgLeaderLockError
from pgleaderlock.lock import LeaderLock
from pgleaderlock.models import RetryContext

__all__ = ["acquire"]


class _Once:
    """The retry strategy of somebody who does not retry."""

    def next_delay_s(self, ctx: RetryContext) -> float | None:
        return None


@click.command(short_help="Try once to take a lock.")
@dsn_option
@lock_options
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
        # What matters is said below, once.
        logging.getLogger("pgleaderlock").setLevel(logging.CRITICAL + 1)
    else:
        configure(log_level)
    lock = make_lock(
        dsn,
        lock_key,
        retry_strategy=_Once(),
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
    asked = asyncio.ensure_future(stopper.asked())
    try:
        async with lock:
            if await _won(lock, asked):
                return await (_keep(lock, asked, lock_key) if hold else _give_back(lock, lock_key))
        if asked.done():
            return exit_code_for_signal(asked.result())
    finally:
        asked.cancel()
    if lock.last_error is not None:
        raise _for_people(lock.last_error)
    click.echo(f"not acquired: {lock_key} is held by {await _holders(dsn, lock_key)}")
    return EXIT_NO


async def _won(lock: LeaderLock, asked: "asyncio.Future[int]") -> bool:
    """Does the lock become ours before it gives up or somebody asks for the end?"""
    winning = asyncio.ensure_future(lock.wait_for_leadership())
    either: list[asyncio.Future[Any]] = [winning, asked]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if not winning.done():
        winning.cancel()
        return False
    return winning.result()


async def _give_back(lock: LeaderLock, lock_key: LockKey) -> int:
    await lock.shutdown()
    if lock.last_error is not None:
        raise _for_people(lock.last_error)
    click.echo(f"acquired: {lock_key} was free; it has been released again (--hold keeps it)")
    return EXIT_OK


async def _keep(lock: LeaderLock, asked: "asyncio.Future[int]", lock_key: LockKey) -> int:
    stopped = asyncio.Event()
    lock.on_stopped(stopped.set)
    click.echo(f"acquired: {lock_key} is held until SIGINT or SIGTERM")
    ended = asyncio.ensure_future(stopped.wait())
    either: list[asyncio.Future[Any]] = [ended, asked]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.cancel()
    if not asked.done():
        click.echo(f"lost: {lock_key}: {lock.last_error}", err=True)
        return EXIT_LOST
    await lock.shutdown()
    click.echo(f"released: {lock_key}")
    return EXIT_OK


async def _holders(dsn: str, lock_key: LockKey) -> str:
    """Who it was, asked on a connection of its own. By now it may be somebody else, or nobody."""
    try:
        async with await Look.open(dsn, "pgleaderlock acquire") as look:
            view = await look_at(look, lock_key)
    except ConnectionError as error:
        return f"somebody else (who it is cannot be seen: {error})"
    return " and ".join(describe(holder) for holder in view.holders) or "nobody any more; a moment ago it was"


def _for_people(error: Exception) -> Exception:
    return explained(error) if isinstance(error, PgLeaderLockError) else error
