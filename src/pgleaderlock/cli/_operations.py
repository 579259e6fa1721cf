"""What the operator's commands share: the way to the ledger, waking up when it changes, options, tables, durations.

Imports click, rich (inside, because `--help` needs none), psycopg, `history` and its neighbours. It looks through a
plain connection and takes no lock. A notification only wakes: what counts is what the ledger says.
"""

import asyncio
import contextlib
import datetime as dt
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
import psycopg
from psycopg import sql

from pgleaderlock import history
from pgleaderlock._clock import BOOT_CLOCK
from pgleaderlock._connect import sever
from pgleaderlock._conninfo import scrub
from pgleaderlock._election_settings import check_channel
from pgleaderlock._election_setup import DEFAULT_CHANNEL
from pgleaderlock._session import VERSION_MIN
from pgleaderlock._sql import statement
from pgleaderlock.cli._output import stdout_console
from pgleaderlock.cli._reach import Look
from pgleaderlock.errors import ConfigurationError, ConnectionError, SchemaError, UnsafeSessionError
from pgleaderlock.keys import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "LedgerLook",
    "ask",
    "channel_option",
    "namespace_option",
    "open_ledger",
    "plain_table",
    "short_moment",
    "span",
    "table_console",
    "until",
]

POLL_S = 0.5
PIPE_COLUMNS = 200

_Command = TypeVar("_Command", bound=Callable[..., Any])
_Answer = TypeVar("_Answer")


def namespace_option(command: _Command) -> _Command:
    """`--namespace`."""
    return click.option(
        "--namespace",
        default=DEFAULT_NAMESPACE,
        show_default=True,
        help="Keeps equal names of different applications apart.",
    )(command)


def channel_option(command: _Command) -> _Command:
    """`--channel`."""
    return click.option(
        "--channel",
        default=DEFAULT_CHANNEL,
        show_default=True,
        callback=_checked_channel,
        help="Where the nodes listen (listen_channel): what happens is heard of at once.",
    )(command)


def _checked_channel(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    try:
        return check_channel(value)
    except ConfigurationError as error:
        raise click.UsageError(str(error).replace("listen_channel", "--channel")) from error


class LedgerLook(Look):
    """A plain connection to a database with a ledger, which can also wait for a notification."""

    facts: history.LedgerFacts

    async def rows(self, name: str, **params: object) -> list[dict[str, Any]]:
        try:
            return await super().rows(name, **params)
        except asyncio.CancelledError:
            sever(self._connection)  # or the end of the program would wait for a server that may be frozen
            raise

    async def listen(self, channel: str) -> None:
        """From now on `woken` hears of the channel. A hint: whoever uses it asks the ledger now and then anyway."""
        text = statement("ledger_listen").decode().format(channel=sql.Identifier(channel).as_string(None))
        try:
            await self._connection.execute(text.encode())
        except psycopg.Error as error:
            raise ConnectionError(f"cannot listen: {scrub(str(error), self.params)}") from None

    async def woken(self, timeout_s: float) -> None:
        """Return when something was said on the channel, or when the time is up."""
        try:
            async for _ in self._connection.notifies(timeout=timeout_s, stop_after=1):
                pass
        except psycopg.Error as error:
            raise ConnectionError(f"the connection was lost: {scrub(str(error), self.params)}") from None


@contextlib.asynccontextmanager
async def open_ledger(
    dsn: str, command: str, *, listen: str | None = None, to_write: bool = False
) -> AsyncIterator[LedgerLook]:
    """Connect and check the ledger, or raise what `status` would say; `listen` names a channel."""
    async with await LedgerLook.open(dsn, f"pgleaderlock {command}") as look:
        if look.server_version < VERSION_MIN:
            raise UnsafeSessionError(
                "version", f"PostgreSQL {look.server_version // 10000} is too old for pgleaderlock: use 14 or newer"
            )
        look.facts = await history.ledger_facts(look)
        if to_write and look.facts.in_recovery:
            raise UnsafeSessionError(
                "standby", "this server is a standby, where nothing can be asked: connect to the primary"
            )
        if listen is not None:
            await look.listen(listen)
        yield look


async def ask(look: LedgerLook, name: str, **params: object) -> int | None:
    """Ask something from afar: the number of the request, or None if there was nobody to ask."""
    try:
        row = await look.row(name, **params)
    except ConnectionError as error:
        if "permission denied" in str(error):
            raise SchemaError(f"{error}; let the ledger's owner run `pgleaderlock migrate --grant-to ROLE`") from error
        raise
    with contextlib.suppress(ConnectionError):  # a hint: without it the request is read a heartbeat later
        await look.rows("ledger_hint", channel=params["channel"], hint="requested")
    number = row["request_id"]
    return None if number is None else int(number)


async def until(look: LedgerLook, timeout_s: float, answer: Callable[[], Awaitable[_Answer | None]]) -> _Answer | None:
    """What `answer` gives once it is not None; None when the time is up. Asked when woken, and now and then."""
    until_at = BOOT_CLOCK.now() + timeout_s
    while True:
        found = await answer()
        left_s = until_at - BOOT_CLOCK.now()
        if found is not None or left_s <= 0:
            return found
        await look.woken(min(POLL_S, left_s))


def span(seconds: float | None) -> str:
    """A duration in a few characters, as exact as its size: `230 ms`, `3.4 s`, `12 min`, `5 h`, `3 d`."""
    if seconds is None:
        return "-"
    seconds = max(0.0, seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def short_moment(moment: dt.datetime | None, *, narrow: bool = False) -> str:
    """A moment in this machine's time zone."""
    if moment is None:
        return "-"
    return f"{moment.astimezone():%m-%d %H:%M:%S}" if narrow else f"{moment.astimezone():%Y-%m-%d %H:%M:%S%z}"


def table_console() -> "Console":
    """For tables: as wide as the terminal. A file or a pipe gets everything, unless COLUMNS says how wide it may be."""
    console = stdout_console()
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = PIPE_COLUMNS
    return console


def plain_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), gap: int = 2
) -> "Table":
    """A table without lines, which reads well in a terminal and in a file; the columns in `right` hold numbers."""
    from rich.table import Table  # noqa: PLC0415 - takes longer to import than --help takes to answer.
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column in columns:
        numbers = column in right
        table.add_column(column, justify="right" if numbers else "left", no_wrap=numbers, overflow="fold")
    for row in rows:
        # Text, not str: what comes from a database is shown as it is.
        table.add_row(*(Text(cell) for cell in row))
    return table
