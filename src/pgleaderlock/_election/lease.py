"""The ledger of an election with `hold="lease"`: the same methods as with a session, but no lock is held in between.

A session takes a lock and then begins a term. A lease first looks which roles are free. Then one message ends the
leases that have been silent for too long, takes the locks until the commit, and begins the terms. So a role that
`try_and_look` reports as granted only looked free; `bump` decides.

This node measures a holder's silence on its own clock, from the first reply that showed the holder's last beat, and
only while its own looks were answered. The silence decides when a lease may be ended. It never decides when a gate
opens: that is `opens_at`, as for sessions. The protocol is the one of the model in `tests/support/lease_model.py`.
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
    """A ledger, not opened yet, over a session or a lease as the settings say; `previous` is the session before it."""
    if setup.hold == "session":
        return Ledger(await DedicatedSession.open(setup.dsn, setup.connection()), identity, setup.channel)
    return LeaseLedger(
        LeaseSession(setup.dsn, setup.connection(), clock=clock, rng=rng), identity, setup, clock, previous
    )


@dataclass(frozen=True, slots=True)
class _Heard:
    """The last beat of a holder, and since when this node has seen it unchanged, without a gap in its looks."""

    beat: int
    silent_since: float


class LeaseLedger(Ledger):
    """The statements of one recorded lease."""

    def __init__(
        self, session: LeaseSession, identity: Identity, setup: Setup, clock: Clock, previous: int | None
    ) -> None:
        super().__init__(session, identity, setup.channel)
        self._lease = session
        self._clock = clock
        self._previous = previous
        # A longer time between two looks is a gap, and silence is counted anew. This allows for the standby's own delay
        # between its tries, and for a busy machine.
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
        """One heartbeat. `held` is ignored: no lock is held between messages, and the lease's row is the proof."""
        (row,) = await self._lease.rows(
            "lease_heartbeat", session_id=self.session_id, settled=list(settled), draining=draining
        )
        self.version = row["version"]
        requests = tuple(Request(**entry) for entry in row["requests"] or ())
        return Beat(row["roles"], int(row["epochs"]), requests, frozenset(row["settled"]))

    async def try_and_look(
        self, roles: Mapping[str, KeyPair], wanted: Collection[str], *, look_closely: bool = False
    ) -> list[Look]:
        """Look at the holders of all roles. Reports a wanted role that seems free as granted; `bump` decides."""
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
        if not rows:  # no answer: a lost lease is noticed by the next heartbeat, which is repeated until answered
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
        """Update for each holder how long it has been silent, and which leases have been for their T."""
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
        # Whether a session still holds a role is decided by its lock, which the message that takes the role tries. A
        # term of this lease that this node does not lead was begun by a message whose answer was lost: take a new term.
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

    async def rehearse(self) -> None:
        """Does nothing: a pooler may send the bump to another backend."""

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
        """Wake the other nodes. There is no lock to release: a role whose term has ended is free."""
        await self.hint("released")
        return set(roles)

    async def evict(self, look: Look) -> bool:
        """End a silent session. A silent lease is ended by the message that takes its roles, not here."""
        return look.hold == "session" and await super().evict(look)

    async def end_silent_lease(self, look: Look) -> bool:
        return False

    async def close(self) -> None:
        await self._lease.rows_or_none("ledger_close", session_id=self.session_id)
