"""Elections that hold by a lease, as a model that runs: no lock is held, and at most one gate of a role acts at a time.

Three nodes with different settings (G, T, heartbeat) and clocks of different rates compete for two roles. A node that
holds by a lease owns one row (`Lease`: a number that only rises, and an end that is final). It sends single statements
through a pooler that delays them for up to minutes, runs them twice, out of order, or not at all, and loses replies. In
some schedules one node holds its roles by session locks, in the same ledger. Faults: pauses, cuts, crashes of nodes,
a pooler that stands still, restarts and failovers of the database that keep every commit, steps of its clock, dropped
sessions, epochs advanced by an operator, clean and unclean releases, and nodes that evict far too early: when a
lease is ended by others is a question of liveness, and must never be one of safety. In one schedule of five, a role is
being renamed: some processes know it by another name with the same key. Under both names there is one leader at a time.

A transaction takes time: what a winner reads of its predecessor's row in `sessions` is as old as its snapshot, what it
reads of the role's row is as young as its row lock.

Two judges. Safety, by real time only: no action of an older epoch after one of a newer one, and no epoch issued twice.
Liveness: when the faults have ended, every role is acted for again. Change this model before the protocol.

    python3 lease_model.py [schedules] [rule ...]

`protocol` must show no violation; each of the others breaks one rule and must show some:
  timing, as in gate_model.py
    no_wait        the successor opens at once
    wait_g         it waits about G instead of T (no margin for clock rates)
    no_chain       it waits only its direct predecessor's T, not the longest T of the unsettled chain
    early_clean    a release counts as clean although the releaser was itself still waiting
    from_reply     the gate's deadline is anchored at the reply instead of before the send
    seen_at_send   "first seen" is anchored before the look's send instead of after its reply
    own_blind      a process that follows itself opens at once, although it was itself still waiting
    own_session    it knows its own last term by the session instead of the epoch
  leases
    skew           an eviction judges the beat under a snapshot older than its commit (plain SELECT, then write)
    zombie_beat    a beat of a lease that was ended is acknowledged
    blind_evict    an eviction does not match the beat, and its sender counts from whatever it saw last
    late_take      taking a role is not bound to the end of its holder
    renew_all      a beat that was taken renews every gate, without a look at what the ledger says is ours
    grant_no_beat  winning a role does not change the winner's beat
    adopt_now      a node that follows its own term, of whose grant it never heard, opens at once
    db_clock       expiry by the database's clock, which steps; the successor opens at once
    async_commit   what is acknowledged is on disk up to 0.6 s later (synchronous_commit = off)
  both kinds in one ledger
    blind_bump     a session-held winner does not look whether a lease holds the role
    blind_take     a lease does not look whether somebody holds the role's session lock
    lock_late      it looks after it has read the predecessor's beat
  one key under two names
    blind_rename   a key goes to a new name while a lease that leads under the old one is silent, and has not ended
    bare_rename    a key goes to a new name without the wait for who was lost under the old one
  liveness
    no_ghosts      a node ignores a term that the ledger gives to it and of whose grant it never heard

`no_seq` and `impatient` are figures. With `no_seq`, statements carry no number, so late and doubled ones run after
later ones. A node takes even a role of its own under a new epoch, so such a statement mostly matches no term any more.
What is left is a late heartbeat that settles a later term. Few schedules come to that: `test_lease_model.py` has one
that is written by hand. With `impatient`, silence is
counted over time in which the standby itself heard nothing, so more leases are ended whose owner could speak.

Imports the standard library only.
"""

import heapq
import itertools
import random
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

__all__ = ["BROKEN", "Node", "Outcome", "Schedule", "Sent", "Under", "run"]

TIMING = (
    "no_wait", "wait_g", "no_chain", "early_clean", "from_reply", "seen_at_send", "own_blind", "own_session",
)  # fmt: skip
LEASES = (
    "skew", "zombie_beat", "blind_evict", "late_take", "renew_all", "grant_no_beat", "adopt_now", "db_clock",
    "async_commit",
)  # fmt: skip
MIXED = ("blind_bump", "blind_take", "lock_late")
RENAMING = ("blind_rename", "bare_rename")
BROKEN = (*TIMING, *LEASES, *MIXED, *RENAMING, "no_ghosts")
SETTINGS = ((6.0, 7.0, 3.0), (2.0, 3.0, 1.0), (12.0, 13.5, 6.0))  # G, T, heartbeat interval
RATES = (1.0, 1.04, 1 / 1.04)  # fastest / slowest stays below the smallest T / G
PATIENCES = (1.0, 1.0, 0.1, 0.5)
ROLES = ("bills", "mail")
RENAMED = ("bills", "post")
KEYS = {"bills": "bills", "mail": "mail", "post": "mail"}
FAULTS = (
    "pause", "pause", "cut", "crash", "release", "release", "release", "drop", "pooler", "restart", "failover",
    "advance",
)  # fmt: skip
PAUSES_S = (1.0, 4.0, 6.5, 8.0, 15.0)
# What was held up in the pooler may still arrive until the faults end. Roles are led again before ACT_BY_S.
FAULTS_END_S, ACT_BY_S, END_S = 240.0, 300.0, 330.0
LONG_AGO = -1e9
EPOCH_STRIDE = 1000
THIS_TRANSACTION = -1

Hold = Literal["session", "lease"]
Instance = tuple[int, int]
Answer = tuple[Callable[..., None], tuple[Any, ...]]
Seen = dict[int, tuple[int, bool]]
"""Of each lease or session, its beat and whether it has ended, as a snapshot shows it."""


class Outcome(NamedTuple):
    """What the judges say about one schedule, and figures that show whether it meant anything."""

    overlaps: int
    reused: int
    stuck: int
    actions: int
    terms: int
    evictions: int
    evicted_while_able: int
    """Evictions of a lease whose owner was neither paused nor cut off."""

    @property
    def violated(self) -> bool:
        return self.overlaps + self.reused + self.stuck > 0


@dataclass(slots=True)
class Term:
    """A role that a node leads, as it knows it."""

    epoch: int
    opens_at: float
    deadline: float
    told: bool = False


@dataclass(slots=True)
class Sight:
    """A holder's latest beat; since when it is known, and since when it has been silent, on the looker's clock."""

    beat: int | None
    first_seen: float
    silent_since: float


class Node:
    """A process and its clock."""

    def __init__(
        self, number: int, hold: Hold, rate: float, offset: float, settings: tuple[float, float, float]
    ) -> None:
        self.number, self.hold, self.rate, self.offset = number, hold, rate, offset
        self.gate_s, self.lease_s, self.beat_s = settings
        self.paused_until = self.cut_until = 0.0
        self.patience = 1.0  # evicts after so many T
        self.names: random.Random | None = None  # draws the names that each process knows, if a role is being renamed
        self._instances = itertools.count(1)
        self.forget()

    def forget(self) -> None:
        """A new process: it knows nothing of what its predecessor did."""
        self.roles = self.names.choice([ROLES, RENAMED]) if self.names else ROLES
        self.instance: Instance = (self.number, next(self._instances))
        self.session: int | None = None
        self.lost_session: int | None = None
        self.timeline = 0
        self.openings = self.numbered = 0
        self.terms: dict[str, Term] = {}
        self.last: dict[str, tuple[int, int | None, float]] = {}
        """Epoch, session and `opens_at` of the last term of each role that this process has heard of."""
        self.sights: dict[int, Sight] = {}
        self.looked_at = LONG_AGO
        self.not_before = dict.fromkeys(self.roles, LONG_AGO)
        self.beat_due = LONG_AGO
        self.awaited: tuple[int, float] | None = None
        """The statement whose reply is awaited, and until when."""

    def clock(self, t: float) -> float:
        return self.offset + self.rate * t

    def lose(self) -> None:
        self.lost_session, self.session = self.session, None
        self.terms.clear()


@dataclass(slots=True)
class Lease:
    """A row of `sessions`: a lease, or the record of a session that holds locks."""

    node: Node
    instance: Instance
    hold: Hold
    lease_s: float
    timeline: int
    heard: float
    expires: float
    beat: int = 0
    number: int = 0
    ended: bool = False


@dataclass(slots=True)
class Row:
    """A row of `leaders`."""

    epoch: int = 0
    session: int | None = None
    wait_t: float = 0.0
    own_t: float = 0.0
    clean: bool = True
    ended: bool = True
    timeline: int = 1
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Before:
    """What a winner is told about its predecessor."""

    wait_t: float
    own_t: float = 0.0
    clean: bool = False
    epoch: int = 0
    session: int | None = None
    beat: int | None = None
    instance: Instance | None = None


class Look(NamedTuple):
    epoch: int
    session: int | None
    beat: int | None
    lease_s: float
    hold: Hold
    free: bool
    expired: bool


class Beat(NamedTuple):
    """The answer to a heartbeat."""

    alive: bool
    owned: Mapping[str, int]
    settled: Sequence[str]


DEAD = Beat(alive=False, owned={}, settled=())
Wins = dict[str, tuple[int, Before]]


class Database:
    """The ledger, and the advisory locks of session-held nodes."""

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self.sessions: dict[int, Lease] = {}
        self.by_key: dict[tuple[Instance, int], int] = {}
        self.rows = {role: Row() for role in KEYS}
        self.locks: dict[str, int] = {}
        """By key."""
        self.terms: dict[tuple[str, int], int] = {}
        """Every term by role and epoch, and how many of all roles there were before it."""
        self.timeline = 1
        self.restarts = 0
        self.issued: set[tuple[str, int]] = set()
        self.reused = self.evicted_while_able = self.evictions = 0
        self.clock_ahead = 0.0
        self.flush()

    def flush(self) -> None:
        sessions = {key: replace(lease) for key, lease in self.sessions.items()}
        self._on_disk = sessions, dict(self.by_key), {role: replace(row) for role, row in self.rows.items()}

    def restart(self) -> None:
        """What is under way is rolled back, and every connection is gone."""
        self.restarts += 1
        if self.rule == "async_commit":
            self.sessions, self.by_key, self.rows = self._on_disk
            self.flush()
        for sid, lease in self.sessions.items():
            if lease.hold == "session":
                self.drop(sid)
        self.locks = {}

    def get(self, sid: int | None) -> Lease | None:
        return None if sid is None else self.sessions.get(sid)

    def live(self, sid: int | None) -> bool:
        lease = self.get(sid)
        return lease is not None and not lease.ended

    def drop_idle(self, t: float) -> None:
        """What idle_session_timeout does to session-held nodes."""
        for sid, lease in self.sessions.items():
            if lease.hold == "session" and not lease.ended and t - lease.heard >= lease.lease_s:
                self.drop(sid)

    def drop(self, sid: int) -> None:
        self.sessions[sid].ended = True
        self.locks = {key: holder for key, holder in self.locks.items() if holder != sid}

    def number(self, t: float, message: "Sent", *, beats: bool = True) -> Literal["taken", "late", "over"]:
        """Every write of a lease begins with its own row: it has not ended, and has seen no later number."""
        lease, number = self.get(message.session), message.number
        if lease is None or lease.timeline != self.timeline or (lease.ended and self.rule != "zombie_beat"):
            return "over"
        numbers = lease.hold == "lease" and self.rule != "no_seq"
        if numbers and number <= lease.number:
            return "late"
        lease.beat = number if numbers else lease.beat + beats
        lease.number, lease.heard = max(number, lease.number), t
        lease.expires = t + self.clock_ahead + lease.lease_s
        return "taken"

    def snapshot(self, silent: Iterable[int] = ()) -> Seen:
        return {sid: (lease.beat, lease.ended or sid in silent) for sid, lease in self.sessions.items()}

    def owned(self, sid: int | None) -> dict[str, int]:
        return {role: row.epoch for role, row in self.rows.items() if row.session == sid and not row.ended}

    def session_held(self, role: str) -> bool:
        holder = self.get(self.rows[role].session)
        return not self.rows[role].ended and holder is not None and holder.hold == "session"

    def alive(self, t: float, lease: Lease | None) -> bool:
        """By the record, and the database's clock. Nothing may depend on it but when a key changes its name."""
        return lease is not None and not lease.ended and lease.expires + lease.lease_s > t + self.clock_ahead

    def under_another_name(self, role: str) -> Iterable[Row]:
        return (row for name, row in self.rows.items() if name != role and row.key == KEYS[role])

    def misnamed(self, t: float, sid: int | None, roles: Sequence[str]) -> set[str]:
        """The roles whose key is another name's and stays it, because its last leader runs.

        No lock tells whether a lease leads. One that is silent under the other name is ended first: or it would wake up
        and lead beside its heir.
        """
        found = set()
        for role in roles:
            for row in self.under_another_name(role):
                holder = self.get(row.session)
                leads = holder is not None and holder.hold == "lease" and not holder.ended and not row.ended
                if leads and row.session is not None and row.session != sid and self.rule != "blind_rename":
                    if self.alive(t, holder):
                        found.add(role)
                    else:
                        self.end_leases(t, [row.session])
                elif self.alive(t, holder):
                    found.add(role)
        return found

    def inherit(self, role: str) -> None:
        """The key comes from another name, and what its successor has to wait for comes with it."""
        for other in self.under_another_name(role):
            other.key = None
            if not other.clean and self.rule != "bare_rename":
                row = self.rows[role]
                row.clean, row.session, row.wait_t = False, None, max(row.wait_t, other.wait_t)

    def end_leases(self, t: float, silent: Iterable[int]) -> None:
        for sid in silent:
            if self.live(sid):
                victim = self.sessions[sid].node
                self.evictions += 1
                able = t >= victim.paused_until and t >= victim.cut_until
                self.evicted_while_able += victim.session == sid and able
                self.sessions[sid].ended = True

    def win(self, role: str, sid: int, seen: Seen) -> tuple[int, Before]:
        self.inherit(role)
        row, lease_s = self.rows[role], self.sessions[sid].lease_s
        holder = self.get(row.session)
        before = Before(
            wait_t=row.wait_t,
            own_t=row.own_t,
            clean=row.clean,
            epoch=row.epoch,
            session=row.session,
            beat=seen[row.session][0] if row.session in seen else None,
            instance=holder.instance if holder else None,
        )
        jumps = row.timeline != self.timeline
        epoch = (row.epoch // EPOCH_STRIDE + 1) * EPOCH_STRIDE if jumps else row.epoch + 1
        self.reused += (role, epoch) in self.issued
        self.issued.add((role, epoch))
        wait_t = max(lease_s, 0.0 if row.clean else row.wait_t)
        self.terms[role, epoch] = len(self.terms)
        self.rows[role] = Row(epoch, sid, wait_t, lease_s, False, False, self.timeline, KEYS[role])
        return epoch, before


@dataclass(slots=True)
class Sent:
    """A statement on its way."""

    node: Node
    instance: Instance
    session: int | None
    mark: int
    sent: float
    number: int
    statement: Callable[..., Any]
    args: tuple[Any, ...]


class Taking(NamedTuple):
    """What a transaction that takes roles has done and seen before its commit."""

    silent: Sequence[int]
    take: Sequence[str]
    seen: Seen
    unlocked: Collection[str]
    misnamed: Collection[str]


@dataclass(slots=True)
class Under:
    """A transaction that has begun, and commits later."""

    lasts_s: float
    commit: Callable[..., Answer]
    args: tuple[Any, ...]


@dataclass(slots=True)
class Schedule:
    """One run of the model: events in the order of real time."""

    seed: int
    rule: str
    rnd: random.Random = field(init=False)
    nodes: list[Node] = field(init=False)
    db: Database = field(init=False)
    events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    order: "itertools.count[int]" = field(default_factory=itertools.count)
    marks: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    acts: list[tuple[float, str, int, Instance]] = field(default_factory=list)
    pooler_stands_until: float = 0.0

    def __post_init__(self) -> None:
        rnd = self.rnd = random.Random(self.seed)
        mixed = rnd.random() < 0.4 or self.rule in MIXED  # one node holds by session locks
        holds: list[Hold] = ["session" if mixed else "lease", "lease", "lease"]
        self.nodes = [
            Node(number, hold, rnd.choice(RATES), rnd.uniform(0, 1e4), rnd.choice(SETTINGS))
            for number, hold in enumerate(holds)
        ]
        names = random.Random(f"names of {self.seed}")  # of its own: other schedules are what they were
        for node in self.nodes:
            if self.renaming:
                node.names = names
                node.forget()
            node.patience = 0.1 if self.harsh else rnd.choice(PATIENCES) if self.seed % 2 else 1.0
        self.db = Database(self.rule)

    @property
    def harsh(self) -> bool:
        """Every node evicts far too early, a second win is often the last message for long, and beats come again."""
        return self.seed % 4 == 3

    @property
    def renaming(self) -> bool:
        """Some processes know a role by another name."""
        return self.seed % 5 == 4 or self.rule in RENAMING

    def run(self) -> Outcome:
        for node in self.nodes:
            self.at(self.rnd.random(), self.tick, node)
            self.at(self.rnd.random(), self.act, node)
        self.at(5.0, self.fault)
        if self.rule == "async_commit":
            self.at(0.5, self.flush)
        while self.events and self.events[0][0] < END_S:
            t, _, call, args = heapq.heappop(self.events)
            call(t, *args)
        return self.judged()

    def judged(self) -> Outcome:
        overlaps = stuck = 0
        for key in ROLES:
            ours = [act for act in self.acts if KEYS[act[1]] == key]
            for name in KEYS:
                acts = [act for act in ours if act[1] == name]
                overlaps += sum(a[2] > b[2] or (a[2] == b[2] and a[3] != b[3]) for a, b in itertools.pairwise(acts))
            overlaps += sum(
                a[1] != b[1] and self.db.terms[a[1], a[2]] > self.db.terms[b[1], b[2]]
                for a, b in itertools.pairwise(ours)
            )
            stuck += not any(act[0] > ACT_BY_S for act in ours)
        db = self.db
        return Outcome(overlaps, db.reused, stuck, len(self.acts), len(db.issued), db.evictions, db.evicted_while_able)

    # --- Time and messages

    def at(self, t: float, call: Callable[..., None], *args: object) -> None:
        heapq.heappush(self.events, (t, next(self.order), call, args))

    def calm(self, t: float) -> bool:
        return t >= FAULTS_END_S

    def delay(self, t: float) -> float:
        """Mostly quick, sometimes late, sometimes held up in the pooler's queue for minutes."""
        dice = self.rnd.random()
        if self.calm(t) or dice < 0.86:
            return self.rnd.expovariate(20)
        if dice < 0.96:
            return self.rnd.expovariate(0.7)
        return min(self.rnd.uniform(2, 120), max(0.1, FAULTS_END_S - t))

    def lasts(self, t: float) -> float:
        """Of a transaction: a busy fence, a busy server."""
        if self.calm(t) or self.rnd.random() < 0.7:
            return self.rnd.expovariate(50)
        return self.rnd.uniform(0, self.rnd.choice([2, 5]))

    def passes(self, t: float, node: Node) -> bool:
        return t >= node.cut_until and (self.calm(t) or self.rnd.random() > 0.02)

    def send(self, t: float, node: Node, statement: Callable[..., Any], *args: object, numbered: bool = True) -> None:
        """One statement at a time; a reply counts only while it is awaited."""
        node.numbered += numbered
        mark, sent = next(self.marks), node.clock(t)
        node.awaited = (mark, sent + max(1.0, node.gate_s / 2))
        leased = node.hold == "lease"
        for _ in range(2 if leased and not self.calm(t) and self.rnd.random() < 0.03 else 1):
            if self.passes(t, node):
                when = t + self.delay(t)
                if leased and when < self.pooler_stands_until:
                    when = self.pooler_stands_until + self.rnd.uniform(0, 0.2)
                message = Sent(node, node.instance, node.session, mark, sent, node.numbered, statement, args)
                self.at(when, self.arrive, message)
                if self.harsh and leased and statement == self.db_beat and args[0] and self.rnd.random() < 0.5:
                    self.at(min(when + self.rnd.uniform(2, 20), max(when, FAULTS_END_S)), self.arrive, message)

    def arrive(self, t: float, message: Sent) -> None:
        self.db.drop_idle(t)
        node = message.node
        if node.hold == "session" and (node.instance, node.session) != (message.instance, message.session):
            return  # its connection is gone, and the statement with it
        answer = message.statement(t, message, *message.args)
        if isinstance(answer, Under):
            self.at(t + answer.lasts_s, self.commits, message, self.db.restarts, answer)
        else:
            self.back(t, message, answer)

    def commits(self, t: float, message: Sent, restarts: int, under: Under) -> None:
        if restarts == self.db.restarts:
            self.back(t, message, under.commit(t, *under.args))

    def back(self, t: float, message: Sent, answer: Answer | None) -> None:
        if answer is not None and self.passes(t, message.node):
            self.at(max(t + self.delay(t), message.node.paused_until), self.reply, message, answer)

    def reply(self, t: float, message: Sent, answer: Answer) -> None:
        node, (heard, args) = message.node, answer
        if t < node.paused_until:
            self.at(node.paused_until, self.reply, message, answer)
        elif node.instance == message.instance and node.awaited and node.awaited[0] == message.mark:
            node.awaited = None
            heard(t, node, message.sent, *args)

    # --- The node

    def tick(self, t: float, node: Node) -> None:
        if t < node.paused_until:
            return self.at(node.paused_until, self.tick, node)
        now = node.clock(t)
        self.at(t + self.rnd.uniform(0.2, 0.8) / node.rate, self.tick, node)
        if node.awaited and now < node.awaited[1]:
            return None
        if node.awaited and node.hold == "session":
            node.lose()  # a session whose answer is unknown is closed; a lease asks again, under a new number
        node.awaited = None
        return self.turn(t, node, now)

    def turn(self, t: float, node: Node, now: float) -> None:
        if node.session is None:
            node.openings += 1
            self.send(t, node, self.db_open, (node.instance, node.openings), node.lost_session, numbered=False)
        elif now >= node.beat_due:
            node.beat_due = now + node.beat_s * self.rnd.uniform(0.8, 1.2)
            settled = [role for role, term in node.terms.items() if term.opens_at <= now and not term.told]
            self.send(t, node, self.db_beat, settled)
        elif len(node.terms) == len(node.roles):
            pass  # there is nothing to look at
        elif node.hold == "session":
            wanted = [role for role in node.roles if role not in node.terms and node.not_before[role] <= now]
            self.send(t, node, self.db_try, wanted, node.roles)
        else:
            self.send(t, node, self.db_look, node.roles, numbered=False)

    def got_open(self, t: float, node: Node, sent: float, sid: int, timeline: int) -> None:
        node.session, node.timeline, node.numbered, node.beat_due = sid, timeline, 0, LONG_AGO

    def got_beat(self, t: float, node: Node, sent: float, beat: Beat) -> None:
        """Gates are renewed for what the ledger shows as ours after it has taken the beat, and for nothing else."""
        if not beat.alive:
            return node.lose()
        for role, term in list(node.terms.items()):
            if beat.owned.get(role) == term.epoch or self.rule == "renew_all":
                anchor = node.clock(t) if self.rule == "from_reply" else sent
                term.deadline = max(term.deadline, anchor + node.gate_s)
                term.told |= role in beat.settled
            else:
                del node.terms[role]
        ghosts = [(role, epoch) for role, epoch in beat.owned.items() if role not in node.terms]
        if not ghosts or self.rule == "no_ghosts" or node.hold != "lease":
            return None
        if self.rnd.random() < 0.5:  # not wanted any more: given back, not clean
            return self.send(t, node, self.db_release, [(role, epoch, False) for role, epoch in ghosts])
        return self.send(t, node, self.db_take, [], [role for role, _ in ghosts])

    def saw(self, t: float, node: Node, sent: float, looks: Mapping[str, Look]) -> None:
        """First seen after the reply; silence counts only while the node's own looks were answered."""
        now = node.clock(t)
        gap = now - node.looked_at > node.beat_s
        node.looked_at = now
        for sid, beat in {look.session: look.beat for look in looks.values() if look.session is not None}.items():
            old = node.sights.get(sid)
            if old is None or beat != old.beat:
                node.sights[sid] = Sight(beat, sent if self.rule == "seen_at_send" else now, now)
            elif gap and self.rule != "impatient":
                node.sights[sid] = Sight(beat, old.first_seen, now)

    def silent(self, t: float, node: Node, look: Look, patience: float) -> bool:
        assert look.session is not None
        return node.clock(t) - node.sights[look.session].silent_since >= look.lease_s * patience

    def got_look(self, t: float, node: Node, sent: float, looks: Mapping[str, Look], timeline: int) -> None:
        if timeline != node.timeline:
            return node.lose()  # another server answers: nothing that was seen or won before counts here
        self.saw(t, node, sent, looks)
        now = node.clock(t)
        evict: dict[int, int | None] = {}
        take: list[str] = []
        patience = 1.0 if self.calm(t) else node.patience
        for role, look in looks.items():
            if role in node.terms or node.not_before[role] > now:
                continue
            if look.free or look.expired:
                wanted = True
            elif look.session == node.session:
                wanted = self.rule != "no_ghosts"
            elif look.hold == "session":
                wanted = True  # its lock tells, in the statement that takes
            elif wanted := self.rule != "db_clock" and self.silent(t, node, look, patience):
                assert look.session is not None
                evict[look.session] = node.sights[look.session].beat
            if wanted:
                take.append(role)
        if take:
            self.send(t, node, self.db_take, list(evict.items()), take)
        return None

    def got_try(self, t: float, node: Node, sent: float, granted: Sequence[str], looks: Mapping[str, Look]) -> None:
        self.saw(t, node, sent, looks)
        if granted:
            return self.send(t, node, self.db_bump, granted)
        silent = {
            look.session: look.beat
            for look in looks.values()
            if look.hold == "lease" and not look.free and self.silent(t, node, look, node.patience)
        }
        if silent:
            self.send(t, node, self.db_take, list(silent.items()), [])
        return None

    def got_win(self, t: float, node: Node, sent: float, wins: Wins) -> None:
        now = node.clock(t)
        if wins and node.terms and self.harsh and not self.calm(t) and self.rnd.random() < 0.5:
            self.at(t + self.rnd.uniform(0, 0.3), self.cut, node, self.rnd.uniform(3, 15))
        elif wins:
            self.trouble(t, node)
        for role, (epoch, before) in wins.items():
            if now >= sent + node.gate_s or role in node.terms:
                continue  # too late to lead on: the next beat finds it
            opens_at = self.opens_at(now, node, role, before)
            anchor = now if self.rule == "from_reply" else sent
            node.terms[role] = Term(epoch, opens_at, anchor + node.gate_s)
            node.last[role] = (epoch, node.session, opens_at)

    def opens_at(self, now: float, node: Node, role: str, before: Before) -> float:
        rule = self.rule
        if before.clean or rule in ("no_wait", "db_clock"):
            return now
        if before.instance == node.instance and self.is_last(node, role, before):
            return now if rule == "own_blind" else max(now, node.last[role][2])
        if before.session == node.session and rule == "adopt_now":
            return now
        wait_t = {"wait_g": before.wait_t * 0.85, "no_chain": before.own_t}.get(rule, before.wait_t)
        sight = None if before.session is None else node.sights.get(before.session)
        known = sight is not None and sight.beat is not None and (sight.beat == before.beat or rule == "blind_evict")
        return max(now, (sight.first_seen if known and sight is not None else now) + wait_t)

    def is_last(self, node: Node, role: str, before: Before) -> bool:
        """Its own last term, by epoch: a session may have had a later one, of which the process never heard."""
        epoch, session, _ = node.last.get(role, (None, None, 0.0))
        return before.session == session if self.rule == "own_session" else before.epoch == epoch

    def got_release(self, t: float, node: Node, sent: float) -> None:
        pass

    # --- The statements, at the database. Each is one transaction.

    def db_open(
        self,
        t: float,
        message: Sent,
        key: tuple[Instance, int],
        previous: int | None,
    ) -> Answer:
        """Idempotent by a key of the client's own; ends exactly the session that the client says it has lost."""
        db, node = self.db, message.node
        if key not in db.by_key:
            db.by_key[key] = opened = len(db.sessions) + 1
            expires = t + db.clock_ahead + node.lease_s
            db.sessions[opened] = Lease(node, message.instance, node.hold, node.lease_s, db.timeline, t, expires)
            if previous is not None and previous in db.sessions and db.sessions[previous].instance == message.instance:
                db.drop(previous)
        return self.got_open, (db.by_key[key], db.timeline)

    def db_beat(
        self,
        t: float,
        message: Sent,
        settled: Sequence[str],
    ) -> Answer | None:
        sid = message.session
        taken = self.db.number(t, message)
        if taken == "late":
            return None  # its sender has asked again since, or will
        owned = self.db.owned(sid)
        if taken == "taken" and sid is not None:
            for role in settled:  # the predecessor has been waited out: the chain ends here
                if role in owned:
                    self.db.rows[role].wait_t = self.db.sessions[sid].lease_s
        return self.got_beat, (Beat(taken == "taken", owned, settled),)

    def db_look(self, t: float, message: Sent, roles: Sequence[str]) -> Answer:
        return self.got_look, (self.looks(t, roles), self.db.timeline)

    def looks(self, t: float, roles: Sequence[str] = ROLES) -> dict[str, Look]:
        found = {}
        for role in roles:
            row = self.db.rows[role]
            holder = self.db.get(row.session)
            hold: Hold = "lease" if holder is None else holder.hold
            found[role] = Look(
                epoch=row.epoch,
                session=row.session,
                beat=None if holder is None else holder.beat,
                lease_s=0.0 if holder is None else holder.lease_s,
                hold=hold,
                free=row.ended or (hold == "lease" and not self.db.live(row.session)),
                expired=self.expired(t, holder),
            )
        return found

    def expired(self, t: float, holder: Lease | None) -> bool:
        return self.rule == "db_clock" and holder is not None and holder.expires < t + self.db.clock_ahead

    def db_take(
        self,
        t: float,
        message: Sent,
        evict: Sequence[tuple[int, int | None]],
        take: Sequence[str],
    ) -> Under | None:
        """End what has fallen silent, and take what is free."""
        db, sid = self.db, message.session
        if db.number(t, message) != "taken" or sid is None:
            return None
        if self.rule == "grant_no_beat":
            db.sessions[sid].beat -= 1
        silent = [
            other
            for other, beat in evict
            if (lease := db.get(other)) and lease.hold == "lease" and (self.rule == "blind_evict" or lease.beat == beat)
        ]
        if self.rule != "skew":
            db.end_leases(
                t, silent
            )  # their rows are locked from here: a beat that comes meanwhile waits for the commit
        # Of a role that a session holds, nobody may have the lock. It is tried before the snapshot that shows the beat.
        # Of a key that has two names, somebody may have it who leads under the other one.
        named = [role for role in take if self.renaming and KEYS[role] == "mail"]
        tried = {role for role in take if KEYS[role] not in db.locks and (db.session_held(role) or role in named)}
        tried = set() if self.rule == "lock_late" else tried
        misnamed = {role for role in named if role not in tried} | db.misnamed(t, sid, sorted(tried & set(named)))
        db.locks.update({KEYS[role]: THIS_TRANSACTION for role in tried})
        for role in take:
            if db.session_held(role) and not self.calm(t) and self.rnd.random() < 0.03:
                dropped = t + self.rnd.uniform(0, 3)
                self.at(dropped, self.drop_and_cut, db.rows[role].session, self.rnd.uniform(3, 15))
        return Under(self.lasts(t), self.commit_take, (sid, Taking(silent, take, db.snapshot(silent), tried, misnamed)))

    def commit_take(self, t: float, sid: int, taking: Taking) -> Answer:
        db = self.db
        if self.rule == "skew":
            db.end_leases(t, taking.silent)
        unlocked = {KEYS[role] for role in taking.unlocked}
        db.locks = {key: holder for key, holder in db.locks.items() if key not in unlocked}
        wins: Wins = {}
        for role in taking.take:
            row = db.rows[role]
            if self.rule == "late_take" or self.may_take(t, sid, role, taking):
                if holder := db.get(row.session):
                    self.trouble(t, holder.node)
                wins[role] = db.win(role, sid, taking.seen)
        return self.got_win, (wins,)

    def may_take(self, t: float, sid: int, role: str, taking: Taking) -> bool:
        row = self.db.rows[role]
        holder = self.db.get(row.session)
        if role in taking.misnamed:
            return False
        if row.ended or holder is None or row.session in (None, sid):
            return True
        if holder.hold == "session":
            unlocked_now = self.rule == "lock_late" and KEYS[role] not in self.db.locks
            return role in taking.unlocked or self.rule == "blind_take" or unlocked_now
        return taking.seen.get(row.session, (0, False))[1] or self.expired(t, holder)

    def db_release(
        self,
        t: float,
        message: Sent,
        terms: Sequence[tuple[str, int, bool]],
    ) -> Answer | None:
        sid = message.session
        if self.db.number(t, message) != "taken":
            return None
        for role, epoch, clean in terms:
            if self.db.owned(sid).get(role) == epoch:
                self.db.rows[role].clean, self.db.rows[role].ended = clean, True
        for role, _, _ in terms:
            if self.db.locks.get(KEYS[role]) == sid:
                del self.db.locks[KEYS[role]]
        return self.got_release, ()

    def db_try(self, t: float, message: Sent, wanted: Sequence[str], roles: Sequence[str]) -> Answer:
        """Session-held: the locks first, in a statement of their own."""
        sid = message.session
        if self.db.number(t, message, beats=False) == "over" or sid is None:
            return self.got_beat, (DEAD,)
        granted = [role for role in wanted if self.db.locks.get(KEYS[role], sid) == sid]
        self.db.locks.update({KEYS[role]: sid for role in granted})
        return self.got_try, (granted, self.looks(t, roles))

    def db_bump(self, t: float, message: Sent, granted: Sequence[str]) -> Answer | Under:
        if self.db.number(t, message) == "over":
            return self.got_beat, (DEAD,)
        misnamed = self.db.misnamed(t, message.session, granted)
        return Under(self.lasts(t), self.commit_bump, (message.session, granted, self.db.snapshot(), misnamed))

    def commit_bump(self, t: float, sid: int, granted: Sequence[str], seen: Seen, misnamed: Collection[str]) -> Answer:
        db, wins = self.db, Wins()
        for role in granted:
            row = db.rows[role]
            holder = db.get(row.session)
            over = row.session is not None and seen.get(row.session, (0, False))[1]
            leased = holder is not None and holder.hold == "lease" and not row.ended and not over
            if db.locks.get(KEYS[role]) != sid:
                continue
            if (leased and self.rule != "blind_bump") or role in misnamed:
                del db.locks[KEYS[role]]
            else:
                wins[role] = db.win(role, sid, seen)
        return self.got_win, (wins,)

    # --- What acts, and what goes wrong

    def act(self, t: float, node: Node) -> None:
        if t >= node.paused_until:
            for role, term in node.terms.items():
                if term.opens_at <= node.clock(t) < term.deadline:
                    self.acts.append((t, role, term.epoch, node.instance))
        self.at(t + self.rnd.expovariate(8), self.act, node)

    def flush(self, t: float) -> None:
        self.db.flush()
        self.at(t + 0.6, self.flush)

    def fault(self, t: float) -> None:
        if self.calm(t):
            return
        kind, node = self.rnd.choice(FAULTS), self.rnd.choice(self.nodes)
        if kind == "pause":
            node.paused_until = t + self.rnd.choice(PAUSES_S) * self.rnd.uniform(0.8, 1.2)
        elif kind == "cut":
            node.cut_until = t + self.rnd.uniform(1, 20)
        elif kind == "crash":
            self.crash(t, node)
        elif kind == "release":
            self.release(t, node)
        elif kind == "pooler":
            self.pooler_stands_until = t + self.rnd.uniform(1, 20)
        elif kind == "drop":
            if node.hold == "session" and node.session in self.db.sessions:
                assert node.session is not None
                self.db.drop(node.session)
        else:
            self.fault_of_database(kind)
        self.at(t + self.rnd.expovariate(1 / 6), self.fault)

    def fault_of_database(self, kind: str) -> None:
        db = self.db
        if kind == "restart":
            db.restart()
        elif kind == "advance":
            row = db.rows[self.rnd.choice(ROLES)]
            row.epoch = (row.epoch // EPOCH_STRIDE + 1) * EPOCH_STRIDE
            row.session, row.clean, row.ended = None, False, True
        elif self.rnd.random() < 0.3:
            db.restart()
            db.timeline += 1
            db.clock_ahead += self.rnd.uniform(-20, 20)

    def crash(self, t: float, node: Node) -> None:
        if node.hold == "session" and node.session is not None and node.session in self.db.sessions:
            self.db.drop(node.session)
        node.forget()
        node.paused_until = t + self.rnd.choice([0.1, 5])

    def release(self, t: float, node: Node) -> None:
        if not node.terms or t < node.paused_until:
            return
        role, now = self.rnd.choice(list(node.terms)), node.clock(t)
        term = node.terms.pop(role)
        node.not_before[role] = now + 1.0
        if node.awaited and node.hold == "session":
            node.lose()
        else:
            clean = term.opens_at <= now or self.rule == "early_clean"
            self.send(t, node, self.db_release, [(role, term.epoch, clean)])

    def trouble(self, t: float, node: Node) -> None:
        """A node that has just won, or is just being replaced, is cut off or paused more often than others."""
        if not self.calm(t) and self.rnd.random() < 0.25:
            cut = self.rnd.random() < 0.8
            self.at(t + self.rnd.expovariate(1.5), self.cut if cut else self.pause, node, self.rnd.uniform(3, 15))

    def drop_and_cut(self, t: float, sid: int | None, for_s: float) -> None:
        if sid is not None and sid in self.db.sessions:
            self.cut(t, self.db.sessions[sid].node, for_s)
            self.db.drop(sid)

    def cut(self, t: float, node: Node, for_s: float) -> None:
        node.cut_until = max(node.cut_until, t + for_s)

    def pause(self, t: float, node: Node, for_s: float) -> None:
        node.paused_until = max(node.paused_until, t + for_s)


def run(seed: int, rule: str = "protocol") -> Outcome:
    """One schedule: what the judges say, and its figures."""
    return Schedule(seed, rule).run()


def _main(arguments: list[str]) -> None:
    total = int(arguments[0]) if arguments else 300
    for rule in arguments[1:] or ["protocol", *BROKEN, "no_seq", "impatient"]:
        outcomes = [run(seed, rule) for seed in range(total)]
        first = next((seed for seed, outcome in enumerate(outcomes) if outcome.violated), None)
        overlaps, reused, stuck = (sum(outcome[judge] > 0 for outcome in outcomes) for judge in range(3))
        actions, terms, evictions, able = (sum(outcome[figure] for outcome in outcomes) for figure in range(3, 7))
        print(  # noqa: T201
            f"{rule:14s} schedules of {total} with an overlap {overlaps}, an epoch twice {reused}, a role stuck {stuck}"
            f" (first {first}); actions {actions}, terms {terms}, evictions {evictions}, {able} of able owners",
            flush=True,
        )


if __name__ == "__main__":
    _main(sys.argv[1:])
