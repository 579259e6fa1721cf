"""The ledger of an election that holds by a lease: the same questions as those of a session, and nothing held anywhere.

A session takes a lock and then begins a term. A lease looks which roles are free, and takes those in one message: it
ends what has fallen silent, gets the locks until the commit, and begins the terms. So what `try_and_look` reports as
granted only looked free, and `bump` decides.

Silence is counted on this node's own clock, from the first reply that showed the holder's beat, and only over time in
which this node's own looks were answered. It decides when a lease is ended, and never when a gate opens: that is
`opens_at`, as for sessions. The protocol is the one of the model in `tests/support/lease_model.py`.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg.rows import dict_row, tuple_row

from pgleaderlock._base.clock import Clock
from pgleaderlock._election.ledger import (
    HOLD_S,
    LEASES_SINCE,
    NEVER_OLD,
    Beat,
    Bump,
    Identity,
    Ledger,
    Look,
    Request,
    bumped,
    columns,
    looks,
)
from pgleaderlock._election.settings import Setup
from pgleaderlock._pg.lease import LeaseSession
from pgleaderlock._pg.session import DedicatedSession
from pgleaderlock.errors import SchemaError
from pgleaderlock.keys import KeyPair
from pgleaderlock.migrate import check_schema

__all__ = ["LeaseLedger", "connected"]


async def connected(
    setup: Setup, identity: Identity, *, clock: Clock, rng: random.Random, previous: int | None
) -> Ledger:
    """A ledger that is not open yet, of the kind that the settings ask for; `previous` is the session before it."""
    if setup.hold == "session":
        return Ledger(await DedicatedSession.open(setup.dsn, setup.connection()), identity, setup.channel)
    return LeaseLedger(
        LeaseSession(setup.dsn, setup.connection(), clock=clock, rng=rng), identity, setup, clock, previous
    )


@dataclass(frozen=True, slots=True)
class _Heard:
    """The last beat of a holder, and since when it has been silent."""

    beat: int
    silent_since: float


class LeaseLedger(Ledger):
    """The messages of one recorded lease."""

    def __init__(
        self, session: LeaseSession, identity: Identity, setup: Setup, clock: Clock, previous: int | None
    ) -> None:
        super().__init__(session, identity, setup.channel)
        self._lease = session
        self._clock = clock
        self._previous = previous
        # Between two looks there is a pause of the standby's own, and a busy machine: no gap in what it has heard.
        self._gap_s = max(setup.heartbeat_interval_s, 2 * setup.acquire_delay_s[1], setup.lease_s / 3)
        self._looked_at = float("-inf")
        self._heard: dict[int, _Heard] = {}
        self._silent: dict[int, int] = {}
        """The leases that have been silent for their T, each with its last beat."""

    async def open(
        self, *, gate_s: float, lease_s: float, candidate: bool, draining: bool = False, balance: bool = False
    ) -> None:
        self.version = (await self._lease.rows("ledger_version"))[0]["version"]
        check_schema(self.version)
        if self.version < LEASES_SINCE:
            raise SchemaError(
                f"the ledger's version is {self.version}, and hold=lease needs {LEASES_SINCE}: "
                "run `pgleaderlock migrate`"
            )
        me = self._identity
        (row,) = await self._lease.rows(
            "lease_open",
            key=self._lease.key,
            previous=self._previous,
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
            draining=draining,
        )
        self.session_id = row["session_id"]
        self.history = (row["system_identifier"], row["timeline"])
        self._lease.recorded()

    async def beat(self, settled: Sequence[str], draining: bool | None = None, held: KeyPair | None = None) -> Beat:
        """One heartbeat. No lock is held that could prove anything: the row does."""
        (row,) = await self._lease.rows(
            "lease_heartbeat", session_id=self.session_id, settled=list(settled), draining=draining
        )
        self.version = row["version"]
        requests = tuple(Request(**entry) for entry in row["requests"] or ())
        return Beat(row["roles"], int(row["epochs"]), requests, frozenset(row["settled"]))

    async def try_and_look(
        self, roles: Mapping[str, KeyPair], wanted: Collection[str], *, look_closely: bool = False
    ) -> list[Look]:
        """Look at the holders of all roles; a wanted role that seems free is reported as granted."""
        if roles is not self._tried:
            self._tried, self._tried_columns, self._seen = roles, columns(roles), {}
        rows = await self._lease.rows_if_answered(
            "lease_look",
            tuple_row,
            namespace=self._identity.namespace,
            node_id=self._identity.node_id,
            hold_s=HOLD_S,
            **self._tried_columns,
        )
        self.unanswered = self._lease.unanswered
        if not rows:  # no answer: the next heartbeat asks until there is one
            return []
        self._listen(rows)
        names = list(roles)
        seen, self._seen = self._seen, {row[:2]: row for row in rows}
        found = []
        for row in rows:
            new = bool(row[1] & NEVER_OLD) or seen.get(row[:2]) != row
            for look in looks(row, names):
                free = look.role in wanted and self._seems_free(look)
                if free or new:
                    found.append(look._replace(granted=free))
        return found

    def _listen(self, rows: list[tuple[Any, ...]]) -> None:
        """Who has been heard since the last look, and who has been silent for too long."""
        now = self._clock.now()
        unbroken, self._looked_at = now - self._looked_at <= self._gap_s, now
        heard, self._heard, self._silent, self.silent_at = self._heard, {}, {}, float("inf")
        for session_id, _, _, holder in rows:
            if holder is None:
                continue
            known = heard.get(session_id)
            if known is None or known.beat != holder["beat"] or not unbroken:
                known = _Heard(holder["beat"], now)
            self._heard[session_id] = known
            leased = holder["hold"] == "lease" and not holder["gone"] and session_id != self.session_id
            silent_at = known.silent_since + holder["lease_s"]
            if leased and now >= silent_at:
                self._silent[session_id] = known.beat
            elif leased:
                self.silent_at = min(self.silent_at, silent_at)

    def _seems_free(self, look: Look) -> bool:
        if look.reserved:
            return False
        # Of a session, the lock tells; it is tried by the message that takes. A term of this lease that this node does
        # not lead was begun by a message whose answer was lost: it is followed by a new one.
        mine = look.session_id == self.session_id
        return look.ended or look.beat is None or look.gone or mine or look.hold == "session" or self._is_silent(look)

    def _is_silent(self, look: Look) -> bool:
        return look.session_id in self._silent

    async def bump(self, roles: Mapping[str, KeyPair], *, wait_ms: int = 0) -> list[Bump]:
        rows = await self._lease.rows(
            "ledger_bump",
            dict_row,
            "lease_end_silent",
            "lease_lock",
            session_id=self.session_id,
            silent=list(self._silent),
            beats=list(self._silent.values()),
            **columns(roles),
            wait_ms=wait_ms,
            channel=self._channel,
        )
        return bumped(rows)

    async def end_terms(self, terms: Mapping[str, tuple[int, bool]], reason: str = "released") -> set[str]:
        ended = await super().end_terms(terms, reason)
        if self._lease.asked_again and ended != terms.keys():
            rows = await self._lease.rows(
                "lease_ended",
                session_id=self.session_id,
                roles=list(terms),
                epochs=[epoch for epoch, _ in terms.values()],
                reason=reason,
            )
            ended |= {row["role"] for row in rows}
        return ended

    async def unlock(self, roles: Mapping[str, KeyPair]) -> set[str]:
        """There is no lock to release: a term that has ended is free."""
        await self.hint("released")
        return set(roles)

    async def evict(self, look: Look) -> bool:
        """A silent session is ended as by any node; a silent lease by the message that takes its roles."""
        return look.hold == "session" and await super().evict(look)

    async def end_silent_lease(self, look: Look) -> bool:
        return False

    async def close(self) -> None:
        await self._lease.rows_or_none("ledger_close", session_id=self.session_id)
