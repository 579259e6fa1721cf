"""`pgleaderlock status`: who holds a lock, as the server sees it at this moment.

Informational: the answer may be outdated when it is read. A program that acts as leader must hold the lock.

Reads through a plain connection, never through a dedicated session, and takes no lock.
"""

import asyncio
import datetime as dt
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from pgleaderlock import history
from pgleaderlock._pg.explain import version_error
from pgleaderlock._pg.reader import PlainConnection
from pgleaderlock._pg.session import VERSION_MIN
from pgleaderlock.cli.output import (
    EXIT_NO,
    EXIT_OK,
    EXIT_USAGE,
    LockKey,
    dsn_option,
    json_option,
    lock_options,
    plain_table,
    print_json,
    print_table,
    stderr_console,
    stdout_console,
)
from pgleaderlock.cli.reading import elsewhere, state
from pgleaderlock.errors import SchemaError
from pgleaderlock.migrate import LEDGER_VERSION
from pgleaderlock.models import WORK_FAILED

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["status", "who_holds"]

_INFORMATIONAL = "A look, not a promise: it may have changed since. To act as leader, hold the lock."
_STANDBY = "this server is a standby, which does not show the primary's locks: ask the primary"
_NODES_SHOWN = 10
_HIDDEN = "not visible to this role (pg_read_all_stats shows it)"


@dataclass(frozen=True, slots=True)
class LockView:
    """One lock, as the server showed it."""

    server: Mapping[str, Any]
    holders: Sequence[Mapping[str, Any]]
    waiters: Sequence[Mapping[str, Any]]
    ledger: "LedgerView | None" = None

    @property
    def lease(self) -> str | None:
        """The lease that holds the role of this key, in words; a lease holds no lock. None if there is none."""
        found = self.ledger.view if self.ledger is not None else None
        return f"a lease of {found.node_id}" if found is not None and found.hold == "lease" else None


@dataclass(frozen=True, slots=True)
class LedgerView:
    """The role of the same key in the ledger; `role` is None if no node has ever led it."""

    readable: bool
    role: Mapping[str, Any] | None = None
    view: history.RoleView | None = None
    candidates: Sequence[Mapping[str, Any]] = ()
    slot: history.SlotView | None = None
    """The newest slot of the name, if it was ever run once per tick."""
    elsewhere: str = ""
    """Other namespaces with roles, if this one has none: the wrong one may have been asked for."""


@click.command(short_help="Show who holds a lock.")
@dsn_option
@lock_options(takes_it=False)
@json_option
def status(dsn: str, lock_key: LockKey, as_json: bool) -> int:
    """Show who holds a lock, and how many wait for it at the server.

    Informational: the answer may be outdated when you read it. PostgreSQL does not record when a lock was granted;
    shown are when the holder's session began and when it was last active. Nodes that try and back off instead of
    waiting at the server (--standby-wait) are not counted as waiting. Where there is a ledger, the epoch, the leader,
    the age of its heartbeat and the nodes that would lead are shown, too; and of a name that is run once per tick its
    newest slot.

    Exit codes: 0 somebody holds it, 1 nobody does, 2 it could not be found out.
    """
    view = asyncio.run(_view(dsn, lock_key))
    standby = bool(view.server["in_recovery"])
    if as_json:
        print_json(_as_json(view, lock_key))
    else:
        _print(view, lock_key)
    if standby:
        stderr_console().print(f"error: {_STANDBY}", soft_wrap=True)
        return EXIT_USAGE
    return EXIT_OK if view.holders or view.lease else EXIT_NO


async def _view(dsn: str, lock_key: LockKey, program: str = "pgleaderlock status") -> LockView:
    async with await PlainConnection.open(dsn, program) as look:
        if look.server_version < VERSION_MIN:
            raise version_error(look.server_version)
        view = await _look_at(look, lock_key)
        return replace(view, ledger=await _ledger(look, lock_key))


async def _ledger(look: PlainConnection, lock_key: LockKey) -> LedgerView | None:
    found = await look.row("history_ledger")
    if not found["present"]:
        return None
    if not found["readable"]:
        return LedgerView(readable=False)
    rows = await look.rows("status_ledger", key1=lock_key.key1, key2=lock_key.key2, work_failed=WORK_FAILED)
    role = rows[0] if rows else None
    namespace = role["namespace"] if role is not None else lock_key.namespace
    version = (await look.row("ledger_version"))["version"]
    served = version >= LEDGER_VERSION - 1  # an older one does not say enough
    view = await history.role(look, namespace, role["role"]) if role is not None and served else None
    candidates = await look.rows(
        "live_candidates", namespace=namespace, role=role["role"] if role is not None else lock_key.name
    )
    slot = await _newest_slot(look, lock_key)
    here = role is not None or slot is not None or lock_key.namespace in await history.namespaces(look)
    others = "" if here else await elsewhere(look, lock_key.namespace)
    return LedgerView(readable=True, role=role, view=view, candidates=candidates, slot=slot, elsewhere=others)


async def _newest_slot(look: PlainConnection, lock_key: LockKey) -> history.SlotView | None:
    if lock_key.name is None:
        return None
    try:
        found = await history.slots(look, lock_key.namespace, lock_key.name, limit=1)
    except SchemaError:  # no slots yet, or this role may not read them: `history --slots` explains that
        return None
    return found[0] if found else None


async def _look_at(look: PlainConnection, lock_key: LockKey) -> LockView:
    """Ask the server for the holders and the waiters of this lock."""
    server = await look.row("server_facts")
    rows = await look.rows("status_lock", classid=lock_key.key1 & 0xFFFFFFFF, objid=lock_key.key2 & 0xFFFFFFFF)
    return LockView(server, [row for row in rows if row["granted"]], [row for row in rows if not row["granted"]])


async def who_holds(dsn: str, program: str, lock_key: LockKey) -> str:
    """The holders in a few words, read on a separate connection. They may have changed since the try."""
    view = await _view(dsn, lock_key, program)
    holders = " and ".join(_describe(holder) for holder in view.holders)
    return holders or view.lease or "nobody any more; a moment ago it was"


def _describe(holder: Mapping[str, Any]) -> str:
    if holder["pid"] is None:
        return "a prepared transaction"
    application = holder["application_name"]
    return f"pid {holder['pid']}, " + (f"application {application!r}" if application else "no application name")


# --- For programs

_SESSION_FIELDS = (
    "pid",
    "application_name",
    "role",
    "client_addr",
    "client_port",
    "shared",
    "backend_start",
    "state_change",
)
_CANDIDATE_FIELDS = ("node_id", "holder_identity", "last_heartbeat", "heartbeat_age_s")
_ROLE_FIELDS = (
    "role",
    "namespace",
    "epoch",
    "led",
    "holder_identity",
    "node_id",
    "acquired_at",
    "last_heartbeat",
    "heartbeat_age_s",
    "work_failed_on",
    "work_failed_at",
)


_STATE_FIELDS = ("state", "state_since", "opens_in_s", "in_flight", "why", "command", "hold")


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
        "held": None if standby else bool(view.holders or view.lease),
        "holders": [_fields(row, *_SESSION_FIELDS) for row in view.holders],
        "waiting": len(view.waiters),
        "waiters": [_fields(row, *_SESSION_FIELDS, "waitstart") for row in view.waiters],
        "ledger": _ledger_json(view.ledger),
        "authoritative": False,
    }


def _ledger_json(ledger: LedgerView | None) -> dict[str, Any] | None:
    if ledger is None or not ledger.readable:
        return None
    return {
        **_fields(ledger.role or {"led": False}, *_ROLE_FIELDS),
        **_fields(history.as_json(ledger.view) if ledger.view is not None else {}, *_STATE_FIELDS),
        "candidates": [_fields(row, *_CANDIDATE_FIELDS) for row in ledger.candidates],
        "slot": None if ledger.slot is None else history.as_json(ledger.slot),
    }


def _fields(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """These columns as JSON types: times in UTC; null for a missing column."""
    return {name: _iso(value) if isinstance(value := row.get(name), dt.datetime) else value for name in names}


def _iso(moment: dt.datetime) -> str:
    return moment.astimezone(dt.UTC).isoformat(timespec="milliseconds")


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
        lines.append(("held by", "unknown here" if server["in_recovery"] else view.lease or "nobody"))
    for holder in view.holders:
        lines += _holder_lines(holder)
    lines.append(("waiting", f"{len(view.waiters)} at the server"))
    lines += [*_ledger_lines(view.ledger), *_slot_lines(view.ledger)]
    parts = [plain_table(("", ""), lines, show_header=False)]
    if view.waiters:
        waiters = [(_pid(row), _application(row), _age(row["waited_s"])) for row in view.waiters]
        parts.append(plain_table(("waiting pid", "application", "since (waitstart)"), waiters))
    return parts


def _ledger_lines(ledger: LedgerView | None) -> list[tuple[str, str]]:
    if ledger is None:
        return []
    if not ledger.readable:
        return [("ledger", "there is one, not readable for this role (pgleaderlock migrate --grant-to)")]
    role = ledger.role
    names = Counter(row["node_id"] for row in ledger.candidates)
    words = [f"{name}: {times} processes" if times > 1 else name for name, times in names.items()]
    nodes = ", ".join(words[:_NODES_SHOWN])
    more = f" and {len(words) - _NODES_SHOWN} more" if len(words) > _NODES_SHOWN else ""
    candidates = ("candidates", f"{len(ledger.candidates)}" + (f" ({nodes}{more})" if nodes else ""))
    if role is None:
        return [("epoch", f"none yet: nobody has led it in this ledger{ledger.elsewhere}"), candidates]
    lines = [("epoch", str(role["epoch"]))]
    if ledger.view is not None:
        lines.append(("state", state(ledger.view)))
        if ledger.view.why:
            lines += [("why", ledger.view.why), ("next", f"{ledger.view.command}")]
    if role["work_failed_on"] is not None:
        lines.append(("work", f"failed on {role['work_failed_on']}, {_age(role['work_failed_age_s'])} ago"))
    if not role["led"]:
        return [*lines, ("leader", "nobody, by the ledger"), candidates]
    return [
        *lines,
        ("leader", role["holder_identity"] or "(its session is not recorded)"),
        ("leads since", _moment(role["acquired_at"], role["acquired_age_s"], "acquired_at")),
        ("heartbeat", _moment(role["last_heartbeat"], role["heartbeat_age_s"], "last_heartbeat")),
        candidates,
    ]


def _slot_lines(ledger: LedgerView | None) -> list[tuple[str, str]]:
    if ledger is None or ledger.slot is None:
        return []
    slot = ledger.slot
    tries = f", attempt {slot.attempts}" if slot.attempts > 1 else ""
    why = f": {slot.detail}" if slot.detail else ""
    return [
        ("slot", f"{slot.slot} {slot.state}{tries}{why}"),
        ("ran on", slot.node_id or slot.holder_identity),
        ("slot began", _moment(slot.claimed_at, slot.age_s, "claimed_at")),
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
