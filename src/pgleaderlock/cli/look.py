"""`pgleaderlock roles`, `nodes`, `history` and `events`: the contents of the ledger as a table, as JSON or line by
line.

Each command only reads: it takes no lock and writes nothing. Its output is informational, and may be outdated.
`events --follow` survives the loss of its connection: after a restart of the database it continues without a gap.
"""

import asyncio
import contextlib
import csv
import datetime as dt
import json
import shlex
import shutil
import statistics
import sys
import textwrap
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click
from click.core import ParameterSource

from pgleaderlock import history as ledger
from pgleaderlock._pg.explain import hopeless
from pgleaderlock.cli.ask import forget
from pgleaderlock.cli.output import (
    DURATION,
    EXIT_NO,
    EXIT_OK,
    MOMENT,
    database,
    dsn_option,
    json_option,
    optional_dsn_option,
    plain_table,
    print_table,
    printable,
)
from pgleaderlock.cli.reading import (
    LedgerLook,
    channel_option,
    complete_node,
    complete_role,
    counted,
    elsewhere,
    keep_reading,
    namespace_option,
    open_ledger,
    short_moment,
    span,
    state,
    table_console,
)
from pgleaderlock.cli.service import Stopper
from pgleaderlock.errors import ConnectionError, SchemaError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["KIND_COLUMNS", "events", "history", "leader", "nodes", "remedies", "roles", "sentence", "summary"]

LIMIT = 100
NAMES_SHOWN = 5
INCIDENTS_S = 86400.0
CLOCKS_APART_S = 3600.0
REASONS = ("lost", "evicted", "released", "superseded")
MOMENT_WORDS = "3h (ago), 03:00, 2026-11-15 or '2026-11-15 03:00'"
POLL_S = 2.0
NAMES_SHOWN = 5
KIND_COLUMNS = 20
EVENTS_NARROW_COLUMNS = 100

_Found = TypeVar("_Found")
_Row = TypeVar("_Row")


# --- One way to read, and one way to show a list


def _read(dsn: str, command: str, ask: Callable[[LedgerLook], Awaitable[_Found]]) -> _Found:
    async def read() -> _Found:
        async with open_ledger(dsn, command) as look:
            return await ask(look)

    return asyncio.run(read())


def _read_list(
    dsn: str, namespace: str, command: str, ask: Callable[[LedgerLook], Awaitable[Sequence[_Row]]]
) -> tuple[Sequence[_Row], str]:
    """The answer; and, if it is empty, the other namespaces, because the wrong one may have been asked."""

    async def read(look: LedgerLook) -> tuple[Sequence[_Row], str]:
        found = await ask(look)
        return found, "" if found else await elsewhere(look, namespace)

    return _read(dsn, command, read)


@dataclass(frozen=True)
class _Column(Generic[_Row]):
    heading: str
    cell: Callable[[_Row], str]
    number: bool = False
    wide: bool | None = None
    """Whether only a wide terminal shows the column, or only a narrow one; None: both. A narrow terminal shows a wide
    column, too, if there is room beside the others."""


@dataclass(frozen=True)
class _Listing(Generic[_Row]):
    """How the rows of one command are shown in a table."""

    columns: Sequence[_Column[_Row]]
    narrow_below: int
    """A terminal with fewer columns is narrow."""
    narrow_gap: int = 2

    def show(
        self,
        found: Sequence[_Row],
        view: Mapping[str, Any],
        *,
        as_json: bool,
        empty: str,
        summary: Callable[[Sequence[_Row]], str] | None = None,
    ) -> None:
        """Print `view`, which has the rows, as JSON; or, for people, a table and the line `summary`, or the line
        `empty`."""
        if as_json:
            click.echo(json.dumps(view, indent=2, default=ledger.as_json))
        elif not found:
            click.echo(empty)
        else:
            console = table_console()
            print_table(console, self._table(found, console.width))
            if summary is not None:
                for line in summary(found).splitlines():
                    click.echo(textwrap.fill(printable(line), console.width, break_on_hyphens=False))

    def _table(self, found: Sequence[_Row], width: int) -> "Table":
        wide = width >= self.narrow_below
        columns = [column for column in self.columns if column.wide in (None, wide)]
        if not wide:
            columns = self._with_what_fits(columns, found, width)
        return plain_table(
            [column.heading for column in columns],
            [[column.cell(row) for column in columns] for row in found],
            right=[column.heading for column in columns if column.number],
            gap=2 if wide else self.narrow_gap,
        )

    def _with_what_fits(
        self, columns: Sequence[_Column[_Row]], found: Sequence[_Row], width: int
    ) -> list[_Column[_Row]]:
        """These columns, and each of the others for which there is room without a line break."""
        from rich.cells import cell_len  # noqa: PLC0415 - takes longer to import than --help takes to answer.

        def needs(column: _Column[_Row]) -> int:
            return self.narrow_gap + max(cell_len(text) for text in (column.heading, *map(column.cell, found)))

        left = width + self.narrow_gap - sum(map(needs, columns))
        shown = {column.heading: column for column in columns}
        for column in self.columns:
            if column.heading not in shown and needs(column) <= left:
                shown[column.heading] = column
                left -= needs(column)
        return [column for column in self.columns if shown.get(column.heading) is column]


# --- roles


def leader(role: ledger.RoleView) -> str:
    """The leading node, whether it may act or not."""
    return "(nobody)" if role.node_id is None else role.node_id


def summary(found: Sequence[ledger.RoleView]) -> str:
    """All roles in one line."""
    states = [role.state for role in found]
    parts = [f"{states.count(name)} {words}" for name, (words, _) in ledger.STATES.items() if name in states]
    fewest, most = (choose((role.candidates for role in found), default=0) for choose in (min, max))
    candidates = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return f"{counted(found, 'role')}: {', '.join(reversed(parts)) or 'none'}; candidates: {candidates}"


def remedies(found: Sequence[ledger.RoleView], shown_max: int | None = None) -> list[tuple[str, str]]:
    """Why no node may act for which roles, and what to run next, worst first."""
    order = list(ledger.STATES)
    wrong = sorted((role for role in found if role.why), key=lambda role: (order.index(role.state), role.role))
    causes = ledger.remedies((role.role, role.why, role.command) for role in wrong)
    return [(f"{_named(names)}: {why}", f"  {command}") for names, why, command in causes[:shown_max]]


def _named(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


_ROLES = _Listing[ledger.RoleView](
    (
        _Column("role", lambda role: role.role),
        _Column("leader", leader),
        _Column("state", state),
        _Column("epoch", lambda role: str(role.epoch), number=True),
        _Column("tenure", lambda role: span(role.tenure_s), number=True),
        _Column("heartbeat", lambda role: span(role.heartbeat_age_s), number=True),
        _Column("leads since", lambda role: short_moment(role.acquired_at), wide=True),
        _Column("candidates", lambda role: str(role.candidates), number=True, wide=True),
    ),
    narrow_below=110,
)


@click.group(
    short_help="List the roles and who leads each.", invoke_without_command=True, subcommand_metavar="[COMMAND]..."
)
@optional_dsn_option
@namespace_option
@json_option
@click.pass_context
def roles(ctx: click.Context, dsn: str | None, namespace: str, as_json: bool) -> int:
    """List every role that was ever led, with its leader, epoch, tenure and the age of the leader's heartbeat.

    CANDIDATES are the processes that compete for it, the leader among them. `roles forget` takes a role that nobody
    wants any more out of the list.

    STATE says whether anybody may act for it: `acting`, or why not. For each role for which nobody may act, a line says
    why, and what to run next. By the ledger: informational, and old when it is read.

    Exit codes: 0 every role has a leader that may act; 1 a role has none, or all roles are in other namespaces; 2 it
    could not be found out.
    """
    if ctx.invoked_subcommand is not None:
        given = [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            raise click.UsageError(f"options belong behind the command: roles {ctx.invoked_subcommand} --dsn …")
        return EXIT_OK
    database_dsn = database(ctx, dsn)
    found, others = _read_list(database_dsn, namespace, "roles", lambda look: ledger.all_roles(look, namespace))
    _ROLES.show(
        found,
        {"namespace": namespace, "roles": found, "authoritative": False},
        as_json=as_json,
        empty=f"no role has been led in namespace {namespace} yet{others}",
        summary=lambda rows: "\n".join([summary(rows), *(line for pair in remedies(rows) for line in pair)]),
    )
    return EXIT_OK if all(role.state == "acting" for role in found) and not others else EXIT_NO


roles.add_command(forget)


# --- nodes


def _words(node: ledger.NodeView) -> str:
    """The state of a node in a few words."""
    if not node.live:
        return node.state
    extra = (
        (f"asked to {node.requested}", node.requested is not None),
        ("observes", not node.candidate),
        ("balances", node.balance),
        ("holds by a lease", node.hold == "lease"),
        ("shares its name", node.name_shared),
    )
    return ", ".join([node.state, *(word for word, holds in extra if holds)])


def _up_for(node: ledger.NodeView, since: dt.datetime) -> str:
    return span((node.last_heartbeat - since).total_seconds())


_NODES = _Listing[ledger.NodeView](
    (
        _Column("node", lambda node: node.node_id),
        _Column("state", _words),
        _Column("leads", lambda node: str(node.leads), number=True),
        _Column("wants", lambda node: "-" if node.wants is None else str(node.wants), number=True, wide=True),
        _Column("heartbeat", lambda node: span(node.heartbeat_age_s), number=True),
        _Column("up for", lambda node: _up_for(node, node.process_started_at), number=True, wide=True),
        _Column("session", lambda node: _up_for(node, node.started_at), number=True, wide=True),
        _Column("host", lambda node: node.host, wide=True),
        _Column("pid", lambda node: str(node.os_pid), number=True, wide=True),
        _Column("version", lambda node: node.library_version, wide=True),
    ),
    narrow_below=90,
)


@click.command(short_help="List the nodes and what they do.")
@dsn_option
@namespace_option
@click.option(
    "--since", type=DURATION, default=3600.0, help="Also nodes that have gone within this time.  [default: 1h]"
)
@json_option
def nodes(dsn: str, namespace: str, since: float, as_json: bool) -> int:
    """List the nodes: which live, how many roles each leads, which drain, which have gone lately.

    A node is `starting` until its first heartbeat, `draining` while it gives its roles up, and `drained` when it has
    none and competes for none. It is `silent` when it has not been heard for longer than its lease and has not said
    goodbye: it crashed, or is cut off. One that said goodbye has `ended`. WANTS is how many roles it competes for, UP
    FOR the age of the process, SESSION that of its connection. Two processes with one node id are two lines, each of
    which `shares its name`: a drain reaches both. By the ledger: informational, and old when it is read.

    Exit codes: 0 at least one node that would lead is alive, 1 none is, 2 it could not be found out.
    """
    found, candidates, others = _read(dsn, "nodes", lambda look: _nodes(look, namespace, since))
    _NODES.show(
        found,
        {"namespace": namespace, "nodes": found, "authoritative": False},
        as_json=as_json,
        empty=f"no node of namespace {namespace} has been heard lately{others}",
    )
    return EXIT_OK if candidates else EXIT_NO


async def _nodes(
    look: LedgerLook, namespace: str, since_s: float
) -> tuple[Sequence[ledger.NodeView], Sequence[Mapping[str, Any]], str]:
    """The nodes to list, the current candidates, and, if the list is empty, the namespaces with nodes."""
    found = await ledger.nodes(look, namespace, heard_within_s=since_s)
    others = "" if found or await ledger.roles(look, namespace, limit=1) else await elsewhere(look, namespace)
    return found, await look.rows("live_candidates", namespace=namespace, role=None), others


# --- history


def _unended(term: ledger.Term) -> str:
    if term.ended_at is not None:
        return "-"
    return "leads" if term.silent_since is None else "silent"


_TERMS = _Listing[ledger.Term](
    (
        _Column("epoch", lambda term: str(term.epoch), number=True),
        _Column("node", lambda term: term.node_id),
        _Column("began", lambda term: short_moment(term.began_at), wide=True),
        _Column("began", lambda term: short_moment(term.began_at, narrow=True), wide=False),
        _Column("ended", lambda term: short_moment(term.ended_at), wide=True),
        _Column("lasted", lambda term: span(term.lasted_s), number=True),
        _Column("end", lambda term: term.reason or _unended(term)),
        _Column("failover", lambda term: span(term.failover_s), number=True),
        _Column("shut", lambda term: span(term.shut_s or None), number=True, wide=True),
    ),
    narrow_below=90,
    narrow_gap=1,
)


@dataclass(frozen=True)
class _Wanted:
    """The filter from the options of `history` and `events`."""

    since: dt.datetime | None = None
    until: dt.datetime | None = None
    node: str | None = None
    reasons: tuple[str, ...] = ()
    gap_s_min: float = 0.0

    @property
    def since_s(self) -> float | None:
        """How long ago the period begins, for a statement. It uses this machine's clock, so it allows for a
        difference."""
        if self.since is None:
            return None
        return max(0.0, (dt.datetime.now(dt.UTC) - self.since).total_seconds()) + CLOCKS_APART_S

    def within(self, began_at: dt.datetime, ended_at: dt.datetime | None) -> bool:
        """Does this period overlap the requested one?"""
        ends_too_early = self.since is not None and ended_at is not None and ended_at < self.since
        return not ends_too_early and (self.until is None or began_at <= self.until)

    def term(self, term: ledger.Term) -> bool:
        return (
            self.within(term.began_at, term.ended_at)
            and (self.node is None or term.node_id == self.node)
            and (not self.reasons or term.reason in self.reasons)
            and (term.failover_s or 0.0) >= self.gap_s_min
        )

    def incident(self, incident: ledger.Incident) -> bool:
        return (
            (self.node is None or self.node in (incident.node_id, *incident.taken_over_by))
            and (not self.reasons or incident.reason in self.reasons)
            and incident.longest_s >= self.gap_s_min
        )

    def slot(self, slot: ledger.SlotView) -> bool:
        ended_at = slot.claimed_at if slot.state == "lost" else slot.ended_at
        return self.within(slot.claimed_at, ended_at) and (self.node is None or slot.node_id == self.node)

    def event(self, event: ledger.Event) -> bool:
        return (
            self.within(event.at, event.at)
            and (self.node is None or event.node_id == self.node)
            and (not self.reasons or event.kind in self.reasons)
        )

    def __str__(self) -> str:
        """The filter in words, for an empty list."""
        words = [f" since {short_moment(self.since)}"] * (self.since is not None)
        words += [f" until {short_moment(self.until)}"] * (self.until is not None)
        narrowed = self.node is not None or self.reasons or self.gap_s_min
        return "".join(words) + " that fits" * bool(narrowed)


_since_option = click.option("--since", type=MOMENT, metavar="WHEN", help=f"From this moment on: {MOMENT_WORDS}.")
_until_option = click.option("--until", type=MOMENT, metavar="WHEN", help="Up to this moment.  [default: now]")
_node_option = click.option("--node", metavar="NODE", shell_complete=complete_node, help="Only of this node.")
_limit_option = click.option(
    "--limit", type=click.IntRange(min=1), default=LIMIT, show_default=True, help="At most the newest so many."
)


@click.command(short_help="Show who led a role, and how long nobody did.")
@dsn_option
@namespace_option
@click.option("--incidents", "as_incidents", is_flag=True, help="What went wrong or was handed over, one line each.")
@click.option("--slots", "as_slots", is_flag=True, help="What ran once per tick, and how it ended: ROLE is its name.")
@_since_option
@_until_option
@_node_option
@click.option("--reason", "reasons", type=click.Choice(REASONS), multiple=True, help="Only terms that ended so.")
@click.option("--min-gap", type=DURATION, default=0.0, help="Only what left a role without a leader for so long.")
@_limit_option
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values for a spreadsheet.")
@click.argument("role", required=False, shell_complete=complete_role)
def history(
    *,
    dsn: str,
    namespace: str,
    as_incidents: bool,
    as_slots: bool,
    since: dt.datetime | None,
    until: dt.datetime | None,
    node: str | None,
    reasons: tuple[str, ...],
    min_gap: float,
    limit: int,
    as_json: bool,
    as_csv: bool,
    role: str | None,
) -> int:
    """Show the terms of ROLE, the newest first: who led, from when to when, and why the term ended.

    FAILOVER is the time in which nobody could act: from the last moment at which a leader before could to the first at
    which this one could. SHUT is the time within the term in which its gate was shut. A leader that was lost counts as
    acting until its last heartbeat.

    With --incidents, terms of one node that ended together are one line, for ROLE or for all roles: a crash or a drain
    is one incident. Without --since, those of the last 24 hours.

    With --slots, what ran once per tick: the slots of the name ROLE, or without it the newest of each
    name. STATE is `running`, `done`, `failed`, or `lost`: its runner is gone, and has not said how it ended.

    Exit codes: 0 there are terms (or incidents, or slots), 1 there are none, 2 it could not be found out.
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other: give one or the other")
    wanted = _Wanted(since, until, node, reasons, min_gap)
    if as_slots:
        if as_csv or as_incidents or reasons or min_gap:
            raise click.UsageError("--slots goes with --since, --until, --node, --limit and --json: drop the others")
        return _show_slots(dsn, namespace, role, wanted, limit, as_json=as_json)
    if as_incidents:
        if as_csv:
            raise click.UsageError("--csv is for terms: drop it, or --incidents")
        return _show_incidents(dsn, namespace, role, wanted, limit, as_json=as_json)
    if role is None:
        raise click.UsageError("which role? Name one, or give --incidents or --slots for all of them")
    found, more, others = _read(dsn, "history", lambda look: _terms(look, namespace, role, wanted, limit))
    if as_csv:
        _print_csv(found)
    else:
        _TERMS.show(
            found,
            {"namespace": namespace, "role": role, "terms": found, "more": more},
            as_json=as_json,
            empty=f"{role}: no term{wanted} in namespace {namespace} (the roles: pgleaderlock roles){others}",
            summary=_terms_summary,
        )
    if more and not as_json:
        click.echo(f"the newest {limit} terms; older ones were left out (--limit shows more)", err=True)
    return EXIT_OK if found else EXIT_NO


async def _terms(
    look: LedgerLook, namespace: str, role: str, wanted: _Wanted, limit: int
) -> tuple[list[ledger.Term], bool, str]:
    """The newest terms, whether there are more than `limit`, and, if there are none, where else to look."""
    found: list[ledger.Term] = []
    async for term in ledger.all_terms(look, namespace, role, since_s=wanted.since_s):
        if not wanted.term(term):
            continue
        if len(found) == limit:
            return found, True, ""
        found.append(term)
    if found:
        return found, False, ""
    with contextlib.suppress(SchemaError):
        if await ledger.slots(look, namespace, role, limit=1):
            return found, False, f"; it has slots: pgleaderlock history --slots {shlex.quote(role)}"
    return found, False, "" if await ledger.roles(look, namespace, limit=1) else await elsewhere(look, namespace)


def _takers(incident: ledger.Incident) -> str:
    left = f"{len(incident.without_leader)} without a leader" if incident.without_leader else ""
    return ", ".join([*incident.taken_over_by, *([left] if left else [])])


_INCIDENTS = _Listing[ledger.Incident](
    (
        _Column("began", lambda incident: short_moment(incident.began_at), wide=True),
        _Column("began", lambda incident: short_moment(incident.began_at, narrow=True), wide=False),
        _Column("node", lambda incident: incident.node_id),
        _Column("what", lambda incident: incident.reason),
        _Column("roles", lambda incident: str(len(incident.roles)), number=True),
        _Column("longest", lambda incident: span(incident.longest_s), number=True),
        _Column("taken over by", _takers),
        _Column("which", lambda incident: _few(incident.roles), wide=True),
    ),
    narrow_below=110,
    narrow_gap=1,
)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (
        f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    )


def _show_incidents(dsn: str, namespace: str, role: str | None, wanted: _Wanted, limit: int, *, as_json: bool) -> int:
    since = wanted.since or dt.datetime.now(dt.UTC) - dt.timedelta(seconds=INCIDENTS_S)

    async def read(look: LedgerLook) -> Sequence[ledger.Incident]:
        found = await ledger.incidents(look, namespace, name=role, since=since, until=wanted.until)
        return [incident for incident in found if wanted.incident(incident)]

    found, others = _read_list(dsn, namespace, "history", read)
    shown = found[:limit]
    _INCIDENTS.show(
        shown,
        {"namespace": namespace, "role": role, "incidents": shown, "more": len(found) > limit},
        as_json=as_json,
        empty=f"no incident since {short_moment(since)} in namespace {namespace}{others}",
    )
    if len(found) > limit and not as_json:
        click.echo(f"the newest {limit} of {len(found)} incidents (--limit shows more)", err=True)
    return EXIT_OK if found else EXIT_NO


_SLOTS = _Listing[ledger.SlotView](
    (
        _Column("name", lambda slot: slot.name),
        _Column("slot", lambda slot: slot.slot),
        _Column("state", lambda slot: slot.state),
        _Column("attempts", lambda slot: str(slot.attempts), number=True, wide=True),
        _Column("began", lambda slot: short_moment(slot.claimed_at), wide=True),
        _Column("began", lambda slot: short_moment(slot.claimed_at, narrow=True), wide=False),
        _Column("took", lambda slot: span(slot.took_s), number=True),
        _Column("node", lambda slot: slot.node_id or slot.holder_identity, wide=True),
        _Column("detail", lambda slot: slot.detail or "", wide=True),
    ),
    narrow_below=120,
    narrow_gap=1,
)


def _show_slots(dsn: str, namespace: str, name: str | None, wanted: _Wanted, limit: int, *, as_json: bool) -> int:
    async def read(look: LedgerLook) -> tuple[Sequence[ledger.SlotView], str]:
        found = [slot for slot in await ledger.slots(look, namespace, name) if wanted.slot(slot)]
        here = found or await ledger.slots(look, namespace, limit=1)
        return found, "" if here else await elsewhere(look, namespace, of_slots=True)

    found, others = _read(dsn, "history", read)
    shown = found[:limit]
    of = "" if name is None else f" of {name}"
    _SLOTS.show(
        shown,
        {"namespace": namespace, "name": name, "slots": shown, "more": len(found) > limit},
        as_json=as_json,
        empty=f"no slot{of}{wanted} in namespace {namespace}{others}",
    )
    if len(found) > limit and not as_json:
        click.echo(f"the newest {limit} of {len(found)} slots (--limit shows more)", err=True)
    return EXIT_OK if found else EXIT_NO


def _print_csv(found: Sequence[ledger.Term]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    columns = list(ledger.Term.__dataclass_fields__)
    writer.writerow(columns)
    for term in found:
        shown = ledger.as_json(term)
        writer.writerow([shown[column] for column in columns])


def _terms_summary(found: Sequence[ledger.Term]) -> str:
    text = f"{counted(found, 'term')}, {counted({term.node_id for term in found}, 'node')}"
    gaps = sorted(term.failover_s for term in found if term.failover_s is not None)
    if shut_s := sum(term.shut_s for term in found):
        text += f"; shut within terms: {span(shut_s)}"
    if gaps:
        text += f"; nobody could act between terms: median {span(statistics.median(gaps))}, longest {span(gaps[-1])}"
    return text


# --- events


@click.command(short_help="List what has happened, and follow it.")
@dsn_option
@namespace_option
@channel_option
@click.option("--role", shell_complete=complete_role, help="Only of this role.")
@_node_option
@click.option("--kind", "kinds", metavar="KIND", multiple=True, help="Only of this kind, such as lost.")
@_since_option
@_until_option
@_limit_option
@click.option("--follow", "-f", is_flag=True, help="Go on with what happens, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line for programs.")
def events(
    *,
    dsn: str,
    namespace: str,
    channel: str,
    role: str | None,
    node: str | None,
    kinds: tuple[str, ...],
    since: dt.datetime | None,
    until: dt.datetime | None,
    limit: int,
    follow: bool,
    as_json: bool,
) -> int:
    """List what has happened in a namespace, the oldest first: terms that began and ended, requests, drains, sessions.

    With --follow it goes on: a notification of the nodes wakes it, and every 2 s it looks anyway. It waits for a
    database that is away, and then shows what happened meanwhile.

    Exit codes: 0 listed, or ended by Ctrl-C or SIGTERM; 2 it could not be found out.
    """
    wanted = _Wanted(since, until, node, tuple(kind.replace("-", "_").replace(" ", "_") for kind in kinds))
    if follow:
        if until is not None:
            raise click.UsageError("--follow has no end: drop it, or --until")
        follower = _Follower(namespace, role, wanted, limit=limit, as_json=as_json)
        with Stopper() as stopper:
            asyncio.run(stopper.unless_asked(follower.follow(dsn, channel)))
        return EXIT_OK
    found, others = _read_list(dsn, namespace, "events", lambda look: _events(look, namespace, role, wanted, limit))
    for event in found:
        _print_event(event, as_json=as_json)
    if others:
        click.echo(f"nothing has happened in namespace {namespace}{others}", err=True)
    return EXIT_OK


async def _events(
    look: LedgerLook, namespace: str, role: str | None, wanted: _Wanted, limit: int
) -> list[ledger.Event]:
    """The newest events that match the filter, oldest first."""
    found: list[ledger.Event] = []
    before_id, since_s = ledger.LAST_ID, wanted.since_s
    while len(found) < limit:
        page = await ledger.events(
            look, namespace, name=role, node=wanted.node, since_s=since_s, before_id=before_id, limit=ledger.PAGE_SIZE
        )
        found += [event for event in page if wanted.event(event)][: limit - len(found)]
        if len(page) < ledger.PAGE_SIZE:
            break
        before_id = page[-1].event_id
    return found[::-1]


class _Follower:
    """Prints every event once, across any number of connections."""

    def __init__(self, namespace: str, role: str | None, wanted: _Wanted, *, limit: int, as_json: bool) -> None:
        self._wanted = wanted
        self._limit = limit
        self._as_json = as_json
        self._feed = ledger.EventFeed(namespace, role)
        self._began = False
        self._away = False

    async def follow(self, dsn: str, channel: str) -> None:
        """Print events until cancelled. Raises an error that occurs before the first event and that waiting cannot
        fix."""
        await keep_reading(dsn, "events", channel=channel, read=self._read, lost=self._lost)

    async def _read(self, look: LedgerLook) -> None:
        if not self._began:
            self._show(await self._feed.begin(look, since_s=self._wanted.since_s or 0.0, limit=self._limit))
            self._began = True
        if self._away:
            click.echo("the database is back", err=True)
            self._away = False
        while True:
            self._show(await self._feed.more(look))
            await look.woken(POLL_S)

    def _show(self, found: list[ledger.Event]) -> None:
        for event in found:
            if self._wanted.event(event):
                _print_event(event, as_json=self._as_json)

    def _lost(self, error: ConnectionError) -> None:
        if not self._began and hopeless(error):
            raise error
        if not self._away:
            click.echo(f"the database is away, waiting for it: {' '.join(str(error).split())}", err=True)
        self._away = True


def _print_event(event: ledger.Event, *, as_json: bool) -> None:
    if as_json:
        shown = ledger.as_json(event)
        del shown["age_s"]
        print(json.dumps(shown), flush=True)
    elif sys.stdout.isatty() and shutil.get_terminal_size().columns < EVENTS_NARROW_COLUMNS:
        print(f"{event.at.astimezone():%m-%d %H:%M:%S} {sentence(event)}", flush=True)
    else:
        at = event.at.astimezone().isoformat(sep=" ", timespec="milliseconds")
        print(f"{at}  {sentence(event, KIND_COLUMNS)}", flush=True)


def sentence(event: ledger.Event, kind_columns: int = 0) -> str:
    """One event in one line: kind, role, node, and further details."""
    epoch = "" if event.epoch is None else f"epoch {event.epoch}"
    rest = ", ".join(part for part in (epoch, event.detail) if part)
    words = [f"{event.kind.replace('_', ' '):<{kind_columns}}", event.role, event.node_id and f"by {event.node_id}"]
    return printable(" ".join(word for word in words if word) + (f" ({rest})" if rest else ""))
