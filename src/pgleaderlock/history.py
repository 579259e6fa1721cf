"""The ledger as frozen values: roles, nodes, terms with their failovers, slots, events, operators' requests.

For the command line, the dashboard, and your own programs. Each answer may be outdated when it is read. The privileges
of a run-time role are enough. Every list comes in pages that an index finds, so the cost depends on what is shown, even
with a thousand roles and a hundred thousand terms. Ledgers of this version and of the previous one can be read.

The functions take any object that runs a named statement (`Asks`): `Reader` does so on your own connection.

Must never write, and never decide who leads.
"""

import dataclasses
import datetime as dt
import shlex
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import psycopg

from pgleaderlock._pg.reader import execute
from pgleaderlock.errors import SchemaError
from pgleaderlock.keys import DEFAULT_NAMESPACE, slot_namespace
from pgleaderlock.migrate import check_schema

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "PAGE_SIZE",
    "STATES",
    "Asks",
    "Event",
    "EventFeed",
    "Incident",
    "LedgerFacts",
    "NodeState",
    "NodeView",
    "Reader",
    "RequestView",
    "RoleView",
    "SlotState",
    "SlotView",
    "Term",
    "all_roles",
    "all_terms",
    "as_json",
    "events",
    "incidents",
    "ledger_facts",
    "namespaces",
    "node_state",
    "nodes",
    "remedies",
    "request",
    "role",
    "role_view",
    "roles",
    "slots",
    "terms",
]

PAGE_SIZE = 1000
NODES_MAX = 1000
NAMES_SHOWN = 3
LAST_ID = 2**63 - 1
EVER_S = 1e9  # about thirty years: make_interval takes no infinity
MS_MAX = 253_402_300_799_999  # the end of the year 9999
LATE_COMMIT_S = 60.0
INCIDENT_APART_S = 60.0

View = TypeVar("View", bound="DataclassInstance")
RoleState = Literal["acting", "waiting", "draining", "vetoed", "late", "work_failed", "nobody", "forgotten"]
STATES: Mapping[str, tuple[str, Literal["well", "late", "bad"]]] = {
    "nobody": ("nobody", "bad"),
    "work_failed": ("leads, work failed", "bad"),
    "late": ("late heartbeat", "late"),
    "draining": ("draining", "late"),
    "vetoed": ("leads, gate vetoed", "late"),
    "waiting": ("waiting", "late"),
    "acting": ("acting", "well"),
    "forgotten": ("forgotten", "well"),
}
"""Every state of a role, worst first, with its label and how bad it is. Only in `acting` may a node act."""
TAKEN_SOON_S = 30.0  # a live candidate takes a free role that it competes for within this time
STUCK_AFTER_S = 60.0  # the default of `alerts export --drain-time`, too: work that takes longer may never end
NodeState = Literal["starting", "alive", "draining", "drained", "silent", "ended"]
SlotState = Literal["running", "done", "failed", "lost"]


class Asks(Protocol):
    """An object that runs a named statement on the database of the ledger."""

    async def rows(self, name: str, **params: object) -> list[dict[str, Any]]: ...


class Reader:
    """Runs statements on the caller's psycopg connection, best in autocommit mode: otherwise a transaction stays
    open."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    async def rows(self, name: str, **params: object) -> list[dict[str, Any]]:
        return await execute(self._connection, name, params)


@dataclass(frozen=True, slots=True)
class LedgerFacts:
    """The version of the ledger, and whether its server is a standby."""

    version: int
    in_recovery: bool


@dataclass(frozen=True, slots=True)
class RoleView:
    """One role: its leader according to the ledger, since when, and whether that node may act."""

    namespace: str
    role: str
    state: RoleState
    """`acting`: the leader may act. `waiting`: it waits until its predecessor can no longer act. `draining`: it refuses
    new work and waits for the work in flight. `vetoed`: its application keeps the gate shut. `late`: it was not heard
    for so long that its gate has shut. `work_failed`: it leads, but its work has failed. `nobody`: no node leads, or
    the leader was not heard within its lease. `forgotten`: the same, and an operator has forgotten the role."""
    epoch: int
    node_id: str | None
    holder_identity: str | None
    acquired_at: dt.datetime | None
    tenure_s: float | None
    last_heartbeat: dt.datetime | None
    heartbeat_age_s: float | None
    lease_s: float | None
    draining: bool
    """The leader is draining."""
    candidates: int
    """The number of processes that could take this role over now, including the leader. A process with an older
    library, which does not declare its roles, counts for every role of its namespace."""
    state_since: dt.datetime | None = None
    """In the state `nobody`: the last moment at which a node could act, if it is known."""
    state_age_s: float | None = None
    opens_in_s: float | None = None
    """In the state `waiting`: how long the leader will still wait."""
    hold: str | None = None
    """How the leader holds the role: by a `session`, or by a `lease`."""
    in_flight: int | None = None
    """In the state `draining`: the work in flight that the leader last reported."""
    why: str = ""
    """One line that says why no node may act. Empty while a node may act, and for a forgotten role."""
    command: str | None = None
    """The command to run next; None if there is nothing to do."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One session of a node."""

    namespace: str
    node_id: str
    state: NodeState
    """`starting`: no heartbeat yet. `draining`: drained, but it still leads; `drained`: it leads nothing and does not
    compete. `silent`: not heard for longer than its lease, and its session was not closed. `ended`: its session was
    closed."""
    live: bool
    """Whether it was heard within its lease and has not ended, whatever its state."""
    requested: str | None
    """The operator's request that it has not carried out yet: `drain` or `resume`."""
    name_shared: bool
    """Another live node has the same `node_id`: a request to this node reaches both."""
    leads: int
    candidate: bool
    draining: bool
    balance: bool
    hold: str
    """`session`, or `lease` for a node without a session."""
    session_id: int
    host: str
    os_pid: int
    holder_identity: str
    library_version: str
    gate_s: float
    lease_s: float
    beat: int
    process_started_at: dt.datetime
    """When the election of this process opened its first session, as far as the ledger remembers."""
    started_at: dt.datetime
    """When this session was opened: later, if its connection was lost."""
    last_heartbeat: dt.datetime
    heartbeat_age_s: float
    ended_at: dt.datetime | None
    wants: int | None = None
    """How many roles it competes for; None if it has not declared them."""


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a role, and how long the role had no leader before it."""

    namespace: str
    role: str
    epoch: int
    node_id: str
    holder_identity: str
    began_at: dt.datetime
    ended_at: dt.datetime | None
    """None if it has not ended. For a lost term, the last heartbeat, because its true end is not known."""
    reason: str | None
    lasted_s: float
    """The duration of the term; up to now if it has not ended."""
    prev_epoch: int | None
    prev_node_id: str | None
    prev_reason: str | None
    failover_s: float | None
    """From the last moment at which a leader before it could act to the first moment at which its own leader could; up
    to now if that leader still waits. None for the first term, and for a term whose leader never could act."""
    opened_at: dt.datetime | None = None
    """When its gate first opened. None if it never did, or if its leader did not report it."""
    shut_at: dt.datetime | None = None
    """When its gate shut for the last time, if that was before the end of the term."""
    shut_s: float = 0.0
    """How long its gate was shut between openings; in an open term, also since it last shut."""
    nobody_since: dt.datetime | None = None
    """The last moment at which a leader before it could act: `failover_s` counts from there."""
    silent_since: dt.datetime | None = None
    """For an open term: the last heartbeat, if it is longer ago than the lease. No node leads then, and none was left
    to end the term."""


@dataclass(frozen=True, slots=True)
class Incident:
    """Terms of one node that ended together and for the same reason: a crash or a drain is one incident, however many
    roles the node led."""

    namespace: str
    node_id: str
    reason: str
    """Why the terms ended: `lost`, `evicted`, `released`, `superseded`."""
    began_at: dt.datetime
    """When the first of the terms ended."""
    ended_at: dt.datetime | None
    """When the last of the roles had a leader again; None while one of them has none."""
    roles: tuple[str, ...]
    without_leader: tuple[str, ...]
    """The roles that have no leader yet."""
    longest_s: float
    """The longest time for which one of the roles had no leader; up to now if it still has none."""
    taken_over_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot of `once`: the work of one tick, and how it ended."""

    namespace: str
    name: str
    slot: str
    state: SlotState
    """`running`: its runner is alive. `done`, `failed`: reported by its runner. `lost`: its runner is gone without
    reporting an outcome."""
    attempts: int
    """How often the work was begun."""
    node_id: str | None
    """The node of the last attempt; None if its term is no longer recorded."""
    holder_identity: str
    epoch: int
    claimed_at: dt.datetime
    """When the last attempt began."""
    age_s: float
    """The time since the last attempt began."""
    ended_at: dt.datetime | None
    """None if it is running, or if its end is not known."""
    took_s: float | None
    """The duration of the last attempt; up to now if it is running."""
    detail: str | None
    """Why it failed."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""

    event_id: int
    at: dt.datetime
    kind: str
    namespace: str
    role: str | None
    node_id: str | None
    epoch: int | None
    detail: str | None
    age_s: float


@dataclass(frozen=True, slots=True)
class RequestView:
    """An operator's request in the ledger, and its outcome."""

    request_id: int
    at: dt.datetime
    kind: str
    namespace: str
    role: str | None
    node_id: str | None
    to_node_id: str | None
    asked_by: str
    done_at: dt.datetime | None
    outcome: str | None
    """`done`, `refused` or `expired`; None while it is open."""
    detail: str | None


def as_json(view: Any) -> dict[str, Any]:
    """A value of this module as JSON types: times in UTC, ISO 8601, milliseconds."""
    return {
        field.name: _iso(value) if isinstance(value := getattr(view, field.name), dt.datetime) else value
        for field in dataclasses.fields(view)
    }


def _iso(moment: dt.datetime) -> str:
    return moment.astimezone(dt.UTC).isoformat(timespec="milliseconds")


async def ledger_facts(asks: Asks) -> LedgerFacts:
    """The ledger's facts. Raises `SchemaError`, which says what to do, if there is no ledger or this role may not read
    it."""
    (found,) = await asks.rows("history_ledger")
    if not found["present"]:
        check_schema(None)
    if not found["readable"]:
        raise SchemaError(
            "there is a ledger, not readable for this role: let its owner run `pgleaderlock migrate --grant-to ROLE`"
        )
    version = (await asks.rows("ledger_version"))[0]["version"]
    check_schema(version)
    return LedgerFacts(version, found["in_recovery"])


async def namespaces(asks: Asks, *, of_slots: bool = False, limit: int = PAGE_SIZE) -> tuple[str, ...]:
    """The namespaces that have a role, by name; or those that have a slot."""
    end = slot_namespace("")
    rows = await asks.rows("history_namespaces", of_slots=of_slots, slots_end=end, page_size=limit)
    return tuple(row["namespace"].removesuffix(end) for row in rows)


async def roles(
    asks: Asks, namespace: str, *, after: str = "", limit: int = PAGE_SIZE, with_forgotten: bool = False
) -> tuple[RoleView, ...]:
    """One page of a namespace's roles, in the database's sort order; `after` is the last name of the previous page."""
    rows = await asks.rows(
        "history_roles",
        namespace=namespace,
        role=None,
        prefix="",
        after=after,
        with_forgotten=with_forgotten,
        page_size=limit,
    )
    return tuple(role_view(row) for row in rows)


async def all_roles(asks: Asks, namespace: str, *, with_forgotten: bool = False) -> list[RoleView]:
    """Every role of a namespace, read page by page; without forgotten roles, unless `with_forgotten`."""
    found: list[RoleView] = []
    while True:
        after = found[-1].role if found else ""
        page = await roles(asks, namespace, after=after, limit=PAGE_SIZE, with_forgotten=with_forgotten)
        found += page
        if len(page) < PAGE_SIZE:
            return found


async def role(asks: Asks, namespace: str, name: str) -> RoleView | None:
    """One role; None if no node has ever led it in this ledger."""
    rows = await asks.rows(
        "history_roles", namespace=namespace, role=name, prefix="", after="", with_forgotten=True, page_size=1
    )
    return role_view(rows[0]) if rows else None


def role_view(row: Mapping[str, Any]) -> RoleView:
    """A row of `history_roles`, with the line that says why no node may act, and the command to copy."""
    why, *command = _explained(row)
    return _made(RoleView, row, why=why, command=_command(row["namespace"], *command) if command else None)


def _command(namespace: str, verb: str, *names: str) -> str:
    words = ["pgleaderlock", *verb.split(" ")]
    words += [] if namespace == DEFAULT_NAMESPACE else ["--namespace", namespace]
    words += ["--"] if any(name.startswith("-") for name in names) else []
    return shlex.join([*words, *names])


def _explained(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Why no node may act, the command that helps, and its subject; just an empty string if a node may act.

    It contains no ages, which are shown beside it, so that it changes only with the state.
    """
    node, role, before = row["node_id"], row["role"], row["prev_node_id"] or "whoever led before"
    led: Mapping[str, tuple[str, ...]] = {
        "acting": ("",),
        "forgotten": ("",),
        "waiting": (f"{node} leads, and waits until {before} can no longer act", "watch"),
        "draining": (
            f"{node} gives it up: no new work, and it waits for the end of what is in flight",
            *(("drain --work-timeout 30s", node) if _is_stuck(row) else ("nodes",)),
        ),
        "vetoed": (f"{node} leads, and its application holds the gate shut", "step-down", role),
        "late": (f"{node} was not heard in time: its gate is shut until it is heard again", "nodes"),
        "work_failed": (f"{node} leads, and is idle: its work has failed", "step-down", role),
    }
    return led.get(row["state"]) or _unled(row)


def _is_stuck(row: Mapping[str, Any]) -> bool:
    """Is this a drain of the whole node that takes long? A step-down from one role leaves the node's other roles
    alone."""
    return row["node_drains"] and (row["state_age_s"] or 0.0) >= STUCK_AFTER_S


def remedies(found: Iterable[tuple[str, str, str | None]]) -> list[tuple[list[str], str, str | None]]:
    """Groups roles with the same reason and the same command, in the order given.

    `found` has role, why no node may act for it, and the command to run next. A lost node is one reason, however many
    roles it led.
    """
    together: dict[tuple[str, str | None], list[str]] = {}
    for name, why, command in found:
        together.setdefault((why, command), []).append(name)
    return [(names, *said) for said, names in together.items()]


def _unled(row: Mapping[str, Any]) -> tuple[str, ...]:
    why, drained = _ended(row), row["drained"]
    if row["candidates"] and (row["state_age_s"] or 0.0) < TAKEN_SOON_S:
        return f"{why}; a candidate is about to take it", "watch"
    if row["candidates"]:
        return f"{why}; the live nodes that compete for it do not take it", "nodes"
    if drained:
        names = ", ".join(drained[:NAMES_SHOWN]) + (" and others" if len(drained) > NAMES_SHOWN else "")
        return f"{why}; drained, and not competing: {names}", "drain --resume", drained[0]
    if not row["nodes_live"]:
        return f"{why}; no node that would lead is alive", "nodes"
    # Only for a role that was released: the nodes of a lost role may have crashed, and must be started.
    if row["reason"] == "released" and not row["work_failed"]:
        return f"{why}; no live node competes for it: start one, or forget the role", "roles forget", row["role"]
    return f"{why}; no live node competes for it", "nodes"


def _ended(row: Mapping[str, Any]) -> str:
    """How the last term ended."""
    if row["led"]:
        return f"{row['node_id']} was not heard for longer than its lease of {row['lease_s']:g} s"
    last = row["last_node_id"]
    if last is None:
        return "its last term is not on record any more"
    if row["work_failed"]:
        return f"its work has failed on {last}, which gave it up"
    ends = {"released": f"{last} gave it up", "superseded": "its epoch was advanced by hand"}
    return ends.get(row["reason"], f"{last} was lost")


async def nodes(
    asks: Asks, namespace: str, *, heard_within_s: float = 0.0, limit: int = NODES_MAX
) -> tuple[NodeView, ...]:
    """The nodes that live or lead, by name; and those that were heard within `since_s` but no longer live."""
    rows = await asks.rows(
        "history_nodes",
        namespace=namespace,
        heard_within_s=heard_within_s,
        after_node_id="",
        after_session_id=0,
        page_size=limit,
    )
    return tuple(_made(NodeView, row, state=node_state(row)) for row in rows)


def node_state(row: Mapping[str, Any]) -> NodeState:
    """The state of a node, from a row of `history_nodes`. Every view uses this function."""
    if row["ended_at"] is not None:
        return "ended"
    if not row["live"]:
        return "silent"
    if row["draining"]:
        return "draining" if row["leads"] else "drained"
    return "alive" if row["beat"] else "starting"


async def terms(
    asks: Asks,
    namespace: str,
    name: str,
    *,
    since_s: float | None = None,
    before_epoch: int = LAST_ID,
    limit: int = PAGE_SIZE,
) -> tuple[Term, ...]:
    """One page of a role's terms, newest first; `before_epoch` is the last epoch of the previous page.

    `since_s`: only terms that were open within this many seconds. A page shorter than `limit` is the last.
    """
    rows = await asks.rows(
        "history_terms",
        namespace=namespace,
        role=name,
        since_s=_ever(since_s),
        before_epoch=before_epoch,
        to_ms=MS_MAX,
        page_size=limit,
    )
    return tuple(_made(Term, row) for row in rows)


async def all_terms(asks: Asks, namespace: str, name: str, *, since_s: float | None = None) -> AsyncIterator[Term]:
    """Every term, newest first, read page by page."""
    before_epoch = LAST_ID
    while True:
        page = await terms(asks, namespace, name, since_s=since_s, before_epoch=before_epoch, limit=PAGE_SIZE)
        for term in page:
            yield term
        if len(page) < PAGE_SIZE:
            return
        before_epoch = page[-1].epoch


async def incidents(
    asks: Asks, namespace: str, *, name: str | None = None, since: dt.datetime, until: dt.datetime | None = None
) -> list[Incident]:
    """The losses and handovers of this time, newest first; with `name`, those of one role.

    They come from the terms of `all_terms`, so that every view agrees about how long a role had no leader.
    """
    now = (await asks.rows("history_now"))[0]["now"]
    since_s = max(0.0, (now - since).total_seconds())
    rows = await asks.rows("history_changed_roles", namespace=namespace, role=name, since_s=_ever(since_s))
    ends: list[_End] = []
    for row in rows:
        found = [term async for term in all_terms(asks, namespace, row["role"], since_s=since_s)]
        of_role = _ends(found, now, forgotten=row["forgotten"])
        ends += [end for end in of_role if since <= end.at and (until is None or end.at <= until)]
    return _incidents(namespace, ends)


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a term, and the next leader."""

    role: str
    node_id: str
    reason: str
    at: dt.datetime
    gap_s: float
    next_node_id: str | None


def _ends(found: Sequence[Term], now: dt.datetime, *, forgotten: bool) -> Iterator[_End]:
    """The ends of one role's terms, newest first. A forgotten role does not count as a role without a leader."""
    if found and not forgotten and (ended_at := found[0].ended_at or found[0].silent_since) is not None:
        last, gap_s = found[0], (now - ended_at).total_seconds()
        yield _End(last.role, last.node_id, last.reason or "lost", ended_at, gap_s, None)
    for term in found:
        if term.failover_s is not None and term.prev_node_id is not None:
            at = term.nobody_since or term.began_at - dt.timedelta(seconds=term.failover_s)
            yield _End(term.role, term.prev_node_id, term.prev_reason or "lost", at, term.failover_s, term.node_id)


def _incidents(namespace: str, ends: Iterable[_End]) -> list[Incident]:
    groups: list[list[_End]] = []
    latest: dict[tuple[str, str], list[_End]] = {}
    for end in sorted(ends, key=lambda end: end.at):
        group = latest.get((end.node_id, end.reason))
        # A second end of the same role begins another incident: repeated crashes of a node are separate incidents.
        apart_s = INCIDENT_APART_S if group is None else (end.at - group[-1].at).total_seconds()
        if group is None or apart_s >= INCIDENT_APART_S or any(end.role == other.role for other in group):
            group = latest[end.node_id, end.reason] = []
            groups.append(group)
        group.append(end)
    return [_incident(namespace, group) for group in reversed(groups)]


def _incident(namespace: str, group: Sequence[_End]) -> Incident:
    open_ends = tuple(sorted(end.role for end in group if end.next_node_id is None))
    return Incident(
        namespace=namespace,
        node_id=group[0].node_id,
        reason=group[0].reason,
        began_at=group[0].at,
        ended_at=None if open_ends else max(end.at + dt.timedelta(seconds=end.gap_s) for end in group),
        roles=tuple(sorted(end.role for end in group)),
        without_leader=open_ends,
        longest_s=max(end.gap_s for end in group),
        taken_over_by=tuple(sorted({end.next_node_id for end in group if end.next_node_id is not None})),
    )


async def events(
    asks: Asks,
    namespace: str,
    *,
    name: str | None = None,
    node: str | None = None,
    since_s: float | None = None,
    before_id: int = LAST_ID,
    limit: int = PAGE_SIZE,
) -> tuple[Event, ...]:
    """One page of events (of the role `name`, of `node`), newest first; `before_id` is the last id of the previous
    page."""
    rows = await asks.rows(
        "history_events_before",
        namespace=namespace,
        role=name,
        node=node,
        since_s=_ever(since_s),
        from_ms=0,
        to_ms=MS_MAX,
        before_id=before_id,
        page_size=limit,
    )
    return tuple(_made(Event, row) for row in rows)


async def slots(asks: Asks, namespace: str, name: str | None = None, *, limit: int = PAGE_SIZE) -> tuple[SlotView, ...]:
    """The newest slots of `name`; without it, the newest slot of each name. The ledger keeps a thousand per name.

    Raises `SchemaError`, which says what to do, if this ledger has no slots yet, or if this role may not read them.
    """
    (found,) = await asks.rows("history_slots_readable")
    if not found["present"]:
        raise SchemaError("this ledger has no slots: they come with version 5, run `pgleaderlock migrate`")
    if not found["readable"]:
        raise SchemaError(
            "the slots are not readable for this role: let the owner of the ledger run "
            "`pgleaderlock migrate --grant-reader-to ROLE`"
        )
    rows = await asks.rows("history_slots", namespace=slot_namespace(namespace), slot_name=name, page_size=limit)
    return tuple(_made(SlotView, row, namespace=namespace, took_s=_took_s(row)) for row in rows)


def _took_s(row: Mapping[str, Any]) -> float | None:
    if row["ended_at"] is not None:
        took: dt.timedelta = row["ended_at"] - row["claimed_at"]
        return took.total_seconds()
    return row["age_s"] if row["state"] == "running" else None


async def request(asks: Asks, request_id: int) -> RequestView | None:
    """A request with its outcome; None if there is no such request."""
    rows = await asks.rows("history_request", request_id=request_id)
    return RequestView(**rows[0]) if rows else None


def _made(kind: type[View], row: Mapping[str, Any], **more: object) -> View:
    """A row as a value. Columns that the value does not have are ignored."""
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: row[name] for name in row if name in names}, **more)


def _ever(since_s: float | None) -> float:
    return EVER_S if since_s is None else min(since_s, EVER_S)


class EventFeed:
    """Every event once, from some moment on, across any number of connections.

    Ids are assigned before the commit, so a lower one may appear after a higher one. So the feed reads the last minute
    again each time, and leaves out the events that it has seen. It would miss an event whose commit takes longer than
    that; no transaction of the ledger does.
    """

    def __init__(self, namespace: str, name: str | None = None) -> None:
        self._namespace = namespace
        self._name = name
        self._floor: int | None = None
        """No new event up to this id will appear."""
        self._seen: set[int] = set()
        """The ids above the floor that were seen."""

    async def begin(self, asks: Asks, *, since_s: float, limit: int = PAGE_SIZE) -> list[Event]:
        """The latest events, oldest first, at most `limit`; `more` continues from here."""
        (settled,) = await asks.rows("history_settled_event", late_s=LATE_COMMIT_S)
        self._floor = settled["event_id"]
        await self.more(asks)
        wanted = await events(asks, self._namespace, name=self._name, since_s=since_s, limit=limit)
        self._seen |= {event.event_id for event in wanted if event.event_id > self._floor}
        return list(reversed(wanted))

    async def more(self, asks: Asks) -> list[Event]:
        """The events since the last call, in the order of their ids. May be empty."""
        assert self._floor is not None, "call begin first"
        fresh: list[Event] = []
        seen = set(self._seen)
        floor = after = self._floor
        while True:
            rows = await asks.rows(
                "history_events_after",
                namespace=self._namespace,
                role=self._name,
                node=None,
                after_id=after,
                from_ms=0,
                to_ms=MS_MAX,
                page_size=PAGE_SIZE,
            )
            page = [_made(Event, row) for row in rows]
            fresh += [event for event in page if event.event_id not in seen]
            seen |= {event.event_id for event in page}
            floor = max([floor, *(event.event_id for event in page if event.age_s > LATE_COMMIT_S)])
            if len(page) < PAGE_SIZE:
                break
            after = page[-1].event_id
        # Only now: if anything above fails, the next call reads these events again.
        self._floor, self._seen = floor, {number for number in seen if number > floor}
        return fresh
