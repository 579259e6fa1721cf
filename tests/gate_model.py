"""The gate protocol as a model that runs: does at most one gate of a role act at a time?

Three nodes with different settings (G, T, heartbeat) and clocks of different rates; pauses, cuts, lost and late
messages, crashes of the database, dropped sessions, clean and unclean releases; and sometimes a node that was given
another key for the role, so that its lock excludes nobody. The judge looks at real time only: no action of an older
epoch after one of a newer epoch. Change this model before the protocol.

    python3 gate_model.py [schedules] [rule ...]

`protocol` must show no overlap; each of the others breaks one rule and must show some:
    no_wait       the successor opens at once
    wait_g        it waits G instead of T (no margin for clock rates)
    no_chain      it waits only its direct predecessor's T, not the longest T of the unsettled chain
    early_clean   a release counts as clean although the releaser was itself still waiting
    from_reply    the gate's deadline is anchored at the reply instead of before the send
    seen_at_send  "first seen" is anchored before the poll's send instead of after its reply
    stale_read    the winning statement reads the predecessor's beat under a snapshot taken before the grant
    own_blind     a process that follows itself opens at once, although it was itself still waiting
    two_keys      who holds the lock of another key wins, although the lock of the recorded one is held

Imports the standard library only.
"""

import heapq
import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["BROKEN", "Outcome", "run"]

BROKEN = (
    "no_wait", "wait_g", "no_chain", "early_clean", "from_reply", "seen_at_send", "stale_read", "own_blind", "two_keys",
)  # fmt: skip
SETTINGS = ((6.0, 7.0, 3.0), (2.0, 3.0, 1.0), (12.0, 13.5, 6.0))  # G, T, heartbeat interval
RATES = (1.0, 1.04, 1 / 1.04)  # fastest / slowest stays below the smallest T / G
END_S = 240.0
NEVER = 1e9
PAUSES_S = (1.0, 4.0, 6.5, 8.0, 15.0)
KEYS = (1, 1, 1, 2)


class Outcome(NamedTuple):
    """What one schedule came to."""

    overlaps: int
    actions: int
    terms: int


class Seen(NamedTuple):
    """The predecessor as a reply shows it."""

    session: int
    beat: int | None
    wait_t: float
    own_t: float
    clean: bool


@dataclass
class Row:
    """What the winner writes into the role's row."""

    session: int
    own_t: float
    wait_t: float
    key: int
    clean: bool = False


@dataclass
class Node:
    number: int
    rate: float
    offset: float
    gate_s: float
    lease_s: float
    beat_s: float
    key: int
    session: int = 0
    epoch: int = 0
    opens_at: float = NEVER
    """On this node's clock, as the deadline and `first_seen`."""
    deadline: float = -NEVER
    seen: tuple[int, int | None] | None = None
    first_seen: float = 0.0
    mine: set[int] = field(default_factory=set)
    last_opens_at: float = NEVER
    paused_until: float = 0.0
    cut_until: float = 0.0

    def clock(self, t: float) -> float:
        return self.offset + self.rate * t

    def settled(self, t: float) -> bool:
        return self.opens_at <= self.clock(t)


@dataclass
class Held:
    """A lock, and the session that holds it."""

    by: tuple[int, int]
    """Node and session."""
    idle_since: float
    lease_s: float


@dataclass
class Database:
    """One role: who holds its lock, under each of its keys, and the row that the winner writes."""

    locks: dict[int, Held] = field(default_factory=dict)
    epoch: int = 0
    sessions: int = 0
    row: Row | None = None
    beats: dict[int, int] = field(default_factory=dict)
    past: list[tuple[float, dict[int, int]]] = field(default_factory=list)
    """What the beats were at which time: for stale reads."""

    def drop_idle(self, t: float) -> None:
        self.locks = {key: held for key, held in self.locks.items() if t - held.idle_since < held.lease_s}

    def held_by(self, node: Node, session: int) -> bool:
        held = self.locks.get(node.key)
        return held is not None and held.by == (node.number, session)

    def may_win(self, node: Node, rule: str) -> bool:
        """The lock of its own key is free; and if the role is recorded under another, nobody holds that one."""
        if node.key in self.locks:
            return False
        return self.row is None or self.row.key not in self.locks or rule == "two_keys"


class Schedule:
    """One run of the protocol, or of a variant of it, with everything that happens drawn from a seed."""

    def __init__(self, seed: int, rule: str) -> None:
        self.rule = rule
        self.rnd = rnd = random.Random(seed)
        self.events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self.order = itertools.count()
        self.nodes = [
            Node(i, rnd.choice(RATES), rnd.uniform(0, 1e4), *rnd.choice(SETTINGS), rnd.choice(KEYS)) for i in range(3)
        ]
        self.db = Database()
        self.acts: list[int] = []

    def run(self, end_s: float) -> Outcome:
        for node in self.nodes:
            self.at(self.rnd.random(), self.tick, node)
            self.at(self.rnd.random(), self.act, node)
        self.at(5.0, self.fault)
        while self.events[0][0] < end_s:
            t, _, call, args = heapq.heappop(self.events)
            call(t, *args)
        overlaps = sum(before > after for before, after in itertools.pairwise(self.acts))
        return Outcome(overlaps, len(self.acts), self.db.epoch)

    # --- Time and the network

    def at(self, t: float, call: Callable[..., None], *args: object) -> None:
        heapq.heappush(self.events, (t, next(self.order), call, args))

    def delay(self) -> float:
        """Mostly quick, sometimes very late."""
        return self.rnd.expovariate(20) if self.rnd.random() < 0.9 else self.rnd.expovariate(0.7)

    def to_db(self, node: Node, t: float, call: Callable[..., None], *args: object) -> None:
        if t >= node.cut_until and self.rnd.random() > 0.02:
            self.at(t + self.delay(), call, node, *args)

    def to_node(self, node: Node, t: float, call: Callable[..., None], *args: object) -> None:
        if t >= node.cut_until and self.rnd.random() > 0.02:
            self.at(max(t + self.delay(), node.paused_until), call, node, *args)

    # --- A node's tick: a heartbeat when it leads, a try when it does not

    def tick(self, t: float, node: Node) -> None:
        if t < node.paused_until:
            self.at(node.paused_until, self.tick, node)
            return
        if node.session:
            self.to_db(node, t, self.db_beat, node.clock(t), node.session, node.settled(t))
            pause_s = node.beat_s * self.rnd.uniform(0.8, 1.2)
        else:
            self.to_db(node, t, self.db_try, node.clock(t))
            pause_s = self.rnd.uniform(0.2, 0.8)
        self.at(t + pause_s / node.rate, self.tick, node)

    def db_beat(self, t: float, node: Node, sent: float, session: int, settled: bool) -> None:
        db = self.db
        db.drop_idle(t)
        alive = db.held_by(node, session)
        if alive:
            db.beats[session] += 1
            db.locks[node.key].idle_since = t
            db.past.append((t, dict(db.beats)))
            if settled and db.row is not None and db.row.session == session:
                db.row.wait_t = node.lease_s  # the predecessor has been waited out: the chain ends here
        self.to_node(node, t, self.got_beat, sent, session, alive)

    def got_beat(self, t: float, node: Node, sent: float, session: int, alive: bool) -> None:
        if node.session != session:
            return
        if alive:
            node.deadline = max(node.deadline, self.anchor(node, t, sent) + node.gate_s)
        else:
            node.session, node.deadline = 0, -NEVER

    def anchor(self, node: Node, t: float, sent: float) -> float:
        return node.clock(t) if self.rule == "from_reply" else sent

    # --- Winning

    def db_try(self, t: float, node: Node, sent: float) -> None:
        db = self.db
        db.drop_idle(t)
        beats, row, won = db.beats, db.row, None
        wins = db.may_win(node, self.rule)
        if self.rule == "stale_read" and wins:
            older = [then for when, then in db.past if when <= t - self.rnd.uniform(0, 1)]
            beats = older[-1] if older else beats
        before = row and Seen(row.session, beats.get(row.session), row.wait_t, row.own_t, row.clean)
        if wins:
            db.sessions += 1
            db.epoch += 1
            db.locks[node.key] = Held((node.number, db.sessions), t, node.lease_s)
            inherited = row.wait_t if row is not None and not row.clean else 0.0
            db.row = Row(db.sessions, node.lease_s, max(node.lease_s, inherited), node.key)
            db.beats[db.sessions] = 1
            db.past.append((t, dict(db.beats)))
            won = (db.sessions, db.epoch)
        self.to_node(node, t, self.got_try, sent, before, won)

    def got_try(self, t: float, node: Node, sent: float, before: Seen | None, won: tuple[int, int] | None) -> None:
        if node.session:
            return
        if before is not None and (before.session, before.beat) != node.seen:
            node.seen = (before.session, before.beat)
            node.first_seen = sent if self.rule == "seen_at_send" else node.clock(t)
        if won is None:
            return
        node.session, node.epoch = won
        node.mine.add(node.session)
        node.deadline = self.anchor(node, t, sent) + node.gate_s
        node.opens_at = node.last_opens_at = self.opens_at(t, node, before)
        node.seen, node.first_seen = (node.session, 1), node.clock(t)

    def opens_at(self, t: float, node: Node, before: Seen | None) -> float:
        now = node.clock(t)
        if before is None or before.clean or self.rule == "no_wait":
            return now
        if before.session in node.mine:
            # Its own gate has been shut since: only what it was itself waiting for remains.
            return now if self.rule == "own_blind" else max(now, node.last_opens_at)
        wait_s = {"wait_g": before.wait_t - 1.0, "no_chain": before.own_t}.get(self.rule, before.wait_t)
        return node.first_seen + wait_s

    # --- Acting, giving up, and what goes wrong

    def act(self, t: float, node: Node) -> None:
        if t >= node.paused_until and node.epoch and node.opens_at <= node.clock(t) < node.deadline:
            self.acts.append(node.epoch)
        self.at(t + self.rnd.expovariate(8), self.act, node)

    def db_release(self, t: float, node: Node, session: int, clean: bool) -> None:
        db = self.db
        db.drop_idle(t)
        if db.held_by(node, session) and db.row is not None:
            del db.locks[node.key]
            if db.row.session == session:
                db.row.clean = clean

    def fault(self, t: float) -> None:
        kind = self.rnd.choice(("pause", "cut", "crash", "drop", "release"))
        node = self.rnd.choice(self.nodes)
        if kind == "pause":
            node.paused_until = t + self.rnd.choice(PAUSES_S) * self.rnd.uniform(0.8, 1.2)
        elif kind == "cut":
            node.cut_until = t + self.rnd.uniform(1, 20)
        elif kind in ("crash", "drop"):
            self.db.locks.clear()
        elif node.session and t >= node.paused_until:
            clean = node.settled(t) or self.rule == "early_clean"
            session, node.session, node.deadline, node.opens_at = node.session, 0, -NEVER, NEVER
            self.to_db(node, t, self.db_release, session, clean)
        self.at(t + self.rnd.expovariate(1 / 6), self.fault)


def run(seed: int, rule: str = "protocol", end_s: float = END_S) -> Outcome:
    """One schedule: its overlaps, actions and terms."""
    return Schedule(seed, rule).run(end_s)


def _main(arguments: list[str]) -> None:
    total = int(arguments[0]) if arguments else 500
    for rule in arguments[1:] or ["protocol", *BROKEN]:
        outcomes = [run(seed, rule) for seed in range(total)]
        first = next((seed for seed, outcome in enumerate(outcomes) if outcome.overlaps), None)
        print(  # noqa: T201
            f"{rule:13s} schedules with an overlap: {sum(outcome.overlaps > 0 for outcome in outcomes)} of {total}"
            f" (first {first}); actions {sum(outcome.actions for outcome in outcomes)},"
            f" terms {sum(outcome.terms for outcome in outcomes)}",
            flush=True,
        )


if __name__ == "__main__":
    _main(sys.argv[1:])
