"""The roles of one `LeaderElection`, and the reports of what becomes of them.

`Roster` holds roles and gates, `TransitionLog` writes one line per transition, `News` informs observers, log and
subscribers. The mappings of roles and gates are replaced as a whole and never changed in place, because with
`heartbeat_thread` the engine runs on another thread.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping

from pgleaderlock._base.aio import settle
from pgleaderlock._base.clock import Clock
from pgleaderlock._base.logging import StructuredLogger
from pgleaderlock._election.ledger import Look
from pgleaderlock._election.role import LeaderInfo, Role
from pgleaderlock._election.settings import Setup
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.gate import LeaderGate
from pgleaderlock.keys import KeyPair, bigint_from_key_pair
from pgleaderlock.models import LeaderStateChanged
from pgleaderlock.observer import ElectionObserver, LossReason, Observers, RoleAdded, RoleRemoved

__all__ = ["News", "Roster", "TransitionLog"]

# The most changes kept for a subscriber that does not read. Beyond that, it misses the oldest.
QUEUE_MAX = 10_000


class Roster:
    """The roles of an election, each with its gate; adds and removes them. Decides nothing about leadership."""

    def __init__(self, setup: Setup, clock: Clock) -> None:
        self.setup = setup
        self._clock = clock
        self.gates = {name: self._make_gate(name) for name in setup.keys}
        self.told = set(setup.keys)
        """The roles that were announced to observers."""
        self.begin_anew()

    def begin_anew(self) -> None:
        """The state before the first run in this process: no role is led, and no other thread runs."""
        self.roles: dict[str, Role] = {}
        """The roles of the current or last run; empty before the first."""
        self.changing = threading.RLock()  # roles are added and removed on the application's loop and on the engine's
        self._left_over: tuple[LeaderGate, ...] = ()
        self._gone: dict[str, asyncio.Future[None]] = {}

    def start(self, make: Callable[[str], Role]) -> None:
        """A run begins, with new roles."""
        self._gone = {}
        with self.changing:
            for gate in self.gates.values():
                gate.begin_anew()
            self.roles = {name: make(name) for name in self.setup.keys}

    def add(self, name: str, key: int | None, make: Callable[[str], Role] | None) -> Role | None:
        """Add a role; `make` creates its `Role` if the election runs."""
        with self.changing:
            self.setup = self.setup.with_role(name, key)
            self.gates = {**self.gates, name: self._make_gate(name)}
            if make is None:
                return None
            role = make(name)
            self.roles = {**self.roles, name: role}
            return role

    def remove(self, name: str) -> None:
        with self.changing:
            gate = self.gates[name]
            self._left_over = tuple(old for old in (*self._left_over, gate) if old.in_flight)
            self.roles = {known: role for known, role in self.roles.items() if known != name}
            self.gates = {known: gate for known, gate in self.gates.items() if known != name}
            self.told.discard(name)
            self.setup = self.setup.without_role(name)
        if (gone := self._gone.pop(name, None)) is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed, so no task waits there
                gone.get_loop().call_soon_threadsafe(settle, gone)

    def gone(self, name: str) -> "asyncio.Future[None]":
        """Resolves when the role is removed."""
        return self._gone.setdefault(name, asyncio.get_running_loop().create_future())

    def gate(self, name: str) -> LeaderGate:
        try:
            return self.gates[name]
        except (KeyError, TypeError):
            known = ", ".join(repr(name) for name in list(self.setup.keys)[:5]) or "none"
            raise ConfigurationError(f"role {name!r} is not one of this election's: it has {known}") from None

    def role(self, name: str) -> Role | None:
        """None before the first run; `ConfigurationError` if there is no such role."""
        self.gate(name)
        return self.roles.get(name)

    def named(self, name: str | None) -> list[Role]:
        """One role, or all of them."""
        names = tuple(self.setup.keys) if name is None else (name,)
        return [role for known in names if (role := self.role(known)) is not None]

    def leader(self, name: str) -> LeaderInfo | None:
        """The role's leader, as this node last saw it."""
        token, found = self.gate(name).token, self.roles.get(name)
        if token is not None:
            return LeaderInfo(name, token.epoch, token.holder_identity, self.setup.node_id, 0.0, stale=False)
        look = found.look if found is not None else None
        if found is None or look is None or look.ended or look.epoch is None:
            return None
        unchanged_s = found.unchanged_s(self._clock.now())
        threshold_s = self.setup.stale_threshold_s or look.lease_s or self.setup.lease_s
        return LeaderInfo(
            name, look.epoch, look.holder_identity, look.node_id, unchanged_s, stale=unchanged_s > threshold_s
        )

    def watched_gates(self) -> list[LeaderGate]:
        """The gates for the watchdog, including those of removed roles whose work is still in flight."""
        return [*self.gates.values(), *self._left_over]

    def _make_gate(self, name: str) -> LeaderGate:
        gate = LeaderGate(name, clock=self._clock)
        if not self.setup.enabled:
            gate.switch_off()
        return gate


# The reason logged when a gate opens again in the same term, by the reason for which it was shut.
_REOPENED = {"late_heartbeat": "heartbeat_resumed", "vetoed": "veto_lifted"}
_LOUD = ("late_heartbeat", "lost", "superseded")


class TransitionLog(ElectionObserver):
    """One log line per transition: a term begins or ends, a gate opens or closes.

    Each line has the role, its scope key, the holder, the epoch and the reason. The election reports terms, as it does
    to every observer. Gates open and shut with time alone, so they are checked whenever the election announces changes.
    """

    def __init__(self, log: StructuredLogger, keys: Callable[[], Mapping[str, KeyPair]]) -> None:
        self._keys = keys
        self.begin(log, "")

    def begin(self, log: StructuredLogger, holder_identity: str) -> None:
        """A new run of the election, under this identity."""
        self._log = log
        self._holder_identity = holder_identity
        self._open: dict[str, tuple[int | None, int]] = {}
        self._closed: dict[str, tuple[int | None, str]] = {}

    def acquired(self, role: str, epoch: int, latency_s: float, from_other: bool) -> None:
        self._transition("leadership_acquired", role, epoch, "failover" if from_other else "free")

    def lost(self, role: str, epoch: int, reason: LossReason) -> None:
        self._transition("leadership_released" if reason == "released" else "leadership_lost", role, epoch, reason)

    def role_removed(self, role: str) -> None:
        """Check the gate once more: it may have shut at the release, after the last check."""
        if (was := self._open.pop(role, None)) is not None:
            self._transition("gate_closed", role, was[0], "released")
        self._closed.pop(role, None)

    def look_at(self, gate: LeaderGate) -> None:
        """Log whether the gate has opened or shut since the last check."""
        role, epoch, shut_because = gate.role, gate.current_epoch, gate.shut_because
        was, now = self._open.get(role), (epoch, gate.lapses)
        if was is not None and (shut_because is not None or was != now):
            # It was shut and has opened again between two checks: by its deadline, or because a new term has begun.
            reason = shut_because or ("late_heartbeat" if was[0] == epoch else "lost")
            del self._open[role]
            self._closed[role] = (was[0], reason)
            self._transition("gate_closed", role, was[0], reason)
        if shut_because is None and role not in self._open:
            closed_epoch, why = self._closed.pop(role, (None, ""))
            self._open[role] = now
            self._transition(
                "gate_opened", role, epoch, _REOPENED.get(why, why) if closed_epoch == epoch else "term_began"
            )

    def _transition(self, event: str, role: str, epoch: int | None, reason: str) -> None:
        keys = self._keys().get(role)
        write = self._log.warning if reason in _LOUD else self._log.info
        write(
            event,
            role=role,
            scope_key=None if keys is None else bigint_from_key_pair(keys),
            holder_identity=self._holder_identity,
            epoch=epoch,
            reason=reason,
        )


Seen = tuple[str, bool, int | None, str | None]
"""The fields of a `LeaderStateChanged`: role, whether this node may act, epoch and holder."""


class News:
    """Reports an election to its observers, its log, and the subscribers of `changes()`.

    Observers and log are called on the engine's loop. Each subscriber has a queue on the application's loop.
    """

    def __init__(self, log: StructuredLogger, roster: Roster) -> None:
        self._roster = roster
        self.observers = Observers(log)
        self.transitions = TransitionLog(log, lambda: roster.setup.keys)
        self.observers.add(self.transitions)
        self.begin_anew()

    def begin(self, log: StructuredLogger, holder_identity: str) -> None:
        """A new run of the election, under this identity."""
        self.observers.log_to(log)
        self.transitions.begin(log, holder_identity)

    def begin_anew(self) -> None:
        """The state before the first run in this process: no subscribers, and no change reported."""
        self._known: dict[str, Seen] = {}
        self._looks = dict[str, Look | None]()
        self.queues: set[asyncio.Queue[LeaderStateChanged | None]] = set()

    def observe(self, observer: ElectionObserver) -> None:
        with self._roster.changing:
            self.observers.add(observer)
            for name in self._roster.setup.keys:
                if name in self._roster.told:
                    self.observers.notify_one(observer, RoleAdded(name))

    def forget(self, role: str) -> None:
        """The role is removed. A later role of the same name starts anew."""
        self._known.pop(role, None)
        self.observers.notify(RoleRemoved(role))

    def changed(self) -> list[LeaderStateChanged]:
        """The changes since the last call, for `tell`. Writes them to the log."""
        changed = []
        for name, gate in self._suspects():
            self.transitions.look_at(gate)
            now = self._as_seen(name, gate)
            if self._known.get(name) != now:
                self._known[name] = now
                changed.append(LeaderStateChanged(*now))
        return changed

    def _suspects(self) -> list[tuple[str, LeaderGate]]:
        """The roles that may have changed: all but those whose look is the same as at the last call, usually most.

        A role that this node leads, or has not looked at yet, has no look; its gate may open or shut with time.
        """
        looks = {name: role.look for name, role in self._roster.roles.items()}
        told, self._looks = self._looks, looks
        return [
            (name, gate)
            for name, gate in self._roster.gates.items()
            if (look := looks.get(name)) is None or told.get(name) is not look
        ]

    def _as_seen(self, name: str, gate: LeaderGate) -> Seen:
        token = gate.token
        if token is not None:
            return name, gate.is_leader, token.epoch, token.holder_identity
        found = self._roster.roles.get(name)
        look = found.look if found is not None else None
        if look is None or look.ended:
            return name, False, None, None
        return name, False, look.epoch, look.holder_identity

    def tell(self, changes: Iterable[LeaderStateChanged | None]) -> None:
        """Queue the changes for each subscriber; None ends the subscriptions."""
        for change in changes:
            for queue in self.queues:
                if queue.full():
                    queue.get_nowait()
                queue.put_nowait(change)

    async def subscribe(self) -> AsyncIterator[LeaderStateChanged]:
        queue: asyncio.Queue[LeaderStateChanged | None] = asyncio.Queue(QUEUE_MAX)
        self.queues.add(queue)
        try:
            while (change := await queue.get()) is not None:
                yield change
        finally:
            self.queues.discard(queue)
