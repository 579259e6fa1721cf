"""`pgleaderlock migrate`, `epoch advance` and `keys`: an administrator's changes to the ledger, and a lookup in SQL.

`migrate --print` and `keys` must never connect to a database. The whole output of `keys` is SQL, so that it can be
piped into psql: the table is a comment, and a name must never be able to end that comment.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

import click

from pgleaderlock import history
from pgleaderlock import migrate as ledger
from pgleaderlock._pg.explain import explained
from pgleaderlock._pg.statements import statement
from pgleaderlock.cli.output import (
    EXIT_OK,
    LockKey,
    database,
    dsn_option,
    json_option,
    optional_dsn_option,
    print_json,
    printable,
)
from pgleaderlock.cli.reading import channel_option, complete_role, elsewhere, namespace_option, open_ledger
from pgleaderlock.errors import ConfigurationError, ConnectionError
from pgleaderlock.keys import key_pair, key_params

__all__ = ["epoch", "keys", "migrate"]

# The longest key is -2147483648.
KEY_WIDTH = 11


@contextlib.contextmanager
def _errors_for_people() -> Iterator[None]:
    try:
        yield
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error
    except ConnectionError as error:
        raise explained(error) from error


@click.command(short_help="Create or upgrade the ledger's tables.")
@optional_dsn_option
@click.option("--print", "only_print", is_flag=True, help="Print the SQL instead; needs no database.")
@click.option("--grant-to", metavar="ROLE", help="Give this database role what it needs at run time, and no more.")
@click.option("--grant-lock-server-to", metavar="ROLE", help="The same for the role of a lock server.")
@click.option("--grant-reader-to", metavar="ROLE", help="The same for a role that only looks, such as a dashboard's.")
@click.pass_context
def migrate(ctx: click.Context, /, dsn: str | None, only_print: bool, **grants: str | None) -> int:
    """Create or upgrade the ledger: the tables and functions of epochs, gates, fences and the lock server.

    They live in the schema pgleaderlock.

    Any number of nodes may run this at once, and again at any time. Run it as the database's owner or another role
    that may create a schema; the nodes themselves should use a plain role (--grant-to).

    Exit codes: 0, or 2 when it was not possible; nothing is half done then.
    """
    with _errors_for_people():
        if only_print:
            click.echo(ledger.sql(**grants), nl=False)
            return EXIT_OK
        applied = asyncio.run(ledger.migrate(database(ctx, dsn), **grants))
    for version in applied:
        click.echo(f"applied version {version}")
    if not applied:
        click.echo(f"nothing to do: the ledger has version {ledger.LEDGER_VERSION} or newer")
    rights = {"grant_to": "run-time", "grant_lock_server_to": "a lock server's", "grant_reader_to": "a reader's"}
    for option, role in grants.items():
        if role is not None:
            click.echo(f"granted {rights[option]} rights to {role}")
    return EXIT_OK


@click.group(short_help="Move a role's epoch ahead after a restore.")
def epoch() -> None:
    """What only an operator does to an epoch."""


@epoch.command(short_help="Move a role's epoch far ahead.")
@dsn_option
@namespace_option
@channel_option
@click.option("--all", "every_role", is_flag=True, help="Every role of the namespace.")
@click.argument("roles", metavar="ROLE...", nargs=-1, shell_complete=complete_role)
def advance(dsn: str, roles: tuple[str, ...], every_role: bool, namespace: str, channel: str) -> int:
    """Move the epoch of each ROLE beyond every number that a lost history can have issued; prints the old and the new.

    For a database that was restored from a backup or a snapshot, or failed over without its last commits: epochs that
    were handed out in the lost time would be handed out again. The current leader loses the role at its next heartbeat;
    waits up to 10 s for fenced transactions to end.

    Roles are advanced one after the other, each in a separate transaction.

    Exit codes: 0 advanced, 2 it was not possible; the epochs of the roles that were not printed are unchanged then.
    """
    if every_role == bool(roles):
        raise click.UsageError("which roles? Name them, or give --all")
    with _errors_for_people():
        names = roles or asyncio.run(_every_role(dsn, namespace))
        for role in names:
            old, new = asyncio.run(ledger.advance_epoch(dsn, role, namespace=namespace, channel=channel))
            click.echo(f"{role}: epoch {old} -> {new}")
    return EXIT_OK


async def _every_role(dsn: str, namespace: str) -> tuple[str, ...]:
    async with open_ledger(dsn, "epoch advance") as look:
        found = tuple(role.role for role in await history.all_roles(look, namespace, with_forgotten=True))
        if not found:
            others = await elsewhere(look, namespace)
            raise click.UsageError(f"no role has been led in namespace {namespace} yet{others}")
        return found


@click.command(short_help="Show the keys of a name, and the query for them.")
@namespace_option
@json_option
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def keys(names: tuple[str, ...], namespace: str, as_json: bool) -> int:
    """Show the pair of advisory-lock keys of each NAME, and the pg_locks query that finds its holder.

    Needs no database. The query looks into the database that it is run in, because locks are local to one. The output
    is SQL, with the table as a comment: pgleaderlock keys billing | psql "$PG_DSN"

    Exit codes: 0, or 2 when a name or the namespace cannot be used.
    """
    locks = [_lock(name, namespace, number, len(names)) for number, name in enumerate(names, 1)]
    if as_json:
        print_json({"locks": [_as_json(lock) for lock in locks]})
    else:
        click.echo("\n".join(_lines(locks)))
    return EXIT_OK


def _lock(name: str, namespace: str, number: int, count: int) -> LockKey:
    try:
        return LockKey(*key_pair(name, namespace), name, namespace)
    except ConfigurationError as error:
        which = f" (NAME {number} of {count})" if count > 1 else ""
        raise click.UsageError(f"{error}{which}") from error


def _query(lock: LockKey) -> str:
    return statement("keys_find").decode() % key_params((lock.key1, lock.key2)) + ";"


def _as_json(lock: LockKey) -> dict[str, object]:
    params = key_params((lock.key1, lock.key2))
    return {"name": lock.name, "namespace": lock.namespace, **params, "query": _query(lock)}


def _lines(locks: Sequence[LockKey]) -> list[str]:
    # The name comes last, because only it may be long: then nothing has to be wrapped or cut.
    lines = [f"-- namespace {printable(locks[0].namespace)}", _row("key1", "key2", "name")]
    lines += [_row(lock.key1, lock.key2, printable(str(lock))) for lock in locks]
    for lock in locks:
        lines += ["", f"-- who holds {printable(str(lock))}", _query(lock)]
    return lines


def _row(key1: object, key2: object, name: str) -> str:
    return f"-- {key1:>{KEY_WIDTH}}  {key2:>{KEY_WIDTH}}  {name}"
