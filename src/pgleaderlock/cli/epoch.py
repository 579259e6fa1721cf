"""`pgleaderlock epoch advance`: the remedy after a restore, or after a failover that lost commits.

Imports click, `migrate` (which has the connection for it), `errors`, `keys` and `_output`, `_reach`.
"""

import asyncio

import click

from pgleaderlock.cli._output import EXIT_OK, dsn_option
from pgleaderlock.cli._reach import explained
from pgleaderlock.errors import ConfigurationError, ConnectionError
from pgleaderlock.keys import DEFAULT_NAMESPACE
from pgleaderlock.migrate import advance_epoch

__all__ = ["epoch"]


@click.group(short_help="Move a role's epoch ahead after a restore.")
def epoch() -> None:
    """What only an operator does to an epoch."""


@epoch.command(short_help="Move a role's epoch far ahead.")
@dsn_option
@click.option(
    "--namespace",
    default=DEFAULT_NAMESPACE,
    show_default=True,
    help="Keeps equal names of different applications apart.",
)
@click.option(
    "--channel",
    default="pgleaderlock",
    show_default=True,
    help="Where the nodes listen (listen_channel): they hear of it at once.",
)
@click.argument("role")
def advance(dsn: str, role: str, namespace: str, channel: str) -> int:
    """Move the epoch of ROLE beyond every number that a lost history can have issued; prints the old and the new one.

    For a database that was restored from a backup or a snapshot, or failed over without its last commits: epochs that
    were handed out in the lost time would be handed out again. Whoever leads now loses the role at its next heartbeat;
    waits up to 10 s for fenced transactions to end.

    Exit codes: 0 advanced, 2 it was not possible; the epoch is unchanged then.
    """
    try:
        old, new = asyncio.run(advance_epoch(dsn, role, namespace=namespace, channel=channel))
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error
    except ConnectionError as error:
        raise explained(error) from error
    click.echo(f"{role}: epoch {old} -> {new}")
    return EXIT_OK
