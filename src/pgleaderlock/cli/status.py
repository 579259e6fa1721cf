"""`pgleaderlock status`: who holds a lock, as the server sees it at this moment.

Informational: the answer is old when it is read. Who wants to act on leadership must hold the lock, not look at it.

Imports click, rich (through `_output`), and its neighbours. It looks through a plain connection, never through a
dedicated session, and takes no lock.
"""

import asyncio
import datetime as dt
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from pgleaderlock._session import VERSION_MIN
from pgleaderlock.cli._output import (
    EXIT_NO,
    EXIT_OK,
    EXIT_USAGE,
    LockKey,
    dsn_option,
    lock_options,
    stderr_console,
    stdout_console,
)
from pgleaderlock.cli._reach import Look
from pgleaderlock.cli._table import print_table
from pgleaderlock.errors import UnsafeSessionError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["LockView", "describe", "look_at", "status"]

_INFORMATIONAL = "A look, not a promise: it may have changed since. To act as leader, hold the lock."
_STANDBY = "this server is a standby, which does not show the primary's locks: ask the primary"
_NODES_SHOWN = 10
_HIDDEN = "not visible to this role (pg_read_all_stats shows it)"


@dataclass(frozen=True, slots=True)
class LockView:
    """What the server showed of one lock."""

    server: Mapping[str, Any]
    holders: Sequence[Mapping[str, Any]]
    waiters: Sequence[Mapping[str, Any]]
    ledger: "LedgerView | None" = None


@dataclass(frozen=True, slots=True)
class LedgerView:
    """What the ledger says of the same key; `role` is None if nobody has ever led it."""

    readable: bool
    role: Mapping[str, Any] | None = None
    candidates: Sequence[Mapping[str, Any]] = ()


@click.command(short_help="Show who holds a lock.")
@dsn_option
@lock_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for programs.")
def status(dsn: str, lock_key: LockKey, as_json: bool) -> int:
    """Show who holds a lock, and how many wait for it at the server.

    Informational: the answer may be outdated when you read it. PostgreSQL does not record when a lock was granted;
    shown are when the holder's session began and when it was last active. Nodes that try and back off instead of
    waiting at the server (--standby-wait) are not counted as waiting. Where there is a ledger, the epoch, the leader,
    the age of its heartbeat and the nodes that would lead are shown, too.

    Exit codes: 0 somebody holds it, 1 nobody does, 2 it could not be found out.
    """
    view = asyncio.run(_view(dsn, lock_key))
    standby = bool(view.server["in_recovery"])
    if as_json:
        click.echo(json.dumps(_as_json(view, lock_key), indent=2))
    else:
        _print(view, lock_key)
    if standby:
        stderr_console().print(f"error: {_STANDBY}", soft_wrap=True)
        return EXIT_USAGE
    return EXIT_OK if view.holders else EXIT_NO


async def _view(dsn: str, lock_key: LockKey) -> LockView:
    async with await Look.open(dsn, "pgleaderlock status") as look:
        view = await look_at(look, lock_key)
        return replace(view, ledger=await _ledger(look, lock_key))


async def _ledger(look: Look, lock_key: LockKey) -> LedgerView | None:
    found = await look.row("status_has_ledger")
    if not found["present"]:
        return None
    if not found["readable"]:
        return LedgerView(readable=False)
    rows = await look.rows("status_ledger", key1=lock_key.key1, key2=lock_key.key2)
    role = rows[0] if rows else None
    namespace = role["namespace"] if role is not None else lock_key.namespace
    return LedgerView(readable=True, role=role, candidates=await look.rows("status_candidates", namespace=namespace))


async def look_at(look: Look, lock_key: LockKey) -> LockView:
    """Ask the server who holds this lock and who waits for it."""
    if look.server_version < VERSION_MIN:
        raise UnsafeSessionError(
            "version", f"PostgreSQL {look.server_version // 10000} is too old for pgleaderlock: use 14 or newer"
        )
    server = await look.row("status_server")
    rows = await look.rows("status_lock", classid=lock_key.key1 & 0xFFFFFFFF, objid=lock_key.key2 & 0xFFFFFFFF)
    return LockView(server, [row for row in rows if row["granted"]], [row for row in rows if not row["granted"]])


def describe(holder: Mapping[str, Any]) -> str:
    """One holder in a few words."""
    if holder["pid"] is None:
        return "a prepared transaction"
    application = holder["application_name"]
    return f"pid {holder['pid']}, " + (f"application {application!r}" if application else "no application name")


# --- For programs


def _as_json(view: LockView, lock_key: LockKey) -> dict[str, Any]:
    standby = bool(view.server["in_recovery"])
    return {
        "lock": {
            "name": lock_key.name,
            "namespace": lock_key.namespace if lock_key.name is not None else None,
            "key1": lock_key.key1,
            "key2": lock_key.key2,
        },
        "database": view.server["database"],
        "server_version": view.server["version"],
        "standby": standby,
        "held": None if standby else bool(view.holders),
        "holders": [_session_json(row, waiting=False) for row in view.holders],
        "waiting": len(view.waiters),
        "waiters": [_session_json(row, waiting=True) for row in view.waiters],
        "ledger": _ledger_json(view.ledger),
        "authoritative": False,
    }


def _ledger_json(ledger: LedgerView | None) -> dict[str, Any] | None:
    if ledger is None or not ledger.readable:
        return None
    role = ledger.role
    return {
        "role": None if role is None else role["role"],
        "namespace": None if role is None else role["namespace"],
        "epoch": None if role is None else role["epoch"],
        "led": role is not None and role["led"],
        "holder_identity": None if role is None else role["holder_identity"],
        "node_id": None if role is None else role["node_id"],
        "acquired_at": None if role is None else _iso(role["acquired_at"]),
        "last_heartbeat": None if role is None else _iso(role["last_heartbeat"]),
        "heartbeat_age_s": None if role is None else role["heartbeat_age_s"],
        "candidates": [
            {
                "node_id": row["node_id"],
                "holder_identity": row["holder_identity"],
                "last_heartbeat": _iso(row["last_heartbeat"]),
                "heartbeat_age_s": row["heartbeat_age_s"],
            }
            for row in ledger.candidates
        ],
    }


def _session_json(row: Mapping[str, Any], *, waiting: bool) -> dict[str, Any]:
    session = {
        "pid": row["pid"],
        "application_name": row["application_name"],
        "role": row["role"],
        "client_addr": row["client_addr"],
        "client_port": row["client_port"],
        "shared": row["shared"],
        "backend_start": _iso(row["backend_start"]),
        "state_change": _iso(row["state_change"]),
    }
    if waiting:
        session["waitstart"] = _iso(row["waitstart"])
    return session


def _iso(moment: dt.datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(dt.UTC).isoformat(timespec="milliseconds")


# --- For people


def _print(view: LockView, lock_key: LockKey) -> None:
    console = stdout_console()
    for part in _parts(view, lock_key):
        print_table(console, part)
    console.print(_INFORMATIONAL, style="dim", soft_wrap=not console.is_terminal)


def _parts(view: LockView, lock_key: LockKey) -> "list[Table]":
    server = view.server
    kind = " (standby)" if server["in_recovery"] else ""
    keys = f"{lock_key.key1} / {lock_key.key2}"
    lines = [("lock", f"{lock_key.name} ({keys})" if lock_key.name is not None else keys)]
    lines.append(("database", f"{server['database']}, PostgreSQL {server['version'].split(' ')[0]}{kind}"))
    if not view.holders:
        lines.append(("held by", "unknown here" if server["in_recovery"] else "nobody"))
    for holder in view.holders:
        lines += _holder_lines(holder)
    lines.append(("waiting", f"{len(view.waiters)} at the server"))
    lines += _ledger_lines(view.ledger)
    parts = [_table(("", ""), lines, show_header=False)]
    if view.waiters:
        waiters = [(_pid(row), _application(row), _age(row["waited_s"])) for row in view.waiters]
        parts.append(_table(("waiting pid", "application", "since (waitstart)"), waiters, show_header=True))
    return parts


def _ledger_lines(ledger: LedgerView | None) -> list[tuple[str, str]]:
    if ledger is None:
        return []
    if not ledger.readable:
        return [("ledger", "there is one, not readable for this role (pgleaderlock migrate --grant-to)")]
    role = ledger.role
    nodes = ", ".join(row["node_id"] for row in ledger.candidates[:_NODES_SHOWN])
    more = f" and {len(ledger.candidates) - _NODES_SHOWN} more" if len(ledger.candidates) > _NODES_SHOWN else ""
    candidates = ("candidates", f"{len(ledger.candidates)}" + (f" ({nodes}{more})" if nodes else ""))
    if role is None:
        return [("epoch", "none yet: nobody has led it in this ledger"), candidates]
    lines = [("epoch", str(role["epoch"]))]
    if not role["led"]:
        return [*lines, ("leader", "nobody, by the ledger"), candidates]
    return [
        *lines,
        ("leader", role["holder_identity"] or "(its session is not recorded)"),
        ("leads since", _moment(role["acquired_at"], role["acquired_age_s"], "acquired_at")),
        ("heartbeat", _moment(role["last_heartbeat"], role["heartbeat_age_s"], "last_heartbeat")),
        candidates,
    ]


def _holder_lines(holder: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("held by", f"pid {_pid(holder)}" + (" (shared)" if holder["shared"] else "")),
        ("application", _application(holder)),
        ("role", holder["role"] or "-"),
        ("client", _client(holder)),
        ("session since", _moment(holder["backend_start"], holder["backend_age_s"], "backend_start")),
        ("last active", _moment(holder["state_change"], holder["state_age_s"], "state_change")),
    ]


def _pid(row: Mapping[str, Any]) -> str:
    return "- (a prepared transaction)" if row["pid"] is None else str(row["pid"])


def _application(row: Mapping[str, Any]) -> str:
    return row["application_name"] or "(no name)"


def _client(row: Mapping[str, Any]) -> str:
    if row["client_port"] is None:
        return _HIDDEN if row["pid"] is not None else "-"
    return "local socket" if row["client_port"] == -1 else f"{row['client_addr']} port {row['client_port']}"


def _moment(moment: dt.datetime | None, age_s: float | None, column: str) -> str:
    if moment is None:
        return _HIDDEN
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S%z}, {_age(age_s)} ago ({column})"


def _age(age_s: float | None) -> str:
    if age_s is None:
        return "?"
    seconds = max(0, round(age_s))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, show_header: bool) -> "Table":
    from rich.table import Table  # noqa: PLC0415 - takes longer to import than --help takes to answer.
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, show_header=show_header, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, style="bold" if index == 0 and not show_header else None, overflow="fold")
    for row in rows:
        # Text, not str: what comes from a database is shown as it is.
        table.add_row(*(Text(cell) for cell in row))
    return table
