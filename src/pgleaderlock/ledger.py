"""The ledger as an election's session sees it: records, beats, bumps and ends of terms, as frozen values.

One object a session: it is made when the session is opened and never outlives it. Every write matches session and
epoch, at the server. A WARNING on a write means that its fate is unknown (a wait for a synchronous standby that was
cancelled is only a warning), and then the session ends: nobody leads on a maybe.

Imports `_session`, `migrate` for the version, `keys`, `errors` and the standard library. Knows no states and no time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pgleaderlock._session import DedicatedSession
from pgleaderlock.errors import ConnectionError
from pgleaderlock.keys import KeyPair
from pgleaderlock.migrate import check_schema

__all__ = ["Beat", "Bump", "Identity", "Ledger", "Look"]

EVICTION_WAIT_MS = 500

History = tuple[int, int]


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
    requests: tuple[tuple[int, str], ...]
    """Step-downs that were asked from afar: request and role."""


@dataclass(frozen=True, slots=True)
class Look:
    """Who holds a role, by the ledger. `granted`: this session has just taken its lock."""

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


class Ledger:
    """The statements of one recorded session."""

    def __init__(self, session: DedicatedSession, identity: Identity, channel: str) -> None:
        self.session = session
        self._identity = identity
        self._channel = channel
        self.session_id = 0
        self.history: History = (0, 0)

    async def open(self, *, gate_s: float, lease_s: float, candidate: bool) -> None:
        """Check the ledger's version and record this session."""
        await self.session.verify()
        version = (await self._rows("ledger_version"))[0]["version"]
        check_schema(version)
        me = self._identity
        (row,) = await self._write(
            "ledger_open",
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

    async def beat(self, settled: Sequence[str]) -> Beat:
        """Say that this node lives; `settled` names the roles whose predecessor it has just waited out."""
        (row,) = await self._write("ledger_beat", session_id=self.session_id, settled=list(settled))
        asked = tuple((entry["request_id"], entry["role"]) for entry in row["requests"] or ())
        return Beat(row["roles"], int(row["epochs"]), asked)

    async def try_and_look(self, roles: Mapping[str, KeyPair], wanted: Mapping[str, bool]) -> list[Look]:
        """Try the locks of the wanted roles, and look at the holders of all."""
        rows = await self._rows(
            "ledger_try_and_look",
            namespace=self._identity.namespace,
            **_columns(roles),
            wanted=[wanted[role] for role in roles],
        )
        return [
            Look(
                role=row["role"],
                granted=row["granted"],
                epoch=row["epoch"],
                session_id=row["session_id"],
                beat=row["beat"],
                ended=row["ended"] is not False,
                holder_identity=row["holder_identity"],
                node_id=row["node_id"],
                lease_s=row["lease_s"],
                backend_pid=row["backend_pid"],
                backend_start=row["backend_start"],
            )
            for row in rows
        ]

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
        rows = await self._rows("ledger_unlock", **_columns(roles), channel=self._channel)
        return {row["role"] for row in rows if row["unlocked"]}

    async def owned(self) -> dict[str, int]:
        """Role → epoch of what this session leads by the ledger."""
        return {row["role"]: row["epoch"] for row in await self._rows("ledger_owned", session_id=self.session_id)}

    async def evict(self, look: Look) -> bool:
        """End a recorded session that has fallen silent; True if it was there and is gone."""
        rows = await self._rows(
            "ledger_evict",
            backend_pid=look.backend_pid,
            backend_start=look.backend_start,
            wait_ms=EVICTION_WAIT_MS,
        )
        ended = bool(rows and rows[0]["ended"])
        if ended:
            await self._write("ledger_note_eviction", session_id=self.session_id, evicted_session_id=look.session_id)
        return ended

    async def finish_request(self, request_id: int) -> None:
        await self._write("ledger_finish_request", session_id=self.session_id, request_id=request_id)

    async def close(self) -> None:
        """Say goodbye: the record ends with the session, and not at some later look."""
        await self._rows("ledger_close", session_id=self.session_id)

    async def _rows(self, name: str, **params: object) -> list[dict[str, Any]]:
        return await self.session.rows(name, **params)

    async def _write(self, name: str, **params: object) -> list[dict[str, Any]]:
        rows = await self.session.rows(name, **params)
        if self.session.warnings:
            warning = "; ".join(self.session.warnings)
            await self.session.close()
            raise ConnectionError(f"the server warned while writing, so the outcome is unknown: {warning}")
        return rows


def _columns(roles: Mapping[str, KeyPair]) -> dict[str, object]:
    return {
        "roles": list(roles),
        "key1": [key1 for key1, _ in roles.values()],
        "key2": [key2 for _, key2 in roles.values()],
    }
