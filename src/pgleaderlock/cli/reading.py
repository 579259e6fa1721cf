"""How the operator's commands read the ledger: options, connection, waiting for a notification, times in words.

They read through a plain connection and take no lock. A notification only wakes the reader; the ledger's rows count.
"""

import asyncio
import contextlib
import datetime as dt
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

import click
import psycopg

from pgleaderlock import history
from pgleaderlock._config.schema import DEFAULT_CHANNEL
from pgleaderlock._config.timing import check_channel
from pgleaderlock._pg.conninfo import scrub
from pgleaderlock._pg.explain import version_error
from pgleaderlock._pg.listener import listen_statement
from pgleaderlock._pg.reader import PlainConnection
from pgleaderlock._pg.session import VERSION_MIN
from pgleaderlock.cli.output import NAMESPACE_VARIABLE, configured, stdout_console
from pgleaderlock.errors import ConfigurationError, ConnectionError, PgLeaderLockError, UnsafeSessionError
from pgleaderlock.keys import DEFAULT_NAMESPACE
from pgleaderlock.retry import JITTER, reconnect_jitter_s

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "LedgerLook",
    "channel_option",
    "complete_node",
    "complete_role",
    "counted",
    "elsewhere",
    "keep_reading",
    "namespace_option",
    "open_ledger",
    "short_moment",
    "span",
    "state",
    "table_console",
]

PIPE_COLUMNS = 200
RETRY_S = 1.0
NAMESPACES_SHOWN = 10
COMPLETION_S = 2.0

_Command = TypeVar("_Command", bound=Callable[..., Any])


def namespace_option(command: _Command) -> _Command:
    """`--namespace`."""
    return click.option(
        "--namespace",
        callback=_namespace,
        help="Keeps equal names of different applications apart.  "
        f"[default: ${NAMESPACE_VARIABLE}, or as configured, or {DEFAULT_NAMESPACE}]",
    )(command)


def _namespace(ctx: click.Context, _param: click.Parameter, value: str | None) -> str:
    return value if value is not None else configured(ctx, "namespace") or DEFAULT_NAMESPACE


def channel_option(command: _Command) -> _Command:
    """`--channel`."""
    return click.option(
        "--channel",
        callback=_checked_channel,
        help="Where the nodes listen (listen_channel): what happens is heard of at once.  "
        f"[default: as configured, or {DEFAULT_CHANNEL}]",
    )(command)


def _checked_channel(ctx: click.Context, _param: click.Parameter, value: str | None) -> str:
    try:
        # Nodes that do not listen (false) cannot be woken: any channel will do then.
        return check_channel(configured(ctx, "listen_channel") or DEFAULT_CHANNEL if value is None else value)
    except ConfigurationError as error:
        raise click.UsageError(str(error).replace("listen_channel", "--channel")) from error


class LedgerLook(PlainConnection):
    """A plain connection to a database with a ledger, which can also wait for a notification."""

    facts: history.LedgerFacts

    async def listen(self, channel: str) -> None:
        """Let notifications on the channel end `woken` from now on. They are hints: read the ledger regularly
        anyway."""
        try:
            await self._connection.execute(listen_statement(channel))
        except psycopg.Error as error:
            raise ConnectionError(f"cannot listen: {scrub(str(error), self.params)}") from None

    async def woken(self, timeout_s: float) -> None:
        """Return at the next notification, or after the timeout."""
        try:
            async for _ in self._connection.notifies(timeout=timeout_s, stop_after=1):
                pass
        except psycopg.Error as error:
            raise ConnectionError(f"the connection was lost: {scrub(str(error), self.params)}") from None


@contextlib.asynccontextmanager
async def open_ledger(
    dsn: str, command: str, *, listen: str | None = None, to_write: bool = False
) -> AsyncIterator[LedgerLook]:
    """Connect, check the server and the ledger, and listen on the channel `listen`."""
    async with await LedgerLook.open(dsn, f"pgleaderlock {command}") as look:
        if look.server_version < VERSION_MIN:
            raise version_error(look.server_version)
        facts = await history.ledger_facts(look)
        if to_write and facts.in_recovery:
            raise UnsafeSessionError(
                "standby", "this server is a standby, where nothing can be asked: connect to the primary"
            )
        if listen is not None:
            await look.listen(listen)
        yield look


async def keep_reading(
    dsn: str,
    command: str,
    *,
    channel: str,
    read: Callable[[LedgerLook], Awaitable[None]],
    lost: Callable[[ConnectionError], None],
) -> None:
    """Run `read` on one connection after the other, until cancelled. `lost` is called with each failure, and may
    raise."""
    while True:
        try:
            async with open_ledger(dsn, command, listen=channel) as look:
                await read(look)
        except ConnectionError as error:
            lost(error)
        await asyncio.sleep(RETRY_S + reconnect_jitter_s(RETRY_S, JITTER))


# --- Completion in a shell


def complete_role(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """The roles that begin with this text, from the ledger of the command line that is being typed."""

    async def names(look: LedgerLook, namespace: str) -> list[str]:
        return [role.role for role in await history.roles(look, namespace)]

    return _complete(ctx, incomplete, names)


def complete_node(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """The nodes that live or lead and whose names begin with this text."""

    async def names(look: LedgerLook, namespace: str) -> list[str]:
        return sorted({node.node_id for node in await history.nodes(look, namespace)})

    return _complete(ctx, incomplete, names)


def _complete(
    ctx: click.Context, incomplete: str, names: Callable[[LedgerLook, str], Awaitable[list[str]]]
) -> list[str]:
    """The completions. If the ledger cannot be read, there are none, and no error message, because the user is
    typing."""

    async def read() -> list[str]:
        async with asyncio.timeout(COMPLETION_S):
            async with open_ledger(ctx.params["dsn"], "completion") as look:
                return await names(look, ctx.params["namespace"])

    if ctx.params.get("dsn") is None or ctx.params.get("namespace") is None:
        return []
    try:
        found = asyncio.run(read())
    except (PgLeaderLockError, TimeoutError):
        return []
    return [name for name in found if name.startswith(incomplete)]


async def elsewhere(look: history.Asks, namespace: str, *, of_slots: bool = False) -> str:
    """For an empty namespace: a text that names the namespaces with roles, or with slots if `of_slots`. Empty if there
    are none.
    """
    found = await history.namespaces(look, of_slots=of_slots, limit=NAMESPACES_SHOWN + 2)
    others = [name for name in found if name != namespace]
    shown = ", ".join(others[:NAMESPACES_SHOWN]) + (" and others" if len(others) > NAMESPACES_SHOWN else "")
    return f"; namespaces with {'slots' if of_slots else 'roles'}: {shown}" if others else ""


def counted(found: Collection[object], what: str) -> str:
    """`1 role`, `2 roles`."""
    return f"{len(found)} {what}{'s' * (len(found) != 1)}"


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
    """The console for tables, as wide as the terminal. A file or a pipe gets every column, unless COLUMNS is set."""
    console = stdout_console()
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = PIPE_COLUMNS
    return console


def state(role: history.RoleView) -> str:
    """The state in a few words, with its most important detail."""
    words = history.STATES[role.state][0]
    match role.state:
        case "waiting":
            return f"{words} ({span(role.opens_in_s)} left)"
        case "draining":
            flying = "" if role.in_flight is None else f", {role.in_flight} in flight"
            return f"{words} ({span(role.state_age_s)}{flying})"
        case "nobody" | "late":
            return words if role.state_age_s is None else f"{words} ({span(role.state_age_s)})"
    return words
