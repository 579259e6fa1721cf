"""The ledger as an election's session sees it: records, beats, bumps and ends of terms, as frozen values.

One object per session: it is made when the session is opened and never outlives it. Every write matches session and
epoch, at the server. A write whose fate is unknown (a wait for a synchronous standby that was cancelled is only a
warning) ends the session: nobody leads on a maybe. Hints to others are statements of their own, which may fail.

Imports `_session`, `migrate` for the version, `keys`, `errors` and psycopg's rows. Knows no states and no time.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from psycopg.rows import tuple_row

from pgleaderlock._session import DedicatedSession
from pgleaderlock.errors import ConnectionError
from pgleaderlock.keys import KeyPair
from pgleaderlock.migrate import check_schema

__all__ = ["Beat", "Bump", "Identity", "Ledger", "Look", "Member", "Request", "Settled"]

EVICTION_WAIT_MS = 500
# Since which version a heartbeat says which roles it has settled, and which version the ledger has.
HEARTBEAT_VERSION = 4
# How long others leave a role alone that was given up for a certain node.
HOLD_S = 2.0
# How long a move of the balance keeps others from beginning one.
MOVE_S = 30.0
NO_HOLDER = dict.fromkeys(("beat", "holder_identity", "node_id", "lease_s", "backend_pid", "backend_start"))
# What `ledger_try_and_look` marks roles with.
GRANTED, ENDED, RESERVED, FOR_US = 1, 2, 4, 8
NEVER_OLD = GRANTED | RESERVED
# A few milliseconds' worth of rows: this is asked between two heartbeats.
PRUNE_STEP = 200

History = tuple[int, int]
Settled = tuple[int, str, str | None]
"""A request, its outcome, and what there is to say about it."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who records itself: the node, and this very process."""

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
    """What was asked of this node from afar and is not done yet, in the order in which it was asked."""
    settled: frozenset[str] = frozenset()
    """Of the roles that were named as settled, those that the ledger has taken down."""


@dataclass(frozen=True, slots=True)
class Request:
    """Something that was asked from afar: `step_down` from a role, `drain` or `resume` of the node."""

    request_id: int
    kind: str
    role: str | None
    to_node_id: str | None = None
    to_is_live: bool = False
    """Whether the node that is to lead next is there, competes, and is not drained."""


class Look(NamedTuple):
    """Who holds a role, by the ledger. `granted`: this session has just taken its lock. One a role and try."""

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
    """Somebody gave it up for another node, just now: that one goes first."""
    for_us: bool = False
    """It was given up for this very node. Only a close look tells."""
    gone: bool = False
    """The backend of the recorded holder is not there any more. Only a close look tells."""


@dataclass(frozen=True, slots=True)
class Bump:
    """What became of one won role; with outcome `won`, the new epoch and the predecessor."""

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
    """A session that shares roles with others. `moving`: some role is on its way to a certain node."""

    session_id: int
    node_id: str
    beat: int
    lease_s: float
    moving: bool


class Ledger:
    """The statements of one recorded session."""

    def __init__(self, session: DedicatedSession, identity: Identity, channel: str) -> None:
        self.session = session
        self._identity = identity
        self._channel = channel
        self.session_id = 0
        self.history: History = (0, 0)
        self._tried: Mapping[str, KeyPair] = {}
        self._tried_columns: dict[str, object] = {}
        self._seen: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        """The last answer, each row by its holder and its marks."""
        self.version = 0
        """Of the ledger: it may be upgraded while this session lasts, and each heartbeat looks."""

    async def open(
        self, *, gate_s: float, lease_s: float, candidate: bool, draining: bool = False, balance: bool = False
    ) -> None:
        """Check the ledger's version and record this session."""
        await self.session.verify()
        self.version = (await self._rows("ledger_version"))[0]["version"]
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

    async def beat(self, settled: Sequence[str], draining: bool | None = None) -> Beat:
        """Say that this node lives; `settled` names the roles whose predecessor it has just waited out.

        `draining`, if given, is what this node has decided since the last beat.
        """
        name = "ledger_heartbeat" if self.version >= HEARTBEAT_VERSION else "ledger_heartbeat_3"
        (row,) = await self._write(name, session_id=self.session_id, settled=list(settled), draining=draining)
        self.version = row["version"]
        requests = tuple(Request(**entry) for entry in row["requests"] or ())
        return Beat(row["roles"], int(row["epochs"]), requests, frozenset(row["settled"]))

    async def try_and_look(
        self, roles: Mapping[str, KeyPair], wanted: Collection[str], *, look_closely: bool = False
    ) -> list[Look]:
        """Try the locks of the wanted roles, and look at the holders of all: closely, whether they are there at all.

        Asked for the very same mapping again, it answers only with what is new, granted or reserved: of a thousand
        roles, most are what they were half a second ago.
        """
        if roles is not self._tried:
            self._tried, self._tried_columns, self._seen = roles, _columns(roles), {}
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
        return [look for row in new for look in _looks(row, names)]

    async def bump(self, roles: Mapping[str, KeyPair], *, wait_ms: int = 0) -> list[Bump]:
        """Begin terms for roles whose locks an earlier statement has taken."""
        rows = await self._write(
            "ledger_bump", session_id=self.session_id, **_columns(roles), wait_ms=wait_ms, channel=self._channel
        )
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

    async def end_terms(self, terms: Mapping[str, tuple[int, bool]], reason: str = "released") -> set[str]:
        """End terms (role → epoch, clean); answers which of them were this session's."""
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
        """Give locks back and wake the others; answers which of them had been held."""
        rows = await self._rows("ledger_unlock", **_columns(roles))
        await self.hint("released")
        return {row["role"] for row in rows if row["unlocked"]}

    async def hint(self, hint: str) -> None:
        """Wake the others. Costs them a tick if it is lost, and this session nothing if the server refuses it."""
        await self.session.rows_or_none("ledger_hint", channel=self._channel, hint=hint)

    async def owned(self) -> dict[str, int]:
        """Role → epoch of what this session leads by the ledger."""
        return {row["role"]: row["epoch"] for row in await self._rows("ledger_owned", session_id=self.session_id)}

    async def evict(self, look: Look) -> bool:
        """End a recorded session that has fallen silent; True if it was there and is gone."""
        rows = await self._rows(
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

    async def settle_requests(self, settled: Sequence[Settled]) -> None:
        """Write down what became of requests: `done` or `refused`. One statement: a heartbeat waits behind it."""
        if settled:
            await self._write(
                "ledger_settle_requests",
                session_id=self.session_id,
                request_ids=[request_id for request_id, _, _ in settled],
                outcomes=[outcome for _, outcome, _ in settled],
                details=[detail for _, _, detail in settled],
            )

    async def reserve(self, request_ids: Sequence[int]) -> None:
        """What these asked for is about to be free: the nodes that they name go first."""
        await self._write("ledger_reserve", session_id=self.session_id, request_ids=list(request_ids))

    async def note_drain(self, kind: str, details: Mapping[str, str | None]) -> None:
        """For people: a drain of these roles began or ended."""
        await self._rows(
            "ledger_note_drain",
            session_id=self.session_id,
            kind=kind,
            roles=list(details),
            details=list(details.values()),
        )

    async def members(self) -> list[Member]:
        """Who shares the roles out, this session among them."""
        rows = await self._rows("ledger_members", namespace=self._identity.namespace, move_s=MOVE_S)
        return [Member(**row) for row in rows]

    async def ask_step_down(self, role: str, to_node_id: str) -> bool:
        """Ask the leader of a role, which may be ourselves, to hand it over; False if nobody leads it."""
        (row,) = await self._write(
            "ledger_request_step_down",
            role=role,
            namespace=self._identity.namespace,
            to_node_id=to_node_id,
            channel=self._channel,
        )
        await self.hint("requested")
        return row["request_id"] is not None

    async def prune(self, keep_s: float) -> bool:
        """Delete a little of what is too old; True if there may be more."""
        # An old row is worth no term: what the server refuses here (a timeout, a missing grant) costs nothing.
        rows = await self.session.rows_or_none(
            "ledger_prune", namespace=self._identity.namespace, keep_s=keep_s, step=PRUNE_STEP
        )
        return bool(rows and rows[0]["pruned"] >= PRUNE_STEP)

    async def close(self) -> None:
        """Say goodbye: the record ends with the session, and not at some later look."""
        await self._rows("ledger_close", session_id=self.session_id)

    async def _rows(self, name: str, **params: object) -> list[dict[str, Any]]:
        return await self.session.rows(name, **params)

    async def _write(self, name: str, **params: object) -> list[dict[str, Any]]:
        rows = await self.session.rows(name, **params)
        if self.session.doubts:
            doubts = "; ".join(self.session.doubts)
            await self.session.close()
            raise ConnectionError(f"the server warned while writing, so the outcome is unknown: {doubts}")
        return rows


def _looks(row: tuple[Any, ...], names: Sequence[str]) -> Iterator[Look]:
    """One row of the answer is about all roles of one holder that share their marks, each as `place:epoch`."""
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
            # A record that is not there any more: it ended long ago, and was cleaned up.
            **(holder or NO_HOLDER),
        )


def _columns(roles: Mapping[str, KeyPair]) -> dict[str, object]:
    """As literals of arrays: a thousand roles twice a second, and the driver looks at each element several times."""
    return {
        "roles": "{" + ",".join(map(_quoted, roles)) + "}",
        "key1": "{" + ",".join([str(key1) for key1, _ in roles.values()]) + "}",
        "key2": "{" + ",".join([str(key2) for _, key2 in roles.values()]) + "}",
    }


def _quoted(name: str) -> str:
    """An element of an array's literal, whatever is in it."""
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
