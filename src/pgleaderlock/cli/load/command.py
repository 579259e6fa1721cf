"""`pgleaderlock load`: many clients on a lock server, some of which fail on purpose, and a resource that checks them.

It must never report success when no lease was granted, and so nothing was checked.
"""

import asyncio
import contextlib
import json
import random
import uuid
from pathlib import Path

import click

from pgleaderlock.cli.load.engine import LoadSettings, Run
from pgleaderlock.cli.load.report import report, show_progress
from pgleaderlock.cli.options import POSITIVE, ServerOptions, server_options
from pgleaderlock.cli.output import DURATION, EXIT_NO, EXIT_OK
from pgleaderlock.cli.service import Stopper
from pgleaderlock.errors import PgLeaderLockError

__all__ = ["load"]


@click.command(short_help="Put a lock server under load, and check what it promises.")
@server_options
@click.option("--clients", type=click.IntRange(1, 5000), default=80, show_default=True, help="How many at once.")
@click.option("--duration", "duration_s", type=POSITIVE, default=20.0, help="How long.  [default: 20s]")
@click.option("--ttl", "ttl_s", type=POSITIVE, default=2.0, help="Of each lease.  [default: 2s]")
@click.option("--hold", "hold_s", type=DURATION, default=0.02, help="How long a lock is held.  [default: 20ms]")
@click.option("--jitter", "jitter_s", type=DURATION, default=0.02, help="Up to so much longer.  [default: 20ms]")
@click.option(
    "--failrate",
    type=click.FloatRange(0.0, 1.0),
    default=0.02,
    show_default=True,
    help="The share of holders that crash, or stall past the end of their lease and then go on.",
)
@click.option("--wait", "wait_s", type=DURATION, default=0.0, help="Wait at the server for a lock.  [default: 0]")
@click.option("--lock", "lock_name", help="All clients want this lock.")
@click.option("--locks", "locks", type=click.IntRange(1, 1_000_000), help="So many locks of this run.  [default: 1]")
@click.option("--seed", type=int, help="Makes the clients' choices repeatable.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write a report to this file.")
def load(
    *,
    server: ServerOptions,
    clients: int,
    duration_s: float,
    ttl_s: float,
    hold_s: float,
    jitter_s: float,
    failrate: float,
    wait_s: float,
    lock_name: str | None,
    locks: int | None,
    seed: int | None,
    json_file: Path | None,
) -> int:
    """Put a lock server under load, and check every lease and every write.

    Tokens rise, no two leases of a lock are valid at once, stale writers are refused, and a stale release frees
    nothing.

    Exit codes: 0 every invariant held, 1 one was broken, 2 usage or server, or nothing was granted. Ctrl-C ends the run
    early.
    """
    if lock_name is not None and locks is not None:
        raise click.UsageError("--lock and --locks exclude each other: give one or the other")
    if json_file is not None:
        try:
            json_file.open("a", encoding="utf-8").close()  # fail now, not at the end of the run
        except OSError as error:
            raise click.UsageError(f"--json {json_file} cannot be written: {error.strerror or error}") from error
    run_name = uuid.uuid4().hex[:8]
    seed = random.getrandbits(32) if seed is None else seed
    names = (lock_name,) if lock_name is not None else tuple(f"load-{run_name}-{n}" for n in range(locks or 1))
    settings = LoadSettings(clients, duration_s, ttl_s, hold_s, jitter_s, failrate, wait_s, names, seed)
    with Stopper() as stopper:
        run = asyncio.run(_run(settings, server, stopper))
    report(run)
    if json_file is not None:
        json_file.write_text(json.dumps(run.as_json(), indent=2) + "\n", encoding="utf-8")
    if run.violations.total:
        return EXIT_NO
    if run.refused is not None:
        raise run.refused
    if not run.figures.counts["acquired"]:
        why = run.figures.last_error or "the lock was held all the time"
        raise PgLeaderLockError(f"no lease was granted, so nothing was shown: {why}")
    return EXIT_OK


async def _run(settings: LoadSettings, server: ServerOptions, stopper: Stopper) -> Run:
    run = Run(settings, lambda owner: server.async_client(owner, connections_max=4))
    showing = asyncio.create_task(show_progress(run))
    asked = asyncio.create_task(stopper.asked())
    asked.add_done_callback(lambda _: run.stop())
    try:
        await run.run()
    finally:
        for task in (showing, asked):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await showing
    return run
