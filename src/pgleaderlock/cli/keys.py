"""`pgleaderlock keys`: from names to advisory-lock keys, and to the query that looks for them.

Needs no database: the keys are computed. What it prints for people is SQL from the first line to the last, the table
being a comment, so that all of it may be pasted or piped into psql.

Imports click, `_sql`, `keys`, `errors` and `_output`. A name must never be able to end the comment it is printed in.
"""

import json
from collections.abc import Sequence

import click

from pgleaderlock._sql import statement
from pgleaderlock.cli._output import EXIT_OK, LockKey
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.keys import DEFAULT_NAMESPACE, key_pair, key_params

__all__ = ["keys"]

# The longest key is -2147483648.
KEY_WIDTH = 11


@click.command(short_help="Show the keys of a name, and the query for them.")
@click.option(
    "--namespace",
    default=DEFAULT_NAMESPACE,
    show_default=True,
    help="Keeps equal names of different applications apart.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for programs.")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def keys(names: tuple[str, ...], namespace: str, as_json: bool) -> int:
    """Show the pair of advisory-lock keys of each NAME, and the pg_locks query that finds its holder.

    Needs no database. The query looks into the database that it is run in, because locks are local to one. The output
    is SQL, with the table as a comment: pgleaderlock keys billing | psql "$PG_DSN"

    Exit codes: 0, or 2 when a name or the namespace cannot be used.
    """
    locks = [_lock(name, namespace, number, len(names)) for number, name in enumerate(names, 1)]
    if as_json:
        click.echo(json.dumps({"locks": [_as_json(lock) for lock in locks]}, indent=2))
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
    # The name comes last, because it alone may be long: nothing has to be folded or cut.
    lines = [f"-- namespace {_printable(locks[0].namespace)}", _row("key1", "key2", "name")]
    lines += [_row(lock.key1, lock.key2, _printable(str(lock))) for lock in locks]
    for lock in locks:
        lines += ["", f"-- who holds {_printable(str(lock))}", _query(lock)]
    return lines


def _row(key1: object, key2: object, name: str) -> str:
    return f"-- {key1:>{KEY_WIDTH}}  {key2:>{KEY_WIDTH}}  {name}"


def _printable(text: str) -> str:
    """With escapes for what would end a line, or would show it as another text than it is."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
