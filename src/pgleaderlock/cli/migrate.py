"""`pgleaderlock migrate`: creates or upgrades the ledger, or prints how.

Imports click, `migrate`, `errors` and `_output`, `_reach`. With `--print` it must never ask a database.
"""

import asyncio

import click

from pgleaderlock import migrate as ledger
from pgleaderlock.cli._output import EXIT_OK, optional_dsn_option, resolve_dsn
from pgleaderlock.cli._reach import explained
from pgleaderlock.errors import ConfigurationError, ConnectionError

__all__ = ["migrate"]


@click.command(short_help="Create or upgrade the ledger's tables.")
@optional_dsn_option
@click.option("--print", "only_print", is_flag=True, help="Print the SQL instead; needs no database.")
@click.option("--grant-to", metavar="ROLE", help="Give this database role what it needs at run time, and no more.")
@click.option("--grant-lock-server-to", metavar="ROLE", help="The same for the role of a lock server.")
@click.option("--grant-reader-to", metavar="ROLE", help="The same for a role that only looks, such as a dashboard's.")
def migrate(dsn: str | None, only_print: bool, **grants: str | None) -> int:
    """Create or upgrade the ledger: the tables and functions of epochs, gates, fences and the lock server.

    They live in the schema pgleaderlock.

    Any number of nodes may run this at once, and again at any time. Run it as the database's owner or another role
    that may create a schema; the nodes themselves should use a plain role (--grant-to).

    Exit codes: 0, or 2 when it was not possible; nothing is half done then.
    """
    try:
        if only_print:
            click.echo(ledger.sql(**grants), nl=False)
            return EXIT_OK
        applied = asyncio.run(ledger.migrate(resolve_dsn(dsn), **grants))
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error
    except ConnectionError as error:
        raise explained(error) from error
    for version in applied:
        click.echo(f"applied version {version}")
    if not applied:
        click.echo(f"nothing to do: the ledger has version {ledger.LEDGER_VERSION} or newer")
    rights = {"grant_to": "run-time", "grant_lock_server_to": "a lock server's", "grant_reader_to": "a reader's"}
    for option, role in grants.items():
        if role is not None:
            click.echo(f"granted {rights[option]} rights to {role}")
    return EXIT_OK
