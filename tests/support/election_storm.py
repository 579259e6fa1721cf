"""A storm of faults over an election: three node processes, each behind a proxy of its own, and what can go wrong.

Everything is drawn from a seed; what came of it is judged by the tests. Imports psycopg, `pgleaderlock.embedded`,
`pgleaderlock.migrate`, `servers`, `proxy`, `pgbouncer`, `election_node` and the standard library.
"""

import asyncio
import bisect
import contextlib
import functools
import itertools
import os
import random
import shutil
import signal
import tempfile
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from psycopg.conninfo import make_conninfo

from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.migrate import migrate
from support import pgbouncer
from support.election_node import POLL_S, WAIT_S, ElectionNode, SendLog, boot_ns, start_node
from support.proxy import Proxy
from support.servers import replica_of

__all__ = [
    "KINDS",
    "LAZY",
    "MIDDLE",
    "POOLED_KINDS",
    "QUICK",
    "SETTLING_KINDS",
    "SLOW",
    "LedAgain",
    "Storm",
    "end_sessions_of",
]

# G, T and intervals that differ from node to node, all of them short.
QUICK: dict[str, Any] = {
    "heartbeat_interval_s": 0.2,
    "late_threshold_s": 0.5,
    "session_lease_s": 0.8,
    "acquire_delay_s": (0.05, 0.2),
}
MIDDLE: dict[str, Any] = {
    "heartbeat_interval_s": 0.3,
    "late_threshold_s": 0.6,
    "session_lease_s": 0.9,
    "acquire_delay_s": (0.05, 0.2),
}
SLOW: dict[str, Any] = {
    "heartbeat_interval_s": 0.5,
    "late_threshold_s": 1.0,
    "session_lease_s": 1.6,
    "acquire_delay_s": (0.05, 0.3),
}
# A G of several times the others' T, and heartbeats further apart than G and T: it matters which beat is counted from.
LAZY: dict[str, Any] = {
    "heartbeat_interval_s": 1.2,
    "late_threshold_s": 2.5,
    "session_lease_s": 2.7,
    "acquire_delay_s": (0.05, 0.1),
}
# How many messages of a node are sent once more.
ECHOES = 20
# How often a calm is looked at; each look finds many more sends than one.
SENDS_WHEN_CALM = 5
# How often the machine is asked how late it is.
LAG_TICK_S = 0.01


class Lag:
    """How late this machine is: a timer that does nothing else, on the loop that forwards every message of a node."""

    def __init__(self) -> None:
        self._due_ns: list[int] = []
        self._woke_ns: list[int] = []

    async def run(self) -> None:
        while True:
            due = boot_ns() + int(LAG_TICK_S * 1e9)
            await asyncio.sleep(LAG_TICK_S)
            self.slept(due, boot_ns())

    def slept(self, due_ns: int, woke_ns: int) -> None:
        self._due_ns.append(due_ns)
        self._woke_ns.append(woke_ns)

    def between_s(self, begin_ns: int, end_ns: int) -> float:
        """For how much of this time the timer should have been awake, and was not."""
        first, last = bisect.bisect_right(self._woke_ns, begin_ns), bisect.bisect_left(self._due_ns, end_ns)
        late = zip(self._due_ns[first:last], self._woke_ns[first:last], strict=True)
        return sum(max(0, min(woke, end_ns) - max(due, begin_ns)) for due, woke in late) / 1e9


class LedAgain(NamedTuple):
    """How long a role was not acted for after a calm began, and how late the machine was in that time."""

    after_s: float
    lag_s: float
    role: str

    @property
    def net_s(self) -> float:
        return self.after_s - self.lag_s


class Storm:
    """Nodes with different settings, each behind a proxy of its own; and the faults."""

    def __init__(
        self,
        server: EmbeddedPostgres,
        log: SendLog,
        settings: Mapping[str, Mapping[str, Any]],
        roles: Sequence[str] = ("mail", "bills"),
        pooled: str | None = None,
    ) -> None:
        self.server, self.log, self.roles = server, log, roles
        self.pooled = pooled
        """The way through PgBouncer, which nodes go that hold by a lease."""
        self.seed = int(os.environ.get("PGLEADERLOCK_SEED") or random.SystemRandom().randrange(2**32))
        """A new one each time, unless one is to be tried again."""
        self.about = f"PGLEADERLOCK_SEED={self.seed}"
        self.rng = random.Random(self.seed)
        self.settings = dict(settings)
        self.nodes: dict[str, ElectionNode] = {}
        self.proxies: dict[str, Proxy] = {}
        self.fired: Counter[str] = Counter()
        self.reached: Counter[str] = Counter()
        """How often a fault of several steps struck the slowest node and came to its last step."""
        self.echoes: Counter[str] = Counter()
        """What became of the messages of leases that were sent once more."""
        self.promoted: Counter[bool] = Counter()
        """How often a standby was promoted, and whether the old server went on meanwhile."""
        self.calms_ns: list[int] = []
        """When every fault was over and every node was up, each time that was waited for."""
        self._lag = Lag()
        self._replicas = contextlib.ExitStack()
        self._replica = contextlib.ExitStack()
        """What belongs to the server, if that was promoted."""
        self._overheard: dict[str, deque[bytes]] = {name: deque(maxlen=ECHOES) for name in settings}
        self._under_way: set[asyncio.Task[None]] = set()
        self._database = asyncio.Lock()
        self._life = {name: asyncio.Lock() for name in settings}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await migrate(self.server.dsn)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._replicas.close)
            lag = asyncio.create_task(self._lag.run())
            stack.callback(lag.cancel)
            for name in self.settings:
                self.proxies[name] = proxy = await stack.enter_async_context(Proxy.to(self._way(name)))
                proxy.overhear = functools.partial(self._overhear, name)
                stack.push_async_callback(self._end, name)
                await self._start(name)
            try:
                await self.everybody_is_led()
                yield
                await self.calm()
            except BaseException as error:
                error.add_note(self._kept())
                raise

    def _kept(self) -> str:
        """Put everything that was written down where nobody tidies up, and say where."""
        folder = tempfile.mkdtemp(prefix=f"pgl-storm-{self.seed}-")
        shutil.copytree(self.log.path.parent, folder, dirs_exist_ok=True)
        return f"{self.about}; {dict(self.fired)}; what the nodes did and said is kept in {folder}"

    async def _start(self, name: str) -> None:
        dsn = self.proxies[name].dsn_for(self._way(name))
        self.nodes[name] = await start_node(dsn, name, self.roles, self.log.path, self.settings[name])

    def _way(self, name: str) -> str:
        return self.pooled if self.pooled and self.settings[name].get("hold") == "lease" else self.server.dsn

    async def _end(self, name: str) -> None:
        await self.nodes[name].end()

    # -- what the driver does

    async def faults(self, kinds: tuple[str, ...], total: int, lasting_s: float = 0.0) -> None:
        """A shuffled deck of all kinds, again and again: half of them while the one before is still in force.

        A run in which chance has spared the leaders goes on until there was a change for every three faults, at most
        for as many again. `lasting_s` is how long it goes on at least, however many faults that takes.
        """
        deck: list[str] = []
        begun_ns = boot_ns()
        for number in itertools.count():
            lasts = boot_ns() < begun_ns + lasting_s * 1e9
            if (
                number >= total
                and not lasts
                and (number >= 2 * total or self.changes() >= sum(self.fired.values()) / 3)
            ):
                break
            if not deck:
                deck = list(kinds)
                self.rng.shuffle(deck)
            await self.fault(deck.pop())
            if self.rng.random() < 0.5:
                await self.calm()
            else:
                await asyncio.sleep(self.rng.uniform(0.05, 0.8))

    async def fault(self, kind: str) -> None:
        """Begin a fault, mostly against whoever leads; it goes on by itself."""
        role = self.rng.choice(self.roles)
        leader = self.log.last(role)
        name = self.rng.choice(list(self.settings))
        if leader is not None and self.rng.random() < 0.85:
            name = leader.node
        self.fired[kind] += 1
        method: Callable[[str, str], Any] = getattr(self, f"_{kind}")
        task = asyncio.create_task(method(name, role), name=f"{kind} of {name}")
        self._under_way.add(task)

    async def calm(self) -> None:
        """Every fault is over, and every role is acted for again."""
        for task in list(self._under_way):
            async with asyncio.timeout(WAIT_S):
                await task
            self._under_way.discard(task)
        for node in self.nodes.values():
            await node.hears("started")
        self.calms_ns.append(boot_ns())
        await self.everybody_is_led()

    async def everybody_is_led(self) -> None:
        """Each role is acted for, and not just once."""
        for role in self.roles:
            for _ in range(SENDS_WHEN_CALM):
                await self.log.until(lambda send, role=role: send.role == role)  # type: ignore[misc]

    def changes(self) -> int:
        return self.log.changes_of_all()

    async def lets_lead(self, name: str) -> None:
        """Freeze the others until this one has led: for a node that chance has passed over."""
        others = [node for other, node in self.nodes.items() if other != name]
        for node in others:
            node.signal(signal.SIGSTOP)
        try:
            await self.log.until(lambda send: send.node == name)
        finally:
            for node in others:
                node.signal(signal.SIGCONT)

    async def replace(self, name: str, settings: Mapping[str, Any], *, killed: bool) -> None:
        """A node goes, by a drain or by force, and comes back with other settings."""
        self.settings[name] = settings
        await (self._kill if killed else self._drain)(name, "")

    # -- the faults

    def _lease_s(self, name: str) -> float:
        return float(self.settings[name]["session_lease_s"])

    def _for_s(self, name: str, shortest: float = 0.5, longest: float = 3.0) -> float:
        """So many times the node's T."""
        return self._lease_s(name) * self.rng.uniform(shortest, longest)

    async def _pause(self, name: str, role: str) -> None:
        node = self.nodes[name]
        node.signal(signal.SIGSTOP)
        await asyncio.sleep(self._for_s(name))
        node.signal(signal.SIGCONT)

    async def _kill(self, name: str, role: str) -> None:
        async with self._life[name]:
            await self.nodes[name].end()
            await asyncio.sleep(self.rng.uniform(0, 1))
            await self._start(name)

    async def _drain(self, name: str, role: str) -> None:
        async with self._life[name]:
            node = self.nodes[name]
            node.tell("drain")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WAIT_S / 2):
                    await node.process.wait()
            await node.end()
            await self._start(name)

    async def _step_down(self, name: str, role: str) -> None:
        self.nodes[name].tell("step_down", role)

    async def _block(self, name: str, role: str) -> None:
        duration_s = self._for_s(name)
        self.nodes[name].tell("block", duration_s)
        await asyncio.sleep(duration_s)

    async def _terminate(self, name: str, role: str) -> None:
        async with self._database:
            await end_sessions_of(self.server.dsn, name)

    async def _deaf(self, name: str, role: str) -> None:
        """Its loop is blocked while its session is ended: its gate is open, and it cannot hear that it has lost."""
        duration_s = self._for_s(name, 1.0, 2.0)
        await self._deafen(name, duration_s)
        await asyncio.sleep(duration_s)

    async def _deafen(self, name: str, duration_s: float) -> None:
        self.nodes[name].tell("block", duration_s)
        async with self._database:
            await end_sessions_of(self.server.dsn, name)

    async def _numb(self, name: str, role: str) -> None:
        """Frozen for a moment, in which its session is ended: it wakes while its gate may still be open."""
        node = self.nodes[name]
        node.signal(signal.SIGSTOP)
        async with self._database:
            await end_sessions_of(self.server.dsn, name)
        await asyncio.sleep(self.rng.uniform(0.05, 0.4))
        node.signal(signal.SIGCONT)

    # -- of several steps, for roles that one session has won at different times

    async def _scatter(self, name: str, role: str) -> None:
        """Ask for single roles to be handed to other nodes: sessions then lead some for long, and some since just now.

        Left to themselves, roles flock together with whoever tries most often.
        """
        async with self._database, await psycopg.AsyncConnection.connect(self.server.dsn, autocommit=True) as operator:
            for led in self.roles:
                await operator.execute(
                    "SELECT pgleaderlock.request_step_down(%s, 'pgleaderlock', %s, 'pgleaderlock')",
                    (led, self.rng.choice(list(self.settings))),
                )
            await operator.execute("SELECT pg_notify('pgleaderlock', 'requested')")

    async def _relay(self, name: str, role: str) -> None:
        """The slowest leader cannot hear that it has lost; its successor is lost as well, while it waits for it.

        In between, the successor wins a role that was released cleanly, and settles that one alone.
        """
        name, role = self._slowest_leader(name, role)
        duration_s, heard = self._lease_s(name), self._heard()
        await self._deafen(name, duration_s)
        successor = await self._winner([role], heard, but=[name])
        if successor is not None:
            idle, heard = [other for other in self.settings if other not in (name, successor)], self._heard()
            given = {led: other for other in idle for led in self._led_by(other)}
            for led, other in given.items():
                self.nodes[other].tell("step_down", led)
            if given and await self._winner(list(given), heard, but=[name, *idle]) is not None:
                await asyncio.sleep(self.rng.uniform(1, 2) * self.settings[successor]["heartbeat_interval_s"])
                self.reached["relay"] += name == self._slowest
            await self.rng.choice([self._terminate, self._kill, self._step_down])(successor, role)
        await asyncio.sleep(duration_s / 2)

    async def _win_back(self, name: str, role: str) -> None:
        """The slowest leader gives a role up and wins it back on the same session, which is ended before it beats."""
        name, role = self._slowest_leader(name, role)
        others = [node for other, node in self.nodes.items() if other != name]
        for node in others:
            node.signal(signal.SIGSTOP)
        try:
            heard = self._heard()
            self.nodes[name].tell("step_down", role)
            won = await self._winner([role], heard) is not None
        finally:
            for node in others:
                node.signal(signal.SIGCONT)
        self.reached["win_back"] += won and name == self._slowest
        await self._deaf(name, role)

    def _led_by(self, name: str) -> list[str]:
        """The roles for which this node was the last to act."""
        return [role for role in self.roles if (last := self.log.last(role)) is not None and last.node == name]

    @property
    def _slowest(self) -> str:
        return max(self.settings, key=self._lease_s)

    def _slowest_leader(self, name: str, role: str) -> tuple[str, str]:
        """The node with the longest T and a role that it leads; `name` and `role` if it leads none."""
        led = self._led_by(self._slowest)
        return (self._slowest, self.rng.choice(led)) if led else (name, role)

    def _heard(self) -> dict[ElectionNode, int]:
        """How much each node has said so far."""
        return {node: len(node.said) for node in self.nodes.values()}

    async def _winner(
        self, roles: Sequence[str], heard: Mapping[ElectionNode, int], but: Sequence[str] = ()
    ) -> str | None:
        """The node that has won one of these since then; None if that takes too long: other faults go on beside."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(map(self._lease_s, self.settings))):
                while True:
                    for name, node in self.nodes.items():
                        news = node.said[heard.get(node, 0) :]
                        if name not in but and any(m["what"] == "acquired" and m["role"] in roles for m in news):
                            return name
                    await asyncio.sleep(POLL_S)
        return None

    # -- of the network and the server

    async def _cut(self, name: str, role: str) -> None:
        self.proxies[name].cut()
        await asyncio.sleep(self._for_s(name))
        self.proxies[name].heal()

    async def _reset(self, name: str, role: str) -> None:
        self.proxies[name].reset()

    async def _delay(self, name: str, role: str) -> None:
        self.proxies[name].delay_s = self._lease_s(name) * self.rng.uniform(0.1, 0.6)
        await asyncio.sleep(self._for_s(name))
        self.proxies[name].heal()

    async def _drop_replies(self, name: str, role: str) -> None:
        self.proxies[name].drop_replies()
        await asyncio.sleep(self._for_s(name, 0.3, 1.5))
        self.proxies[name].heal()

    def _overhear(self, name: str, chunk: bytes) -> None:
        """Keep what a lease writes: a simple query begins with its kind and its length, and ends with a zero."""
        if chunk[:1] == b"Q" and int.from_bytes(chunk[1:5]) == len(chunk) - 1 and b"lease_begin" in chunk:
            self._overheard[name].append(chunk[5:-1])

    async def _echo(self, name: str, role: str) -> None:
        """The last messages of every lease arrive once more, late, in any order; some that were held back, twice."""
        messages = [message for heard in self._overheard.values() for message in heard]
        self.rng.shuffle(messages)
        await asyncio.sleep(self._for_s(name, 0.0, 1.5))
        async with self._database:
            while messages:  # anew where a connection was lost, which costs one of them
                with contextlib.suppress(psycopg.OperationalError):
                    async with await psycopg.AsyncConnection.connect(
                        self.pooled or self.server.dsn, autocommit=True, cursor_factory=psycopg.AsyncClientCursor
                    ) as pooler:
                        await self._send_again(pooler, messages)
                del messages[-1:]

    async def _send_again(self, pooler: psycopg.AsyncConnection[Any], messages: list[bytes]) -> None:
        while messages and not pooler.closed:
            try:
                await pooler.execute(messages.pop())
            except psycopg.Error as error:
                self.echoes[error.sqlstate or "lost"] += 1
            else:
                self.echoes["carried out"] += 1

    async def _restart(self, name: str, role: str) -> None:
        async with self._database:
            await asyncio.to_thread(self.server.restart, "immediate")

    async def _promote(self, name: str, role: str) -> None:
        """A standby becomes the server. It is synchronous, so nothing that was acknowledged is lost.

        The old server dies before that, or it lives on for a while and acknowledges nothing more. Poolers and proxies
        then lead to the new one.
        """
        async with self._database:
            replica, old = contextlib.ExitStack(), self.server
            self._replicas.callback(replica.close)
            new = await asyncio.to_thread(replica.enter_context, replica_of(old))
            belongs_to_old, self._replica = self._replica, replica
            await _wait_for_standbys(old.dsn)
            await asyncio.sleep(self._for_s(name, 0.0, 1.0))
            survives = self.rng.random() < 0.5
            if not survives:
                await asyncio.to_thread(old.stop, "immediate")
            await asyncio.to_thread(new.promote)
            self.server = new
            if survives:
                await asyncio.sleep(self._for_s(name, 0.0, 1.5))
            for other, proxy in self.proxies.items():
                if self._way(other) == new.dsn:
                    proxy.lead_to(new.dsn)
            if self.pooled is not None:
                pgbouncer.point_at(self.pooled, new.dsn)
                await self._tell_pooler("RELOAD")
            if survives:
                await asyncio.sleep(self._for_s(name, 0.0, 1.5))
                await asyncio.to_thread(old.stop, "immediate")
            self.promoted[survives] += 1
        await asyncio.to_thread(belongs_to_old.close)

    async def _pooler_stands(self, name: str, role: str) -> None:
        """PgBouncer hands nothing on for a while; what was sent meanwhile arrives late."""
        async with self._database:
            await self._tell_pooler("PAUSE")
            await asyncio.sleep(self._for_s(name, 0.3, 1.5))
            await self._tell_pooler("RESUME")

    async def _pooler_restarts(self, name: str, role: str) -> None:
        """PgBouncer is killed and started again."""
        async with self._database:
            await asyncio.to_thread(pgbouncer.restart, self.pooled or "")

    async def _tell_pooler(self, order: str) -> None:
        assert self.pooled is not None
        console = make_conninfo(self.pooled, dbname="pgbouncer")
        async with await psycopg.AsyncConnection.connect(
            console, autocommit=True, cursor_factory=psycopg.AsyncClientCursor
        ) as conn:
            await conn.execute(order.encode())

    async def _stall(self, name: str, role: str) -> None:
        """The whole server stands still for a while: nobody is told anything, and no lease runs out."""
        async with self._database:
            postmaster = self.server.postmaster_pid
            _send(signal.SIGSTOP, [postmaster])  # first, so that it has no more children
            pids = [postmaster, *_children(postmaster)]
            _send(signal.SIGSTOP, pids)
            await asyncio.sleep(self._for_s(name, 0.3, 1.5))
            _send(signal.SIGCONT, pids)

    # -- what came of it

    async def judge(self) -> None:
        """Nobody has acted after a newer epoch, no epoch was used twice, and no node was surprised by itself."""
        violations = self.log.violations()
        assert not violations, f"{len(violations)} acts after one of a newer epoch ({self.about}):\n" + "\n".join(
            f"{older} was {(older.before_ns - newer.after_ns) / 1e6:.1f} ms after {newer}"
            for older, newer in violations[:10]
        )
        # Before the ledger is asked: the nodes go on, and whoever has acted by now has won by then.
        acts = self.log.epochs_of_all()
        for role, acted in acts.items():
            terms = await self._terms(role)
            won = dict(terms)
            assert [epoch for epoch, _ in terms] == sorted(won), f"epochs of {role} do not increase ({self.about})"
            wrong = {epoch: holders for epoch, holders in acted.items() if holders != {won.get(epoch)}}
            assert not wrong, f"epochs of {role} were used by others than their winners: {wrong} ({self.about})"
        assert not (surprises := self._surprises()), f"{surprises} ({self.about})"

    def led_again(self) -> list[LedAgain]:
        """After each calm, how long it took until each role was acted for, as the acts themselves say."""
        found = []
        for role, sends in self.log.by_role().items():
            acts_ns = sorted(send.before_ns for send in sends)
            for calm_ns in self.calms_ns:
                act_ns = acts_ns[bisect.bisect_left(acts_ns, calm_ns)]
                found.append(LedAgain((act_ns - calm_ns) / 1e9, self._lag.between_s(calm_ns, act_ns), role))
        return found

    def figures(self) -> tuple[float, int]:
        """Sends a second, and changes of leader; printed as well."""
        sends, faults = self.log.read(), sum(self.fired.values())
        lasted_s = (max(send.after_ns for send in sends) - min(send.before_ns for send in sends)) / 1e9
        changes = self.changes()
        print(  # noqa: T201 - shown if the test fails, or with -s
            f"{self.about}\n{faults} faults in {lasted_s:.0f} s: {len(sends)} sends, {changes} changes of leader,"
            f" {sum(map(len, self.log.epochs_of_all().values()))} terms that acted;"
            f" sends by node {dict(Counter(send.node for send in sends))}; {dict(self.fired)};"
            f" old servers that lived on: {dict(self.promoted)}; echoes {dict(self.echoes)}"
        )
        return len(sends) / lasted_s, changes

    async def _terms(self, role: str) -> list[tuple[int, str]]:
        """Epoch and holder of every term, in the order in which they began."""
        async with await psycopg.AsyncConnection.connect(self.server.dsn) as look:
            cursor = await look.execute(
                "SELECT epoch, holder_identity FROM pgleaderlock.terms WHERE role = %s ORDER BY began_at", (role,)
            )
            return [(int(epoch), str(holder)) for epoch, holder in await cursor.fetchall()]

    def _surprises(self) -> list[str]:
        """What no node may ever have to say."""
        return [
            f"{name}: {line}"
            for name in self.settings
            for line in self.log.path.with_name(f"{name}.log").read_text().splitlines()
            if "unexpected_error" in line or line.startswith("Traceback")
        ]


KINDS = (
    *("pause", "kill", "drain", "step_down", "block", "terminate", "deaf", "numb"),
    *("cut", "reset", "delay", "drop_replies", "restart", "stall"),
)
POOLED_KINDS = (*KINDS, "pooler_stands", "pooler_restarts", "echo", "promote")
# For nodes that lead several roles; those that matter most come first.
SETTLING_KINDS = ("scatter", "relay", "win_back", "step_down", "deaf", "pause", "numb", "terminate", "kill")


async def end_sessions_of(dsn: str, node: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as dba:
        await dba.execute(
            "SELECT pg_terminate_backend(backend_pid) FROM pgleaderlock.sessions"
            " WHERE node_id = %s AND ended_at IS NULL",
            (node,),
        )


async def _wait_for_standbys(dsn: str) -> None:
    """From now on, the server acknowledges nothing that its standby has not written; nor is anything before missing.

    Backends do what the checkpointer has heard of. That it has shows in a commit that waits, for a standby that is not
    there; once it waits for the real one, that one has everything that was committed before.
    """
    async with (
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as dba,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as writer,
    ):

        async def wait_for(standbys: str) -> None:
            await dba.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{standbys}'".encode())
            await dba.execute("SELECT pg_reload_conf()")

        async def waits() -> bool:
            seen = await dba.execute(
                "SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event = 'SyncRep'", (writer.info.backend_pid,)
            )
            return seen.rowcount > 0

        commit = "SELECT pg_logical_emit_message(true, 'storm', 'is written')"
        async with asyncio.timeout(WAIT_S):
            await wait_for("nobody")
            committing = asyncio.ensure_future(writer.execute(commit))
            while not await waits():  # nothing announces it
                if committing.done():
                    committing = asyncio.ensure_future(writer.execute(commit))
                await asyncio.sleep(POLL_S)
            await wait_for("*")
            await committing


def _children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="utf-8").split()]


def _send(number: signal.Signals, pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
