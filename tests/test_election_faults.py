"""Nobody acts twice: nodes that are real processes, on a real server, under every fault there is a way to cause.

Each node acts through its gates and writes each act to a file outside the database, with the boot-time clock read
before and after the gate was asked. The judge (`SendLog.violations`) looks for an act that was certainly after one of
a newer epoch. A run that saw too little fails as well, and a run of a broken protocol must be caught.
"""

import asyncio
import contextlib
import os
import random
import signal
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest

from conftest import StartServer
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.migrate import migrate
from proxy import Proxy
from support.counts import count
from support.election_node import WAIT_S, ElectionNode, Send, SendLog, election_node, start_node

# G, T and intervals that differ from node to node, all of them short.
QUICK = {"heartbeat_interval_s": 0.2, "late_threshold_s": 0.5, "session_lease_s": 0.8, "acquire_delay_s": (0.05, 0.2)}
MIDDLE = {"heartbeat_interval_s": 0.3, "late_threshold_s": 0.6, "session_lease_s": 0.9, "acquire_delay_s": (0.05, 0.2)}
SLOW = {"heartbeat_interval_s": 0.5, "late_threshold_s": 1.0, "session_lease_s": 1.6, "acquire_delay_s": (0.05, 0.3)}
PATIENT = {"heartbeat_interval_s": 1.0, "late_threshold_s": 3.0, "session_lease_s": 4.0}


def fresh_role() -> str:
    return f"role-{uuid.uuid4()}"


@pytest.fixture
async def ledger(dsn: str) -> str:
    """The DSN of a server that has the ledger."""
    await migrate(dsn)
    return dsn


@pytest.fixture
def log(tmp_path: Path) -> SendLog:
    return SendLog(tmp_path / "sends")


# --- What was asked of the gate in the first place, one fault at a time


async def test_of_two_nodes_one_sends(ledger: str, log: SendLog) -> None:
    role = fresh_role()
    async with election_node(ledger, "a", role, log.path, **MIDDLE) as a:
        first = await log.until(lambda send: True)
        async with election_node(ledger, "b", role, log.path, **QUICK) as b:
            await b.hears("started")
            # Several times the longest T: whoever could act by mistake has had the time for it.
            await log.until(lambda send: send.before_ns > first.before_ns + 3 * 10**9)
            asked = await b.asked("ask")
            assert (asked["epoch"], asked["reason"], asked["state"]) == (None, "never_led", "follower")
            assert (await a.asked("ask"))["epoch"] == first.epoch
    assert {(send.node, send.epoch) for send in log.read()} == {("a", first.epoch)}
    assert len(log.sends) > 100


async def test_when_the_leader_is_killed_another_sends_under_a_newer_epoch(ledger: str, log: SendLog) -> None:
    role = fresh_role()
    async with election_node(ledger, "a", role, log.path, **MIDDLE) as a:
        first = await log.until(lambda send: True)
        async with election_node(ledger, "b", role, log.path, **QUICK) as b:
            await b.hears("started")
            a.signal(signal.SIGKILL)
            second = await log.until(lambda send: send.node == "b")
    assert second.epoch > first.epoch
    assert log.violations() == []


async def test_after_a_restart_of_the_database_one_sends_under_a_newer_epoch(
    throwaway_postgres: StartServer, log: SendLog
) -> None:
    server = throwaway_postgres()
    await migrate(server.dsn)
    role = fresh_role()
    async with (
        election_node(server.dsn, "a", role, log.path, **MIDDLE),
        election_node(server.dsn, "b", role, log.path, **QUICK),
    ):
        first = await log.until(lambda send: True)
        for mode in ("fast", "immediate"):
            await asyncio.to_thread(server.restart, mode)
            first = await log.until(lambda send, before=first: send.epoch > before.epoch)  # type: ignore[misc]
    assert log.violations() == []


async def test_a_frozen_leader_is_refused_by_its_gate_before_its_loop_has_run(ledger: str, log: SendLog) -> None:
    role = fresh_role()
    async with election_node(ledger, "a", role, log.path, **MIDDLE) as a:
        await log.until(lambda send: True)
        async with election_node(ledger, "b", role, log.path, **QUICK) as b:
            await b.hears("started")
            since = len(a.said)
            a.tell("freeze")
            await log.until(lambda send: send.node == "b")
            a.signal(signal.SIGCONT)
            thawed = await a.hears("freeze", since=since)
            assert (thawed["epoch"], thawed["reason"]) == (None, "late_heartbeat")
            await log.until(lambda send: send.node == "b")
    assert log.violations() == []


async def test_a_leader_with_a_blocked_loop_is_shut_out_by_the_clock(ledger: str, log: SendLog) -> None:
    """Its thread goes on asking, and nothing but the clock can tell it that it is no longer to act."""
    role = fresh_role()
    async with election_node(ledger, "a", role, log.path, **MIDDLE) as a:
        await log.until(lambda send: True)
        async with election_node(ledger, "b", role, log.path, **QUICK) as b:
            await b.hears("started")
            since = len(a.said)
            a.tell("block", 3)
            await log.until(lambda send: send.node == "b")
            blocked = await a.hears("block", since=since)
            assert (blocked["epoch"], blocked["reason"]) == (None, "late_heartbeat")
            await log.until(lambda send: send.node == "b")
    assert log.violations() == []


async def test_with_a_heartbeat_thread_a_blocked_loop_does_not_lose_the_term(ledger: str, log: SendLog) -> None:
    role = fresh_role()
    async with election_node(ledger, "a", role, log.path, **MIDDLE, heartbeat_thread=True) as a:
        first = await log.until(lambda send: True)
        async with election_node(ledger, "b", role, log.path, **QUICK) as b:
            await b.hears("started")
            for _ in range(2):
                blocked = await a.asked("block", 2)
                assert (blocked["epoch"], blocked["reason"]) == (first.epoch, None)
    assert {(send.node, send.epoch) for send in log.read()} == {("a", first.epoch)}


async def test_a_clean_handover_lets_the_next_one_send_and_nobody_act_twice(ledger: str, log: SendLog) -> None:
    role = fresh_role()
    async with election_node(ledger, "a", role, log.path, **MIDDLE) as a:
        first = await log.until(lambda send: True)
        async with election_node(ledger, "b", role, log.path, **QUICK) as b:
            await b.hears("started")
            await a.asked("step_down")
            second = await log.until(lambda send: send.node == "b")
            await b.asked("drain")
            await b.end(kill=False)
            third = await log.until(lambda send: send.node == "a")
    assert first.epoch < second.epoch < third.epoch
    assert log.violations() == []


# --- What a leader leaves behind that cannot hear that it has lost


async def deafen(dsn: str, node: ElectionNode, duration_s: float) -> None:
    """Block its loop and end its session: its gate stays open until its deadline, and it does not know better."""
    node.tell("block", duration_s)
    await end_sessions_of(dsn, node.name)


async def end_sessions_of(dsn: str, node: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as dba:
        await dba.execute(
            "SELECT pg_terminate_backend(backend_pid) FROM pgleaderlock.sessions"
            " WHERE node_id = %s AND ended_at IS NULL",
            (node,),
        )


async def test_an_election_that_is_started_again_still_waits_for_its_predecessor(ledger: str, log: SendLog) -> None:
    """A process that follows itself does not wait for itself, but for whom it was waiting."""
    role = fresh_role()
    async with election_node(ledger, "a", role, log.path, **PATIENT) as a:
        await log.until(lambda send: True)
        async with election_node(ledger, "b", role, log.path, **QUICK) as b:
            await b.hears("started")
            await deafen(ledger, a, PATIENT["session_lease_s"])
            await b.hears("acquired")
            assert (await b.asked("ask"))["reason"] == "waiting"
            await b.asked("again")
            await log.until(lambda send: send.node == "b")
            await a.hears("block")
    assert log.violations() == []


@pytest.mark.parametrize("handover", ["step_down", "kill"])
async def test_two_who_wait_exclude_each_other_though_one_who_does_not_led_in_between(
    ledger: str, log: SendLog, handover: str
) -> None:
    role = fresh_role()
    async with (
        election_node(ledger, "a", role, log.path, **PATIENT) as a,
        election_node(ledger, "instant", role, log.path, **QUICK, takeover="instant") as instant,
    ):
        await a.hears("started")
        await instant.hears("started")
        while (await log.until(lambda send: True)).node != "a":
            await instant.asked("step_down")
        await deafen(ledger, a, PATIENT["session_lease_s"])
        await log.until(lambda send: send.node == "instant")
        async with election_node(ledger, "c", role, log.path, **QUICK) as c:
            await c.hears("started")
            if handover == "kill":
                instant.signal(signal.SIGKILL)
            else:
                await instant.asked("step_down")
            await log.until(lambda send: send.node == "c")
            await a.hears("block")
    assert log.violations(without="instant") == []


# --- All of them at once


class Storm:
    """Three nodes with different settings, two roles, each node behind a proxy of its own; and the faults."""

    ROLES = ("mail", "bills")

    def __init__(
        self, server: EmbeddedPostgres, log: SendLog, seed: int, settings: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self.server, self.log = server, log
        self.rng = random.Random(seed)
        self.settings = settings
        self.nodes: dict[str, ElectionNode] = {}
        self.proxies: dict[str, Proxy] = {}
        self.fired: Counter[str] = Counter()
        self._under_way: set[asyncio.Task[None]] = set()
        self._database = asyncio.Lock()
        self._life = {name: asyncio.Lock() for name in settings}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await migrate(self.server.dsn)
        async with contextlib.AsyncExitStack() as stack:
            for name in self.settings:
                self.proxies[name] = await stack.enter_async_context(Proxy.to(self.server.dsn))
                stack.push_async_callback(self._end, name)
                await self._start(name)
            await self.everybody_is_led()
            yield
            await self.calm()

    async def _start(self, name: str) -> None:
        dsn = self.proxies[name].dsn_for(self.server.dsn)
        self.nodes[name] = await start_node(dsn, name, self.ROLES, self.log.path, self.settings[name])

    async def _end(self, name: str) -> None:
        await self.nodes[name].end()

    # -- what the driver does

    async def faults(self, kinds: tuple[str, ...], total: int) -> None:
        """A shuffled deck of all kinds, again and again: half of them while the one before is still in force."""
        deck: list[str] = []
        for _ in range(total):
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
        role = self.rng.choice(self.ROLES)
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
        await self.everybody_is_led()

    async def everybody_is_led(self) -> None:
        for role in self.ROLES:
            await self.log.until(lambda send, role=role: send.role == role)  # type: ignore[misc]

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
        self.nodes[name].tell("block", duration_s)
        async with self._database:
            await end_sessions_of(self.server.dsn, name)
        await asyncio.sleep(duration_s)

    async def _numb(self, name: str, role: str) -> None:
        """Frozen for a moment, in which its session is ended: it wakes while its gate may still be open."""
        node = self.nodes[name]
        node.signal(signal.SIGSTOP)
        async with self._database:
            await end_sessions_of(self.server.dsn, name)
        await asyncio.sleep(self.rng.uniform(0.05, 0.4))
        node.signal(signal.SIGCONT)

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

    async def _restart(self, name: str, role: str) -> None:
        async with self._database:
            await asyncio.to_thread(self.server.restart, "immediate")

    # -- what came of it

    async def terms(self, role: str) -> list[tuple[int, str]]:
        """Epoch and holder of every term, in the order in which they began."""
        async with await psycopg.AsyncConnection.connect(self.server.dsn) as look:
            cursor = await look.execute(
                "SELECT epoch, holder_identity FROM pgleaderlock.terms WHERE role = %s ORDER BY began_at", (role,)
            )
            return [(int(epoch), str(holder)) for epoch, holder in await cursor.fetchall()]

    def unexpected(self) -> list[str]:
        """What no node may ever have to say."""
        return [
            f"{name}: {line}"
            for name in self.settings
            for line in self.log.path.with_name(f"{name}.log").read_text().splitlines()
            if "unexpected_error" in line or line.startswith("Traceback")
        ]


KINDS = (
    *("pause", "kill", "drain", "step_down", "block", "terminate", "deaf", "numb"),
    *("cut", "reset", "delay", "drop_replies", "restart"),
)


def seed() -> int:
    """A new one each time, unless one is to be tried again: PGLEADERLOCK_SEED."""
    return int(os.environ.get("PGLEADERLOCK_SEED") or random.SystemRandom().randrange(2**32))


def shown(violations: list[tuple[Send, Send]]) -> str:
    return "\n".join(
        f"{older} was {(older.before_ns - newer.after_ns) / 1e6:.1f} ms after {newer}"
        for older, newer in violations[:10]
    )


@pytest.mark.timeout(1800)
async def test_nobody_acts_after_a_newer_epoch_whatever_goes_wrong(
    throwaway_postgres: StartServer, log: SendLog, request: pytest.FixtureRequest
) -> None:
    total, chosen = count(len(KINDS), 200), seed()
    settings = {"quick": QUICK, "middle": MIDDLE, "slow": {**SLOW, "heartbeat_thread": True}}
    storm = Storm(throwaway_postgres(), log, chosen, settings)
    about = f"PGLEADERLOCK_SEED={chosen}, the logs are in {log.path.parent}"
    print(about)  # noqa: T201 - shown if the test fails
    async with storm.running():
        await storm.faults(KINDS, total)
        await storm.calm()
        for name in set(settings) - {send.node for send in log.read()}:
            await storm.lets_lead(name)
        terms = {role: await storm.terms(role) for role in storm.ROLES}
    sends = log.read()
    violations = log.violations()
    assert not violations, f"{len(violations)} acts after one of a newer epoch ({about}):\n{shown(violations)}"
    for role in storm.ROLES:
        acted, won = log.epochs(role), dict(terms[role])
        assert [epoch for epoch, _ in terms[role]] == sorted(won), f"the epochs of {role} do not increase ({about})"
        assert {epoch: {won[epoch]} for epoch in acted} == acted, f"an epoch of {role} was used by another ({about})"
    assert storm.unexpected() == [], about
    # Against an empty proof.
    lasted_s = (max(send.after_ns for send in sends) - min(send.before_ns for send in sends)) / 1e9
    changes = sum(log.changes(role) for role in storm.ROLES)
    print(  # noqa: T201
        f"{total} faults in {lasted_s:.0f} s: {len(sends)} sends ({len(sends) / lasted_s:.0f}/s), {changes} changes of"
        f" leader, {sum(len(found) for found in terms.values())} terms; {dict(Counter(send.node for send in sends))}"
    )
    assert len(sends) / lasted_s > 50, about
    assert changes >= total / 3, about
    assert set(storm.fired) == set(KINDS), about
    assert {send.node for send in sends} == set(settings), about


@pytest.mark.timeout(300)
async def test_the_same_storm_catches_leaders_that_do_not_wait_for_their_predecessor(
    throwaway_postgres: StartServer, log: SendLog
) -> None:
    chosen = seed()
    broken = {"takeover": "instant"}
    settings = {"quick": {**QUICK, **broken}, "middle": {**MIDDLE, **broken}, "slow": {**SLOW, **broken}}
    storm = Storm(throwaway_postgres(), log, chosen, settings)
    async with storm.running():
        for _ in range(5):
            await storm.faults(("deaf", "restart", "deaf"), 3)
            await storm.calm()
            if log.violations():
                return
    pytest.fail(f"nobody was seen to act twice: the judge is blind (PGLEADERLOCK_SEED={chosen}, {log.path.parent})")
