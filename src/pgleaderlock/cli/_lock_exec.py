"""`pgleaderlock lock exec`: runs a command while a lease of a lock server is held.

What it does not promise, first. A supervisor that is frozen cannot stop its command, and what the command has sent on
its way arrives. Who must never act twice hands `PGLEADERLOCK_FENCING_TOKEN` to what is acted upon.

What it does: the command is started after the lease was granted, and at most once. When the lease is lost, it is told
to end at once; and when no renewal succeeds, `--grace` before the lease's deadline, so that it is gone before somebody
else can have the lock. The lease is given back only after the whole process group has gone.

Imports click, `client`, `errors` and its neighbours. It must never start the command twice.
"""

import asyncio
import contextlib
import os
import sys
from typing import Any

import click

from pgleaderlock._clock import LOOK_S
from pgleaderlock.cli._command import find_executable
from pgleaderlock.cli._lock_options import POSITIVE, ServerOptions, server_options
from pgleaderlock.cli._logging import LEVELS, configure
from pgleaderlock.cli._one_run import CommandStopped, Ended, Job, NotWon, OneRun
from pgleaderlock.cli._output import DURATION, LockKey, exit_code_for_signal
from pgleaderlock.client import AsyncLease, AsyncLockClient, LeaseLost, LockHeld
from pgleaderlock.errors import LockServerError, PgLeaderLockError

__all__ = ["exec_"]

GRACE_S = 3.0
GRACE_SHARE = 0.25


class _Keeping:
    """For `OneRun`: why the command has to end."""

    def __init__(self, lease: AsyncLease) -> None:
        self._lease = lease

    @property
    def last_error(self) -> Exception | None:
        if not self._lease.valid:
            return self._lease.loss()
        text = "no renewal was acknowledged in time"
        return LeaseLost(self._lease.lock_name, "deadline", text)


@click.command(
    "exec",
    short_help="Run a command while holding a lock.",
    epilog="Exit codes: the command's own (128+n if signal n ended it), 2 usage or server, 75 not won, 76 lease lost, "
    "126 and 127 as a shell.",
)
@server_options
@click.option("--ttl", "ttl_s", type=POSITIVE, default=30.0, help="How long a lease lasts unrenewed.  [default: 30s]")
@click.option("--wait", "wait_s", type=DURATION, default=0.0, help="Wait for its turn, up to this long.  [default: 0]")
@click.option(
    "--grace",
    "grace_s",
    type=DURATION,
    help="How long a command that has to end has between SIGTERM and SIGKILL.  [default: 3s, at most --ttl / 4]",
)
@click.option("--owner", help="Who we are.  [default: host, pid and a random part]")
@click.option(
    "--log-level", type=click.Choice(LEVELS, case_sensitive=False), default="ERROR", help="What to log on stderr."
)
@click.argument("name")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_(
    *,
    server: ServerOptions,
    ttl_s: float,
    wait_s: float,
    grace_s: float | None,
    owner: str | None,
    log_level: str,
    name: str,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND while holding the lock NAME: pgleaderlock lock exec NAME -- COMMAND ...

    The lease is renewed meanwhile. When it is lost, the command is stopped with its whole process group. Signals are
    passed on to it. It sees PGLEADERLOCK_LOCK_NAME, PGLEADERLOCK_FENCING_TOKEN, PGLEADERLOCK_OWNER_ID and
    PGLEADERLOCK_LEASE_ID in its environment, and no bearer token.
    """
    configure(log_level)
    if grace_s is None:
        grace_s = min(GRACE_S, ttl_s * GRACE_SHARE)
    if grace_s > ttl_s / 2:
        raise click.UsageError(f"--grace {grace_s:g}s is longer than half of --ttl {ttl_s:g}s: raise --ttl")
    env = {key: value for key, value in os.environ.items() if key != "PGLEADERLOCK_TOKEN"}
    # A command that cannot run must not take the lock from one that can.
    find_executable(command[0], env)
    job = Job(LockKey(0, 0, name), command, env, wait_s, grace_s, log_level)
    return asyncio.run(_acquire_and_run(server, owner, job, name, ttl_s))


async def _acquire_and_run(server: ServerOptions, owner: str | None, job: Job, name: str, ttl_s: float) -> int:
    run = OneRun(job)
    run.catch_signals()
    async with server.async_client(owner) as client:
        acquiring = asyncio.ensure_future(client.acquire(name, ttl_s, wait_s=job.wait_s))
        either: list[asyncio.Future[Any]] = [acquiring, run.interrupted_by]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not acquiring.done():
            acquiring.cancel()
            with contextlib.suppress(asyncio.CancelledError, PgLeaderLockError):
                await client.release(await acquiring)
            return exit_code_for_signal(run.interrupted_by.result())
        try:
            lease = acquiring.result()
        except LockHeld as held:
            waited = f" (waited {job.wait_s:g} s)" if job.wait_s else ""
            raise NotWon(f"not won: {held}{waited}") from held
        try:
            await _keep_and_run(client, lease, run)
        finally:
            await _give_back(client, lease)
    if not run.all_gone:
        print("warning: a process of the command has survived SIGKILL and may still act", file=sys.stderr)
    if run.lost:
        raise CommandStopped(f"the lease of {name} is lost, so the command was stopped: {run.reason}")
    assert run.exit_code is not None
    return run.exit_code


async def _keep_and_run(client: AsyncLockClient, lease: AsyncLease, run: OneRun) -> None:
    client.start_heartbeat(lease)
    working = asyncio.ensure_future(run.work(_Keeping(lease), _variables(lease)))
    endangered = asyncio.ensure_future(_endangered(lease, run.job.grace_s))
    ends: list[asyncio.Future[Any]] = [working, endangered]
    try:
        # A signal that came between the grant and the command's start is the command's.
        await asyncio.wait([*ends, run.interrupted_by], return_when=asyncio.FIRST_COMPLETED)
        if run.interrupted_by.done():
            run.on_signal(run.interrupted_by.result())
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        endangered.cancel()
        if not working.done():
            working.cancel()
        with contextlib.suppress(Ended):
            await working


async def _endangered(lease: AsyncLease, grace_s: float) -> None:
    """Returns when the lease is lost, or ends so soon that a command can just be ended before."""
    while lease.remaining_s > grace_s:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(LOOK_S, lease.remaining_s - grace_s)):
                await lease.lost.wait()


def _variables(lease: AsyncLease) -> dict[str, str]:
    return {
        "PGLEADERLOCK_LOCK_NAME": lease.lock_name,
        "PGLEADERLOCK_FENCING_TOKEN": str(lease.fencing_token),
        "PGLEADERLOCK_OWNER_ID": lease.owner_id,
        "PGLEADERLOCK_LEASE_ID": lease.lease_id,
    }


async def _give_back(client: AsyncLockClient, lease: AsyncLease) -> None:
    try:
        await client.release(lease)
    except LockServerError as error:
        print(f"warning: the lock was not released, its ttl ends it: {error}", file=sys.stderr)
