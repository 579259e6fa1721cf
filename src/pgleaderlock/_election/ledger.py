"""The statements that an election's session sends to the ledger, one method each, with frozen values as answers.

There is one object per session; it never outlives the session. Every write matches session and epoch at the server. A
write whose outcome is unknown ends the session, because no term may depend on it (PostgreSQL reports a cancelled wait
for a synchronous standby as a mere warning). Hints to other nodes are separate statements, which may fail.

It knows neither the states of a role nor the time.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, overload

from psycopg.rows import BaseRowFactory, tuple_row

from pgleaderlock._pg.explain import moved_error
from pgleaderlock.errors import ConnectionError
from pgleaderlock.keys import KeyPair
from pgleaderlock.migrate import check_schema

__all__ = ["Beat", "Bump", "Identity", "Ledger", "Look", "Member", "Request", "Settled"]

EVICTION_WAIT_MS = 500
# How long the other nodes leave a role alone that was given up in favour of one node.
HOLD_S = 2.0
# How long a balancing move that is under way keeps other nodes from beginning one.
MOVE_S = 30.0
NO_HOLDER = dict.fromkeys(("beat", "holder_identity", "node_id", "lease_s", "backend_pid", "backend_start"))
# The marks in the rows of `ledger_try_and_look`.
GRANTED, ENDED, RESERVED, FOR_US, OTHER_KEY = 1, 2, 4, 8, 16
NEVER_OLD = GRANTED | RESERVED
# The first version of the ledger that records gates and the roles that a node competes for.
GATES_VERSION = 5
# Rows per step: few enough to take a few milliseconds, because this runs between two heartbeats.
PRUNE_STEP = 200
# The first version of the ledger that has leases.
LEASES_SINCE = 5

Row = TypeVar("Row")
History = tuple[int, int]
Settled = tuple[int, str, str | None]
"""The id of a request, its outcome, and a detail for people."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The node and the process that the ledger records."""

    namespace: str
    instance: str
    node_id: str
    host: str
    os_pid: int
    holder_identity: str
    library_version: str


@dataclass(frozen=True, slots=True)
class Beat:
    """The answer to a heartbeat."""

    roles: int
    epochs: int
    requests: tuple["Request", ...]
    """The open requests to this node, oldest first."""
    settled: frozenset[str] = frozenset()
    """The roles that the ledger has recorded as settled, of those that the heartbeat named."""


@dataclass(frozen=True, slots=True)
class Request:
    """What an operator or the balance asks of a node: `step_down` from a role, `drain` or `resume` of the node."""

    request_id: int
    kind: str
    role: str | None
    to_node_id: str | None = None
    to_is_live: bool = False
    """Whether the node that should lead next (`to_node_id`) is live, competes, and is not drained."""


class Look(NamedTuple):
    """Who holds a role according to the ledger; one per role and try. `granted`: this session just took its lock."""

    role: str
    granted: bool
    epoch: int | None
    session_id: int | None
    beat: int | None
    ended: bool
    holder_identity: str | None
    node_id: str | None
    lease_s: float | None
    backend_pid: int | None
    backend_start: str | None
    reserved: bool = False
    """The role has just been given up in favour of another node: leave it to that node for `HOLD_S`."""
    for_us: bool = False
    """The role was given up in favour of this node. Set by a close look only."""
    gone: bool = False
    """The backend of the recorded holder has ended, or its lease. Set by a close look and by a lease's look only."""
    hold: str = "session"
    """How the holder holds it: by a session or a lease. Set by a lease's look only."""
    other_key: bool = False
    """The role is recorded under another key than this node's: their two locks do not exclude each other."""


@dataclass(frozen=True, slots=True)
class Bump:
    """The result of a bump for one role; with outcome `won`, the new epoch and the predecessor."""

    role: str
    outcome: str
    epoch: int | None
    history: History | None
    prev_session_id: int | None
    prev_beat: int | None
    prev_wait_t: float | None
    prev_clean: bool | None
    prev_instance: str | None


@dataclass(frozen=True, slots=True)
class Member:
    """A session of a node that balances. `moving`: a request to move a role to some node is open."""

    session_id: int
    node_id: str
    beat: int
    lease_s: float
    moving: bool


class Session(Protocol):
    """What sends the statements: a dedicated session, or a lease in its place."""

    doubts: list[str]
    """Warnings of the last statement after which it is unknown whether its commit is durable."""

    @overload
    async def rows(self, name: str, /, **params: object) -> list[dict[str, Any]]: ...

    @overload
    async def rows(self, name: str, row_factory: BaseRowFactory[Row], /, **params: object) -> list[Row]: ...

    async def rows_or_none(self, name: str, /, **params: object) -> list[dict[str, Any]]: ...

    async def verify(self) -> None: ...

    async def wait(self, keys: KeyPair, wait_s: float) -> bool: ...

    async def lost(self) -> ConnectionError: ...

    async def close(self) -> None: ...


class Ledger:
    """The statements of one recorded session."""

    def __init__(self, session: Session, identity: Identity, channel: str) -> None:
        self.session = session
        self._identity = identity
        self._channel = channel
        self.session_id = 0
        self.history: History = (0, 0)
        self._tried: Mapping[str, KeyPair] = {}
        self._tried_columns: dict[str, object] = {}
        self._seen: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        """The rows of the last answer, by holder and marks."""
        self.version = 0
        """The ledger's version. Each heartbeat reads it, because the ledger may be upgraded during this session."""
        self.unanswered: str | None = None
        """Why the last look got no answer. A session without an answer has ended; a lease goes on."""
        self.silent_at = float("inf")
        """When the next of the known leases will have been silent for its T: a look is due then."""

    @property
    def records_gates(self) -> bool:
        return self.version >= GATES_VERSION

    async def open(
        self, *, gate_s: float, lease_s: float, candidate: bool, draining: bool = False, balance: bool = False
    ) -> None:
        """Check the ledger's version and record this session."""
        await self.session.verify()
        self.version = (await self.session.rows("ledger_version"))[0]["version"]
        check_schema(self.version)
        me = self._identity
        (row,) = await self._write(
            "ledger_open",
            draining=draining,
            balance=balance,
            namespace=me.namespace,
            instance=me.instance,
            node_id=me.node_id,
            host=me.host,
            os_pid=me.os_pid,
            holder_identity=me.holder_identity,
            library_version=me.library_version,
            gate_s=gate_s,
            lease_s=lease_s,
            candidate=candidate,
        )
        self.session_id = row["session_id"]
        self.history = (row["system_identifier"], row["timeline"])
        await self.session.rows("ledger_prepare_heartbeat")

    async def beat(self, settled: Sequence[str], draining: bool | None = None, held: KeyPair | None = None) -> Beat:
        """One heartbeat; `settled` names the roles whose predecessor this node has just waited out.

        `draining`, if given, tells the ledger that this node was drained or resumed since the last beat. `held` is a
        lock of this session: the heartbeat fails unless the backend that took it still has it.
        """
        key1, key2 = held or (None, None)
        params = {"session_id": self.session_id, "settled": list(settled), "draining": draining}
        (row,) = await self.session.rows("ledger_heartbeat", **params, key1=key1, key2=key2)
        if not row["proven"]:
            await self.session.close()
            raise moved_error()
        await self._check_doubts()
        self.version = row["version"]
        requests = tuple(Request(**entry) for entry in row["requests"] or ())
        return Beat(row["roles"], int(row["epochs"]), requests, frozenset(row["settled"]))

    async def try_and_look(
        self, roles: Mapping[str, KeyPair], wanted: Collection[str], *, look_closely: bool = False
    ) -> list[Look]:
        """Try the locks of the wanted roles, and look at the holders of all; a close look also checks their backends.

        When called again with the same mapping object, it returns only looks that are new, granted or reserved: of a
        thousand roles, most have not changed since the last call.
        """
        if roles is not self._tried:
            self._tried, self._tried_columns, self._seen = roles, columns(roles), {}
        rows = await self.session.rows(
            "ledger_try_and_look_closely" if look_closely else "ledger_try_and_look",
            tuple_row,
            node_id=self._identity.node_id,
            hold_s=HOLD_S,
            namespace=self._identity.namespace,
            **self._tried_columns,
            wanted="{" + ",".join(["t" if role in wanted else "f" for role in roles]) + "}",
        )
        seen, self._seen = self._seen, {row[:2]: row for row in rows}
        names = list(roles)
        new = [row for row in rows if row[1] & NEVER_OLD or seen.get(row[:2]) != row]
        return [look for row in new for look in looks(row, names)]

    async def bump(self, roles: Mapping[str, KeyPair], *, wait_ms: int = 0) -> list[Bump]:
        """Begin terms for roles whose locks an earlier statement took."""
        rows = await self._write(
            "ledger_bump", session_id=self.session_id, **columns(roles), wait_ms=wait_ms, channel=self._channel
        )
        return bumped(rows)

    async def rehearse(self) -> None:
        """Have the server compile and plan the bump now, and not when a leader is missing: at the first call in a
        session, that takes longer than the rest of a takeover."""
        await self.session.rows("ledger_rehearse", session_id=self.session_id, channel=self._channel)

    async def end_terms(self, terms: Mapping[str, tuple[int, bool]], reason: str = "released") -> set[str]:
        """End terms (role → epoch, clean); returns the roles whose term was this session's."""
        rows = await self._write(
            "ledger_end_term",
            session_id=self.session_id,
            roles=list(terms),
            epochs=[epoch for epoch, _ in terms.values()],
            clean=[clean for _, clean in terms.values()],
            reason=reason,
        )
        return {row["role"] for row in rows}

    async def unlock(self, roles: Mapping[str, KeyPair]) -> set[str]:
        """Release locks and wake the other nodes; returns the roles whose lock this session held."""
        rows = await self.session.rows("ledger_unlock", **columns(roles))
        await self.hint("released")
        return {row["role"] for row in rows if row["unlocked"]}

    async def hint(self, hint: str) -> None:
        """Wake the other nodes. If the hint is lost, they notice at their next tick; if it is refused, the session goes
        on."""
        await self.session.rows_or_none("ledger_hint", channel=self._channel, hint=hint)

    async def owned(self) -> dict[str, int]:
        """Role → epoch of the terms that this session leads according to the ledger."""
        return {
            row["role"]: row["epoch"] for row in await self.session.rows("ledger_owned", session_id=self.session_id)
        }

    async def evict(self, look: Look) -> bool:
        """End the backend of a recorded session that is silent; True if it existed and has ended."""
        rows = await self.session.rows(
            "ledger_evict",
            evicted_session_id=look.session_id,
            system_identifier=self.history[0],
            timeline=self.history[1],
            wait_ms=EVICTION_WAIT_MS,
        )
        ended = bool(rows and rows[0]["ended"])
        if ended:
            await self._write("ledger_note_eviction", session_id=self.session_id, evicted_session_id=look.session_id)
        return ended

    async def end_silent_lease(self, look: Look) -> bool:
        """End a silent lease unless it has sent a beat since `look`; True if it existed and has ended."""
        if self.version < LEASES_SINCE:
            return False
        rows = await self._write(
            "lease_end_silent", session_id=self.session_id, silent=[look.session_id], beats=[look.beat]
        )
        return bool(rows)

    async def settle_requests(self, settled: Sequence[Settled]) -> None:
        """Record the outcome of requests: `done` or `refused`. One statement, because a heartbeat waits behind it."""
        if settled:
            await self._write(
                "ledger_settle_requests",
                session_id=self.session_id,
                request_ids=[request_id for request_id, _, _ in settled],
                outcomes=[outcome for _, outcome, _ in settled],
                details=[detail for _, _, detail in settled],
            )

    async def work_timeout_s(self, request_id: int) -> float | None:
        """How long an operator lets a drain wait for the work; None if that is not limited."""
        rows = await self.session.rows("ledger_work_timeout", request_id=request_id)
        limit_s: float | None = rows[0]["work_timeout_s"] if rows else None
        return limit_s

    async def reserve(self, request_ids: Sequence[int]) -> None:
        """Reserve the roles of these requests, which are about to be free, for the nodes that the requests name."""
        await self._write("ledger_reserve", session_id=self.session_id, request_ids=list(request_ids))

    async def note_drain(self, kind: str, details: Mapping[str, str | None]) -> None:
        """Record, for people, that a drain of these roles began or ended."""
        await self.session.rows(
            "ledger_note_drain",
            session_id=self.session_id,
            kind=kind,
            roles=list(details),
            details=list(details.values()),
        )

    async def members(self) -> list[Member]:
        """The sessions that balance, this one among them."""
        rows = await self.session.rows("ledger_members", namespace=self._identity.namespace, move_s=MOVE_S)
        return [Member(**row) for row in rows]

    async def namesakes(self, own: Sequence[str]) -> list[str]:
        """Other live processes with this node's name, as `host/pid`; `own` are the instances of this process."""
        rows = await self.session.rows_or_none("ledger_namesakes", session_id=self.session_id, own=list(own))
        return [f"{row['host']}/{row['os_pid']}" for row in rows]

    async def ask_step_down(self, role: str, to_node_id: str) -> bool:
        """Ask the leader of a role, which may be this node, to hand it over; False if no node leads it."""
        (row,) = await self._write(
            "ledger_request_step_down",
            role=role,
            namespace=self._identity.namespace,
            to_node_id=to_node_id,
            channel=self._channel,
        )
        await self.hint("requested")
        return row["request_id"] is not None

    async def report_gates(self, reports: Sequence[Mapping[str, object]]) -> dict[str, float | None]:
        """Record, for people, the state of the gates of these terms. Returns the roles recorded; none if refused.

        The value of a role whose gate has just opened for the first time is how long no node could act before; None for
        the first term of a role.
        """
        rows = await self.session.rows_or_none(
            "ledger_report_gates", session_id=self.session_id, reports=json.dumps(reports)
        )
        return {row["role"]: row["failover_s"] for row in rows}

    async def declare_roles(self, roles: Sequence[str]) -> bool:
        """Record, for people, which roles this session competes for. False if refused; the session goes on."""
        rows = await self.session.rows_or_none(
            "ledger_declare_roles", session_id=self.session_id, roles="{" + ",".join(map(_quoted, roles)) + "}"
        )
        return bool(rows)

    async def prune(self, keep_s: float) -> bool:
        """Delete some of the history that is too old; True if there may be more."""
        # Pruning must not end a session: an error of the server (a timeout, a missing grant) is ignored.
        rows = await self.session.rows_or_none(
            "ledger_prune", namespace=self._identity.namespace, keep_s=keep_s, step=PRUNE_STEP
        )
        return bool(rows and rows[0]["pruned"] >= PRUNE_STEP)

    async def close(self) -> None:
        """Close the session's record now, so that other nodes need not find out that it has ended."""
        await self.session.rows("ledger_close", session_id=self.session_id)

    async def _write(self, name: str, **params: object) -> list[dict[str, Any]]:
        rows = await self.session.rows(name, **params)
        await self._check_doubts()
        return rows

    async def _check_doubts(self) -> None:
        if self.session.doubts:
            doubts = "; ".join(self.session.doubts)
            await self.session.close()
            raise ConnectionError(f"the server warned while writing, so the outcome is unknown: {doubts}")


def bumped(rows: Sequence[Mapping[str, Any]]) -> list[Bump]:
    return [
        Bump(
            role=row["role"],
            outcome=row["outcome"],
            epoch=row["epoch"],
            history=None if row["timeline"] is None else (row["system_identifier"], row["timeline"]),
            prev_session_id=row["prev_session_id"],
            prev_beat=row["prev_beat"],
            prev_wait_t=row["prev_wait_t"],
            prev_clean=row["prev_clean"],
            prev_instance=None if row["prev_instance"] is None else str(row["prev_instance"]),
        )
        for row in rows
    ]


def looks(row: tuple[Any, ...], names: Sequence[str]) -> Iterator[Look]:
    """The looks of one row, which covers all roles of one holder with the same marks, each as `place:epoch`."""
    session_id, marks, roles, holder = row
    for role in roles.split(" "):
        place, _, epoch = role.partition(":")
        yield Look(
            role=names[int(place) - 1],
            granted=bool(marks & GRANTED),
            epoch=int(epoch) if epoch else None,
            session_id=session_id,
            ended=bool(marks & ENDED),
            reserved=bool(marks & RESERVED),
            for_us=bool(marks & FOR_US),
            other_key=bool(marks & OTHER_KEY),
            # There is no holder when its record has been pruned.
            **(holder or NO_HOLDER),
        )


def columns(roles: Mapping[str, KeyPair]) -> dict[str, object]:
    """The columns as array literals: psycopg's adaptation of lists is too slow for 1000 roles twice per second."""
    return {
        "roles": "{" + ",".join(map(_quoted, roles)) + "}",
        "key1": "{" + ",".join([str(key1) for key1, _ in roles.values()]) + "}",
        "key2": "{" + ",".join([str(key2) for _, key2 in roles.values()]) + "}",
    }


def _quoted(name: str) -> str:
    """The name as an element of an array literal, with its special characters escaped."""
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
