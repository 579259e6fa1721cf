"""The gate protocol as a model that runs: does at most one gate of a role act at a time?

Three nodes with different settings (G, T, heartbeat) and clocks of different rates, two roles, one session per node.
Pauses, cuts, broken connections, lost and late messages, sessions that the server ends, clean and unclean releases,
crashes of the database, and failovers to a standby that lacks the last commits. A node may have been given another key
for the roles, so that its locks exclude nobody. The judge looks at the real order of events only: no action of an older
term after one of a newer term of the same role, and no epoch that is not higher than all before. Change this model
before the protocol.

    python3 gate_model.py [schedules] [rule ...]

`protocol` must show no violation; each of the others breaks one rule and must show some:
    no_wait       the successor opens at once
    wait_g        it waits G instead of T (no margin for clock rates)
    no_chain      it waits only its direct predecessor's T, not the longest T of the unsettled chain
    early_clean   a release counts as clean although the releaser was itself still waiting
    from_reply    the gate's deadline is anchored at the reply instead of before the send
    seen_at_send  "first seen" is anchored before the look's send instead of after its reply
    stale_read    the predecessor's beat is read by the statement that wins, whose snapshot is older than the grant
    bump_no_beat  a bump does not count as a beat: a look at the session's earlier term passes for one at this term
    settle_all    a beat settles every role of its session, not only those whose predecessor was waited out
    own_blind     a process that follows itself opens at once, although it was itself still waiting
    own_session   it knows its own last term by the session instead of the epoch
    two_keys      who holds the lock of another key wins, although the lock of the recorded one is held
    clean_of_other_history  a clean mark from before a failover is believed
    wait_of_other_history   after a failover only the wait_t of the row is waited, not the longest T on record
    new_role_of_other_history  a role without a row opens at once, though its first term may have been lost just now
    no_jump       the first epoch after a failover is the next one, though it may have been issued and lost

A failover can lose the last LAG_S_MAX seconds, but not every record of a node's T: a ledger that has never heard of it
cannot make anybody wait for it.

Imports the standard library only.
"""

import heapq
import itertools
import random
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

__all__ = ["BROKEN", "Outcome", "run"]

BROKEN = (
    "no_wait", "wait_g", "no_chain", "early_clean", "from_reply", "seen_at_send", "stale_read", "bump_no_beat",
    "settle_all", "own_blind", "own_session", "two_keys", "clean_of_other_history", "wait_of_other_history",
    "new_role_of_other_history", "no_jump",
)  # fmt: skip
ROLES = ("bills", "mail")
SETTINGS = ((6.0, 7.0, 3.0), (2.0, 3.0, 1.0), (12.0, 13.5, 6.0))  # G, T, heartbeat interval
GATE_S = {lease_s: gate_s for gate_s, lease_s, _ in SETTINGS}
RATES = (1.0, 1.04, 1 / 1.04)  # fastest / slowest stays below the smallest T / G
END_S = 240.0
NEVER = 1e9
PAUSES_S = (1.0, 4.0, 6.5, 8.0, 15.0)
KEYS = (1, 1, 1, 2)
FAULTS = ("pause", "cut", "crash", "release", "release", "release", "trouble")
LAG_S_MAX = 8.0
JUMP = 1000
"""How far the epoch jumps after a failover: more terms than LAG_S_MAX can lose."""


class Outcome(NamedTuple):
    """What one schedule came to."""

    overlaps: int
    """Actions of an older term after one of a newer term."""
    reissued: int
    """Epochs that were not higher than all that the role had before."""
    actions: int
    terms: int

    @property
    def violated(self) -> bool:
        return self.overlaps + self.reissued > 0


# --- The server


@dataclass(eq=False)
class Session:
    """A connection, and the number under which it is on record: after a failover, a number may be given out again."""

    number: int
    lease_s: float
    idle_since: float


class Record(NamedTuple):
    """What the ledger keeps of a session."""

    beat: int
    lease_s: float


@dataclass(frozen=True)
class Row:
    """A role's last term."""

    epoch: int
    node: int
    session: int
    own_t: float
    wait_t: float
    key: int
    history: int
    clean: bool = False


class Ledger(NamedTuple):
    """What is committed. Never changed in place, so that an older state can be read, and returned to."""

    rows: Mapping[str, Row] = {}
    records: Mapping[int, Record] = {}

    def beat_of(self, session: int) -> int:
        record = self.records.get(session)
        return record.beat if record is not None else 0

    def beaten(self, session: int) -> "Ledger":
        record = self.records[session]
        return self._replace(records={**self.records, session: record._replace(beat=record.beat + 1)})

    def written(self, role: str, row: Row) -> "Ledger":
        return self._replace(rows={**self.rows, role: row})


class Seen(NamedTuple):
    """A role's holder, as a look shows it, under which history of the database."""

    session: int
    beat: int
    history: int


class Grant(NamedTuple):
    """A term, as the bump answers it."""

    epoch: int
    order: int
    """Its place in the real order of terms: for the judge, unknown to everybody else."""
    history: int
    before: Row | None
    beat_before: int
    wait_s: float
    """How long the successor of `before` has to wait."""


class Database:
    """Sessions, locks and the ledger. A statement changes them at one moment."""

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self.history = 1
        self.history_since: float | None = 0.0
        """When the ledger was first used in this history; None until then."""
        self.sessions: set[Session] = set()
        self.locks: dict[tuple[str, int], Session] = {}
        self.ledger = Ledger()
        self.past: list[tuple[float, Ledger]] = [(0.0, self.ledger)]
        self.order = itertools.count(1)
        self.issued = dict.fromkeys(ROLES, 0)
        self.reissued = 0

    def commit(self, t: float, ledger: Ledger) -> None:
        self.ledger = ledger
        self.past.append((t, ledger))

    def at(self, t: float) -> Ledger:
        """What was committed then."""
        return next((ledger for when, ledger in reversed(self.past) if when <= t), self.past[0][1])

    def end(self, sessions: Collection[Session]) -> None:
        self.sessions.difference_update(sessions)
        self.locks = {lock: session for lock, session in self.locks.items() if session in self.sessions}

    def end_idle(self, t: float) -> None:
        self.end([session for session in self.sessions if t - session.idle_since >= session.lease_s])

    def fail_over(self, lost_since: float) -> None:
        """Another server takes over that lacks what was committed since; from here on, history is another one."""
        self.end(list(self.sessions))
        self.ledger = self.at(lost_since)
        self.past = [(lost_since, self.ledger)]
        self.history += 1
        self.history_since = None

    # --- The statements

    def open(self, t: float, lease_s: float) -> Session:
        self.history_since = t if self.history_since is None else self.history_since
        number = max(self.ledger.records, default=0) + 1
        session = Session(number, lease_s, t)
        self.sessions.add(session)
        self.commit(t, self.ledger._replace(records={**self.ledger.records, number: Record(1, lease_s)}))
        return session

    def beat(self, t: float, session: Session, settled: Collection[str]) -> None:
        ledger = self.ledger.beaten(session.number)
        for role in ROLES if self.rule == "settle_all" else settled:
            row = ledger.rows.get(role)
            if row is not None and row.session == session.number:
                ledger = ledger.written(role, replace(row, wait_t=session.lease_s))  # the chain ends here
        self.commit(t, ledger)

    def try_and_look(
        self, t: float, session: Session, roles: Collection[str], key: int, stale_s: float
    ) -> tuple[set[str], dict[str, Seen]]:
        """Take the locks that are free, and look at the holders."""
        granted = {role for role in roles if (role, key) not in self.locks}
        self.locks.update({(role, key): session for role in granted})
        ledger = self.at(t - stale_s) if granted and self.rule == "stale_read" else self.ledger
        return granted, {
            role: Seen(row.session, ledger.beat_of(row.session), self.history) for role, row in ledger.rows.items()
        }

    def _led_under_another_key(self, role: str, key: int) -> bool:
        """The role is recorded under another key, and somebody holds that lock: the two locks exclude nobody."""
        row = self.ledger.rows.get(role)
        return row is not None and row.key != key and (role, row.key) in self.locks and self.rule != "two_keys"

    def bump(self, t: float, session: Session, node: int, roles: Collection[str], key: int) -> dict[str, Grant]:
        """Begin terms: read each predecessor, and write the row anew. It counts as a beat."""
        ledger = self.ledger if self.rule == "bump_no_beat" else self.ledger.beaten(session.number)
        grants = {}
        for role in roles:
            if self._led_under_another_key(role, key):
                del self.locks[role, key]
                continue
            before = ledger.rows.get(role)
            wait_s, inherited_s = self._waits(t, before, session.lease_s)
            epoch = self._next_epoch(role, before)
            beat_before = self.ledger.beat_of(before.session) if before is not None else 0
            grants[role] = Grant(epoch, next(self.order), self.history, before, beat_before, wait_s)
            wait_t = max(session.lease_s, inherited_s)
            row = Row(epoch, node, session.number, session.lease_s, wait_t, key, self.history)
            ledger = ledger.written(role, row)
        self.commit(t, ledger)
        return grants

    def _waits(self, t: float, before: Row | None, lease_s: float) -> tuple[float, float]:
        """How long this winner has to wait for those before it, and how much of that its own row has to say."""
        longest_s = max(lease_s, *(record.lease_s for record in self.ledger.records.values()))
        if before is None:
            # Its first term may have been lost with another history, and act for that long after the failover.
            assert self.history_since is not None
            young = self.history > 1 and t < self.history_since + longest_s
            wait_s = longest_s if young and self.rule != "new_role_of_other_history" else 0.0
            return wait_s, wait_s
        if before.history != self.history:
            # Terms after this row may have been lost, and with them how long they could act.
            wait_s = before.wait_t if self.rule == "wait_of_other_history" else max(before.wait_t, longest_s)
            return wait_s, wait_s
        wait_s = {"wait_g": GATE_S[before.wait_t], "no_chain": before.own_t}.get(self.rule, before.wait_t)
        return wait_s, 0.0 if before.clean else before.wait_t

    def _next_epoch(self, role: str, before: Row | None) -> int:
        """One more; in another history, one jump for each failover since the row was written."""
        if before is None:
            epoch = 1 if self.rule == "no_jump" else JUMP * (self.history - 1) + 1
        else:
            failovers = 0 if self.rule == "no_jump" else self.history - before.history
            epoch = before.epoch + (JUMP * failovers or 1)
        self.reissued += epoch <= self.issued[role]
        self.issued[role] = max(self.issued[role], epoch)
        return epoch

    def release(self, t: float, session: Session, roles: Mapping[str, bool]) -> None:
        """End terms, each clean or not, then give their locks back."""
        ledger = self.ledger
        for role, clean in roles.items():
            row = ledger.rows[role]
            if row.session == session.number:
                ledger = ledger.written(role, replace(row, clean=clean))
        self.commit(t, ledger)
        self.locks = {lock: by for lock, by in self.locks.items() if by is not session or lock[0] not in roles}


# --- A node


@dataclass
class Term:
    """A term that this node has heard of. Times are on the node's clock."""

    epoch: int
    order: int
    session: int
    opens_at: float
    deadline: float


@dataclass
class Node:
    number: int
    rate: float
    offset: float
    gate_s: float
    lease_s: float
    beat_s: float
    key: int
    session: Session | None = None
    waiting_for: int = 0
    """The statement under way: one at a time."""
    beat_due_at: float = 0.0
    terms: dict[str, Term] = field(default_factory=dict)
    last: dict[str, Term] = field(default_factory=dict)
    """The last term of each role that it has heard of, over or not."""
    sights: dict[str, tuple[Seen, float]] = field(default_factory=dict)
    """Each role's holder, and when this node first saw it like that."""
    to_release: set[str] = field(default_factory=set)
    paused_until: float = 0.0
    cut_until: float = 0.0

    def clock(self, t: float) -> float:
        return self.offset + self.rate * t


class Statement(NamedTuple):
    """A request on its way, and what is called with its answer."""

    number: int
    node: Node
    session: Session | None
    sent: float
    """On the node's clock."""
    execute: Callable[..., object]
    got: Callable[..., None]
    args: tuple[object, ...]


class Schedule:
    """One run of the protocol, or of a variant of it, with everything that happens drawn from a seed."""

    def __init__(self, seed: int, rule: str) -> None:
        self.rule = rule
        self.rnd = rnd = random.Random(seed)
        self.events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self.order = itertools.count(1)
        self.nodes = [
            Node(i, rnd.choice(RATES), rnd.uniform(0, 1e4), *rnd.choice(SETTINGS), rnd.choice(KEYS)) for i in range(3)
        ]
        self.db = Database(rule)
        self.acts: dict[str, list[int]] = {role: [] for role in ROLES}

    def run(self, end_s: float) -> Outcome:
        for node in self.nodes:
            self.db.open(0.0, node.lease_s)  # of an earlier run: every T is on record
            self.at(self.rnd.random(), self.tick, node)
            self.at(self.rnd.random(), self.act, node)
        self.at(5.0, self.fault)
        while self.events[0][0] < end_s:
            t, _, call, args = heapq.heappop(self.events)
            call(t, *args)
        overlaps = sum(a > b for orders in self.acts.values() for a, b in itertools.pairwise(orders))
        return Outcome(overlaps, self.db.reissued, sum(map(len, self.acts.values())), next(self.db.order) - 1)

    # --- Time and the network

    def at(self, t: float, call: Callable[..., None], *args: object) -> None:
        heapq.heappush(self.events, (t, next(self.order), call, args))

    def delay(self) -> float:
        """Mostly quick, sometimes very late."""
        return self.rnd.expovariate(20) if self.rnd.random() < 0.9 else self.rnd.expovariate(0.7)

    def arrives(self, node: Node, t: float) -> bool:
        return t >= node.cut_until and self.rnd.random() > 0.003

    def send(
        self, t: float, node: Node, execute: Callable[..., object], got: Callable[..., None], *args: object
    ) -> None:
        """Send a statement on the node's session. `got` is called with its answer, if that comes before G is over."""
        statement = Statement(next(self.order), node, node.session, node.clock(t), execute, got, args)
        node.waiting_for = statement.number
        if self.arrives(node, t):
            self.at(t + self.delay(), self.serve, statement)
        self.at(t + node.gate_s / node.rate, self.too_late, statement)

    def serve(self, t: float, statement: Statement) -> None:
        node, session, args = statement.node, statement.session, statement.args
        self.db.end_idle(t)
        if session is not None:
            if session not in self.db.sessions:
                self.at(t + self.delay(), self.lose, node, session)
                return
            session.idle_since = t
            args = (session, *args)
        answer = statement.execute(t, *args)
        if session is not None and self.rnd.random() < (0.1 if statement.got == self.got_bump else 0.003):
            # The connection breaks after the commit: the answer is lost, and both sides notice soon.
            self.db.end([session])
            self.at(t + self.delay(), self.lose, node, session)
        elif self.arrives(node, t):
            self.at(t + self.delay(), self.reply, statement, answer)

    def reply(self, t: float, statement: Statement, answer: object) -> None:
        node = statement.node
        if t < node.paused_until:
            self.at(node.paused_until, self.reply, statement, answer)
        elif node.waiting_for == statement.number:
            node.waiting_for = 0
            statement.got(t, node, statement.sent, answer)

    def too_late(self, t: float, statement: Statement) -> None:
        if statement.node.waiting_for == statement.number:
            self.lose(t, statement.node, statement.session)

    def lose(self, t: float, node: Node, session: Session | None) -> None:
        """What is unknown is lost: the gates are shut, and the session is given up. One that is cut off hears later."""
        if t < node.paused_until or t < node.cut_until:
            self.at(max(node.paused_until, node.cut_until), self.lose, node, session)
        elif node.session is session:
            node.session, node.waiting_for = None, 0
            node.terms.clear()
            node.to_release.clear()
            if session is not None and self.arrives(node, t):
                self.at(t + self.delay(), self.close, session)

    def close(self, _t: float, session: Session) -> None:
        self.db.end([session])

    # --- A node's tick: a release, a heartbeat or a try

    def tick(self, t: float, node: Node) -> None:
        if t < node.paused_until:
            self.at(node.paused_until, self.tick, node)
            return
        if not node.waiting_for:
            self.work(t, node)
        self.at(t + self.rnd.uniform(0.2, 0.8) / node.rate, self.tick, node)

    def work(self, t: float, node: Node) -> None:
        if node.session is None:
            self.send(t, node, self.db.open, self.got_session, node.lease_s)
        elif node.to_release:
            self.release(t, node)
        elif node.beat_due_at <= node.clock(t):
            settled = [role for role, term in node.terms.items() if term.opens_at <= node.clock(t)]
            self.send(t, node, self.db.beat, self.got_beat, settled)
        elif wanted := [role for role in ROLES if role not in node.terms]:
            self.send(t, node, self.db.try_and_look, self.got_try, wanted, node.key, self.rnd.uniform(0, 1))

    def got_session(self, t: float, node: Node, _sent: float, session: Session) -> None:
        node.session = session
        node.beat_due_at = node.clock(t) + node.beat_s

    def got_beat(self, t: float, node: Node, sent: float, _answer: None) -> None:
        node.beat_due_at = sent + node.beat_s * self.rnd.uniform(0.8, 1.2)
        for term in node.terms.values():
            term.deadline = max(term.deadline, self.anchor(node, t, sent) + node.gate_s)
        self.tempt(t, node, 0.03)

    def anchor(self, node: Node, t: float, sent: float) -> float:
        return node.clock(t) if self.rule == "from_reply" else sent

    def release(self, t: float, node: Node) -> None:
        """The gates are shut first. Clean is a release only if its term had waited those before it out."""
        terms = {role: node.terms.pop(role) for role in node.to_release if role in node.terms}
        node.to_release.clear()
        now = node.clock(t)
        clean = {role: term.opens_at <= now or self.rule == "early_clean" for role, term in terms.items()}
        self.send(t, node, self.db.release, self.got_release, clean)

    def got_release(self, t: float, node: Node, sent: float, answer: None) -> None:
        """The session goes on, and may win the role again."""

    # --- Winning, in two statements

    def got_try(self, t: float, node: Node, sent: float, answer: tuple[set[str], dict[str, Seen]]) -> None:
        granted, seen = answer
        for role, holder in seen.items():
            if role not in node.sights or node.sights[role][0] != holder:
                node.sights[role] = holder, sent if self.rule == "seen_at_send" else node.clock(t)
        if granted:
            self.send(t, node, self.db.bump, self.got_bump, node.number, sorted(granted), node.key)

    def got_bump(self, t: float, node: Node, sent: float, grants: dict[str, Grant]) -> None:
        assert node.session is not None
        for role, grant in grants.items():
            opens_at = self.opens_at(t, node, role, grant)
            deadline = self.anchor(node, t, sent) + node.gate_s
            term = Term(grant.epoch, grant.order, node.session.number, opens_at, deadline)
            node.terms[role] = node.last[role] = term
        self.tempt(t, node, 0.3)

    def opens_at(self, t: float, node: Node, role: str, grant: Grant) -> float:
        now, before = node.clock(t), grant.before
        if before is None or self.rule == "no_wait":
            return now if self.rule == "no_wait" else now + grant.wait_s
        same_history = before.history == grant.history
        if before.clean and (same_history or self.rule == "clean_of_other_history"):
            return now
        if not same_history:
            return now + grant.wait_s
        if self.is_own_last(node, role, before):
            # Its own gate has been shut since: only what it was itself waiting for remains.
            return now if self.rule == "own_blind" else max(now, node.last[role].opens_at)
        seen, first_seen = node.sights.get(role, (None, now))
        latest = Seen(before.session, grant.beat_before, grant.history)
        if seen != latest and not (self.rule == "stale_read" and seen is not None and seen.session == latest.session):
            first_seen = now
        return max(now, first_seen + grant.wait_s)

    def is_own_last(self, node: Node, role: str, before: Row) -> bool:
        """By epoch: its session may have won a later term whose answer was lost."""
        last = node.last.get(role)
        if last is None or before.node != node.number:
            return False
        return before.session == last.session if self.rule == "own_session" else before.epoch == last.epoch

    # --- Acting, and what goes wrong

    def act(self, t: float, node: Node) -> None:
        if t >= node.paused_until:
            now = node.clock(t)
            for role, term in node.terms.items():
                if term.opens_at <= now < term.deadline:
                    self.acts[role].append(term.order)
        self.at(t + self.rnd.expovariate(8), self.act, node)

    def fault(self, t: float) -> None:
        kind = self.rnd.choice(FAULTS)
        node = self.rnd.choice(self.nodes)
        if kind == "pause":
            node.paused_until = t + self.rnd.choice(PAUSES_S) * self.rnd.uniform(0.8, 1.2)
        elif kind == "cut":
            self.cut(t, node)
        elif kind == "crash":
            self.db.end(list(self.db.sessions))
        elif kind == "release" and node.terms:
            node.to_release.add(self.rnd.choice(sorted(node.terms)))
        elif kind == "trouble":
            self.trouble(t, node)
        self.at(t + self.rnd.expovariate(1 / 5), self.fault)

    def cut(self, t: float, node: Node) -> None:
        node.cut_until = max(node.cut_until, t + self.rnd.uniform(1, 20))

    def tempt(self, t: float, node: Node, chance: float) -> None:
        """Trouble comes most often right after a statement that opens a gate, or keeps it open."""
        if self.rnd.random() < chance:
            self.at(t + self.rnd.expovariate(2), self.trouble, node)

    def trouble(self, t: float, node: Node) -> None:
        """The node is cut off, and cannot hear that its session has ended: its gate stays open until its deadline."""
        self.cut(t, node)
        if self.rnd.random() < 0.25:
            self.db.fail_over(max(0.0, t - self.rnd.uniform(0, LAG_S_MAX)))
        elif node.session is not None:
            self.db.end([node.session])


def run(seed: int, rule: str = "protocol", end_s: float = END_S) -> Outcome:
    """One schedule: its violations, actions and terms."""
    return Schedule(seed, rule).run(end_s)


def _main(arguments: list[str]) -> None:
    total = int(arguments[0]) if arguments else 500
    for rule in arguments[1:] or ["protocol", *BROKEN]:
        outcomes = [run(seed, rule) for seed in range(total)]
        first = next((seed for seed, outcome in enumerate(outcomes) if outcome.violated), None)
        print(  # noqa: T201
            f"{rule:22s} schedules with a violation: {sum(outcome.violated for outcome in outcomes)} of {total}"
            f" (first {first}); actions {sum(outcome.actions for outcome in outcomes)},"
            f" terms {sum(outcome.terms for outcome in outcomes)}",
            flush=True,
        )


if __name__ == "__main__":
    _main(sys.argv[1:])
