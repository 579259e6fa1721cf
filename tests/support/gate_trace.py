"""Records what real elections do, as a history that `spec/GateTrace.tla` can judge.

Up to three nodes of one role, each on a thread and a loop of its own, on a real server. `Recorder` watches the ledger's
statements and the engine's decisions; `Traced` runs the nodes, ends their sessions, blocks their loops, makes them hand
the role over, and loses answers.

What changes the ledger is noted before it is sent, and what a node has seen of it after the answer, by one clock for
all nodes. So the record of a change comes before the record of a node that has seen it. Imports pgleaderlock, pytest,
`background`, `elections`, `election_storm` and the standard library.
"""

import asyncio
import contextlib
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from pgleaderlock import LeaderElection
from pgleaderlock._base.clock import BOOT_CLOCK
from pgleaderlock._election import engine as _engine
from pgleaderlock._election import releasing
from pgleaderlock._election import winning as _winning
from pgleaderlock._election.ledger import Beat, Bump, Ledger, Look
from pgleaderlock._election.role import Role, opens_at
from pgleaderlock.errors import ConnectionError
from support.background import Background
from support.election_storm import end_sessions_of
from support.elections import admin, until

__all__ = ["NAMES", "ROLE", "Recorder", "Traced", "plant_own_by_session"]

NAMES = ("a", "b", "c")
"""As in `GateTrace.cfg`."""
SETTINGS: dict[str, Any] = {
    "heartbeat_interval_s": 0.3,
    "acquire_delay_s": (0.03, 0.06),
    "listen_channel": None,
    # As in `Recorded` of GateTrace.tla.
    "late_threshold_s": 1.0,
    "session_lease_s": 1.5,
}
ROLE = "traced"
FAULTS = ("end", "deafen", "block", "step_down", "step_down", "lose")
STATEMENTS = ("bump", "beat", "end_terms")
"""Whose answers get lost, after the commit."""

MOMENTS = ("opens", "deadline")
"""Fields that are moments on the boot-time clock."""


class Event(NamedTuple):
    """What one node sent or heard, and when, on the boot-time clock."""

    at: float
    node: str
    action: str
    fields: Mapping[str, float]
    session_id: int


class Recorder:
    """Patches the ledger and the engine, and notes what passes through them, for as long as the patches last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[Event] = []
        self.lost: Counter[str] = Counter()
        """How often the answer to each statement was lost."""
        self.session_of: dict[str, int] = {}
        """By instance: the session of its last bump."""
        self._to_lose: set[tuple[str, str]] = set()
        self._leads: set[str] = set()
        self._patch = monkeypatch
        self._watch_ledger()
        self._watch_engine()

    def lose(self, node: str, statement: str) -> None:
        """Let the answer to this node's next statement of this kind be lost."""
        self._to_lose.add((node, statement))

    def epochs(self) -> list[int]:
        return [int(event.fields["epoch"]) for event in list(self.events) if event.action == "bumped"]

    # --- What is noted

    def _note(self, node: str, action: str, ledger: Ledger | None, at: float | None = None, **fields: float) -> None:
        session_id = ledger.session_id if ledger is not None else 0
        self.events.append(Event(BOOT_CLOCK.now() if at is None else at, node, action, fields, session_id))

    def _watch_ledger(self) -> None:
        async def opened(real: Callable[..., Awaitable[None]], ledger: Ledger, **options: Any) -> None:
            await real(ledger, **options)
            self._note(_node(ledger), "open", ledger)

        async def tried(
            real: Callable[..., Awaitable[list[Look]]], ledger: Ledger, *args: Any, **options: Any
        ) -> list[Look]:
            looks = await real(ledger, *args, **options)
            for look in looks:
                if look.granted or look.session_id is not None:
                    self._note(_node(ledger), "won" if look.granted else "look", ledger)
            return looks

        async def bumped(
            real: Callable[..., Awaitable[list[Bump]]], ledger: Ledger, *args: Any, **options: Any
        ) -> list[Bump]:
            self._note(_node(ledger), "bump", ledger)
            self.session_of[ledger._identity.instance] = ledger.session_id
            heard: list[Bump] = await self._or_lost("bump", ledger, real(ledger, *args, **options))
            return heard

        async def beaten(real: Callable[..., Awaitable[Any]], ledger: Ledger, settled: Any, *args: Any) -> Any:
            if _node(ledger) in self._leads:
                self._note(_node(ledger), "beat", ledger, settled=bool(settled))
            return await self._or_lost("beat", ledger, real(ledger, settled, *args))

        async def ended(
            real: Callable[..., Awaitable[Any]], ledger: Ledger, terms: Mapping[str, tuple[int, bool]], *args: Any
        ) -> Any:
            # Told to drain while its gate was shut, a node may have had an answer since that would have opened it.
            self._note(_node(ledger), "drain", ledger)
            self._note(_node(ledger), "end", ledger, clean=all(clean for _, clean in terms.values()))
            return await self._or_lost("end_terms", ledger, real(ledger, terms, *args))

        for name, watch in (
            ("open", opened), ("try_and_look", tried), ("bump", bumped), ("beat", beaten), ("end_terms", ended),
        ):  # fmt: skip
            self._wrap(Ledger, name, watch)

    async def _or_lost(self, statement: str, ledger: Ledger, answer: Awaitable[Any]) -> Any:
        heard = await answer
        if (_node(ledger), statement) in self._to_lose:
            self._to_lose.discard((_node(ledger), statement))
            self.lost[statement] += 1
            await ledger.session.close()
            raise ConnectionError(f"the answer to {statement} was lost")
        return heard

    def _watch_engine(self) -> None:
        def began(real: Callable[..., None], winning: _winning.Winning, role: Role, bump: Bump, *args: float) -> None:
            real(winning, role, bump, *args)
            won_at, gate = args[-1], role.gate
            ledger, node = winning._board.ledger, winning._identity.node_id
            assert bump.epoch is not None
            moments = {"opens": gate.opens_at, "deadline": gate.deadline}
            self._note(node, "bumped", ledger, won_at, epoch=bump.epoch, **moments)

        async def beat(real: Callable[..., Awaitable[Beat]], engine: _engine.Engine) -> Beat:
            node = engine._identity.node_id
            led = engine._board.led()
            (self._leads.add if led else self._leads.discard)(node)
            answer = await real(engine)
            for role in led:
                self._note(node, "beaten", engine._board.ledger, deadline=role.gate.deadline)
            return answer

        async def lost(real: Callable[..., Awaitable[None]], engine: _engine.Engine, error: Exception) -> None:
            node, ledger = engine._identity.node_id, engine._board.ledger
            if ledger is not None:
                self._note(node, "lost", ledger)
            await real(engine, error)
            if not any(role.gate.in_flight for role in engine._board.roles.values()):
                self._note(node, "quiet", ledger)

        def drained(real: Callable[..., None], releases: releasing.Releases, role: Role) -> None:
            real(releases, role)
            self._note(releases._board.identity.node_id, "drain", releases._board.ledger)

        self._wrap(_winning.Winning, "_begin_term", began)
        self._wrap(_engine.Engine, "_beat", beat)
        self._wrap(_engine.Engine, "_lose", lost)
        self._wrap(releasing.Releases, "_begin", drained)

    def _wrap(self, owner: type, name: str, watch: Callable[..., Any]) -> None:
        real = getattr(owner, name)
        self._patch.setattr(owner, name, lambda self, *args, **options: watch(real, self, *args, **options))


def _node(ledger: Ledger) -> str:
    return ledger._identity.node_id


def _without_vain_wins(events: Sequence[Event], terms: Mapping[int, int]) -> list[Event]:
    """Without the locks that were won by a session which had ended before its node heard of it.

    Another node may have won by then. Such a session has no more terms in the ledger than its node has heard of.
    """
    heard = Counter(event.session_id for event in events if event.action == "bumped")
    won: Counter[int] = Counter()
    kept = []
    for event in events:
        session_id = event.session_id
        won[session_id] += event.action == "won"
        vain = won[session_id] > max(heard[session_id], terms.get(session_id, 0))
        if not (vain and event.action in ("won", "bump")):
            kept.append(event)
    return kept


def _record(event: Event, began_at: float) -> str:
    """In milliseconds. All moments are rounded down, and only then subtracted: so an error does not add up."""

    def ms(moment: float) -> int:
        return math.floor((moment - began_at) * 1000)

    fields = {"t": str(ms(event.at)), "n": event.node, "a": f'"{event.action}"'}
    for name, value in event.fields.items():
        fields[name] = str(ms(value) - ms(event.at)) if name in MOMENTS else str(value).upper()
    return "[" + ", ".join(f"{name} |-> {text}" for name, text in fields.items()) + "]"


def plant_own_by_session(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    """Let a process know its own last term by the session again, as it did before the epoch decided."""
    last: dict[str, int] = {}

    def by_session(role: Role, bump: Bump, won_at: float, *, own_instance: str) -> float:
        if bump.epoch is not None and last.get(own_instance) == bump.prev_session_id:
            role.heard_epoch = bump.epoch - 1
        last[own_instance] = recorder.session_of[own_instance]
        return opens_at(role, bump, won_at, own_instance=own_instance)

    monkeypatch.setattr(_winning, "opens_at", by_session)


class Traced:
    """Nodes on threads, and what goes wrong with them."""

    def __init__(self, dsn: str, recorder: Recorder, seed: int = 0) -> None:
        self.dsn, self.recorder = dsn, recorder
        self.rng = random.Random(seed)
        self.elections: dict[str, LeaderElection] = {}
        self._loops: dict[str, Background] = {}

    @contextlib.contextmanager
    def node(self, name: str) -> Iterator[LeaderElection]:
        loop = self._loops[name] = Background()
        try:
            election = self.elections[name] = LeaderElection(self.dsn, ROLE, node_id=name, **SETTINGS)
            with loop.within(election):
                yield election
        finally:
            loop.close()

    def leader(self) -> str | None:
        return next((name for name, election in self.elections.items() if election.gate(ROLE).is_leader), None)

    async def leads(self, name: str) -> None:
        await until(lambda: self.leader() == name, f"node {name} to lead")

    async def at(self, name: str, work: Coroutine[Any, Any, object]) -> None:
        """Run it on this node's loop."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loops[name].loop))

    def block(self, name: str, wait: Callable[..., object], *args: object) -> None:
        """Let this node's loop stand still: it hears nothing, and its gate goes by the clock alone."""
        self._loops[name].loop.call_soon_threadsafe(wait, *args)

    async def end_session(self, name: str) -> None:
        await end_sessions_of(self.dsn, name)

    async def storm(self, faults: int) -> None:
        """So many faults against whoever leads, each while the one before may still be in force."""
        for _ in range(faults):
            await until(self.leader, "a leader")
            await asyncio.sleep(self.rng.uniform(0, 0.6))
            name = self.leader() or self.rng.choice(NAMES)
            await self._fault(self.rng.choice(FAULTS), name)

    async def _fault(self, kind: str, name: str) -> None:
        if kind == "deafen":
            self.block(name, time.sleep, self.rng.uniform(0.2, 0.8))
        elif kind == "block":
            self.block(name, time.sleep, self.rng.uniform(0.5, 2.0))
        elif kind == "step_down":
            await self.at(name, self.elections[name].step_down(ROLE))
        elif kind == "lose":
            self.recorder.lose(self.rng.choice(NAMES), self.rng.choice(STATEMENTS))
        if kind in ("end", "deafen", "lose"):
            await self.end_session(name)

    def history(self) -> str:
        """What has happened so far, as a module of TLA+."""
        events = sorted(self.recorder.events, key=lambda event: event.at)
        with admin(self.dsn) as conn:
            rows = conn.execute(
                "SELECT session_id, count(*) AS n FROM pgleaderlock.terms WHERE role = %s GROUP BY session_id", (ROLE,)
            ).fetchall()
        events = _without_vain_wins(events, {row["session_id"]: row["n"] for row in rows})
        lines = ",\n".join("  " + _record(event, events[0].at) for event in events)
        names = ", ".join(NAMES)
        return f"---- MODULE History ----\nEXTENDS Integers\nCONSTANTS {names}\nHistory == <<\n{lines}\n>>\n====\n"
