"""`pgleaderlock demo`: three real nodes on a private PostgreSQL, a killed leader, a hand-over and a frozen one.

It shows a story and its figures. Every figure is measured between processes of this machine on the boot-time clock:
from just before the signal is sent, or from when the leader gets the request, to the first piece of the successor's
work.

It must never touch a database other than its own, and never leave a process or a folder behind: see `janitor`.
"""

import asyncio
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

import click

from pgleaderlock.cli.demo.cluster import Cluster, Node, Pace, TwoLeaders, Workplace
from pgleaderlock.cli.demo.screen import Screen, make_screen
from pgleaderlock.cli.output import EXIT_OK, exit_code_for_signal
from pgleaderlock.cli.service import Stopper
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.errors import PgLeaderLockError

__all__ = ["demo"]

NAMES = ("node-1", "node-2", "node-3")
# A server that lives for some seconds needs no durability.
SETTINGS = {"fsync": "off", "full_page_writes": "off", "max_connections": "20"}
PAUSE_S = 1.3
HINT = "Your turn, in two terminals: pgleaderlock run --embedded --name hello"
FAST = Pace(health_interval_s=0.2, health_timeout_s=1.0, session_lease_s=1.5)


class _Interrupted(Exception):
    """A signal has asked for the end."""


@dataclass
class Figures:
    """What was measured, in seconds."""

    failover_s: list[float] = field(default_factory=list)
    handover_s: list[float] = field(default_factory=list)
    replaced_s: list[float] = field(default_factory=list)
    woke_knowing: int = 0

    def rows(self, claims: int) -> Iterable[tuple[str, str]]:
        if self.failover_s:
            yield "leader killed", f"next one at work after {_shown(self.failover_s)}"
        if self.handover_s:
            yield "leader stepped down", f"next one at work after {_shown(self.handover_s)}"
        if self.replaced_s:
            yield "leader frozen", f"replaced after {_shown(self.replaced_s)}"
        if self.woke_knowing:
            yield "... and woken", "knew at its first instruction that it no longer led"
        yield "two leaders at once", f"never, in {claims} pieces of work"


@dataclass
class Story:
    """The acts, one after the other. `pause_s` gives people time to watch."""

    cluster: Cluster
    screen: Screen
    pace: Pace
    pause_s: float
    figures: Figures = field(default_factory=Figures)

    async def open(self) -> None:
        self.screen.tell("Three nodes start. Each is a process of its own with one connection, and wants to lead.")
        for name in NAMES:
            await self.cluster.start(name)
        await self._all_in_place()
        leader, others = await self._leader(), self._others()
        self.screen.tell(f"{leader.name} leads and works.", "bold green")
        self.screen.tell(
            f"{others} wait at the server, in line for the lock: hot standby (standby_wait_s), so a failover takes "
            "milliseconds."
        )
        await self.cluster.watch(self.pause_s)

    async def play(self) -> None:
        await self._kill()
        await self._hand_over()
        await self._freeze()

    async def _kill(self) -> None:
        victim = await self._leader()
        self.screen.tell(f"kill -9: {victim.name}, the leader, dies without a word.", "bold red")
        killed_at = self.cluster.kill(victim)
        heir = await self._successor_of(victim)
        took_s = heir.leads_since - killed_at
        self.figures.failover_s.append(took_s)
        self.screen.tell(f"{heir.name} leads, {_time(took_s)} after the kill.", "bold green")
        await self.cluster.watch(self.pause_s)
        await self.cluster.start(victim.name)
        await self._all_in_place()
        self.screen.tell(f"{victim.name} is back as a new process, and waits in line.")
        await self.cluster.watch(self.pause_s / 2)

    async def _hand_over(self) -> None:
        former = await self._leader()
        self.screen.tell(f"{former.name} is asked to step down.")
        self.cluster.step_down(former)
        heir = await self._successor_of(former)
        await self.cluster.until(lambda: former.asked_at is not None, f"{former.name} says when it was asked")
        assert former.asked_at is not None
        took_s = heir.leads_since - former.asked_at
        self.figures.handover_s.append(took_s)
        self.screen.tell(f"{heir.name} leads, {_time(took_s)} after the request.", "bold green")
        await self.cluster.watch(self.pause_s)
        await self._all_in_place()

    async def _freeze(self) -> None:
        sleeper = await self._leader()
        self.screen.tell(f"kill -STOP: {sleeper.name} freezes. It holds the lock, and does not know that time passes.")
        frozen_at = self.cluster.freeze(sleeper)
        heir = await self._successor_of(sleeper)
        took_s = heir.leads_since - frozen_at
        self.figures.replaced_s.append(took_s)
        self.screen.tell(
            f"{heir.name} leads after {_time(took_s)}: the server drops a leader "
            f"{self.pace.session_lease_s:g} s after its last sign of life (session_lease_s).",
            "bold green",
        )
        await self.cluster.watch(self.pause_s / 2)
        self.cluster.thaw(sleeper)
        await self.cluster.until(lambda: sleeper.woke is not None, f"{sleeper.name} wakes up")
        assert sleeper.woke is not None
        if sleeper.woke["is_leader"]:
            raise TwoLeaders(f"two leaders at once: {sleeper.name} woke up and said that it leads")
        self.figures.woke_knowing += 1
        self.screen.tell(
            f"kill -CONT: {sleeper.name} wakes. At its first instruction is_leader is False, by the clock alone: news "
            "of the loss had no time to reach it."
        )
        await self._all_in_place()
        self.screen.tell(f"{sleeper.name} waits in line again.")
        await self.cluster.watch(self.pause_s / 2)

    async def _all_in_place(self) -> None:
        def in_place() -> bool:
            return self.cluster.leader() is not None and all(
                node.leads or node.stands_by for node in self.cluster.nodes.values()
            )

        await self.cluster.until(in_place, "one node leads and the others wait")

    async def _successor_of(self, former: Node) -> Node:
        await self.cluster.until(lambda: self.cluster.successor_of(former), f"another node than {former.name} leads")
        heir = self.cluster.successor_of(former)
        assert heir is not None
        return heir

    async def _leader(self) -> Node:
        # If the machine has hung for a second, leadership may have moved by itself.
        await self.cluster.until(self.cluster.leader, "a node leads")
        leader = self.cluster.leader()
        assert leader is not None
        return leader

    def _others(self) -> str:
        return " and ".join(node.name for node in self.cluster.nodes.values() if not node.leads)


@click.command(short_help="Watch three nodes elect a leader and survive its death.")
@click.option("--forever", is_flag=True, help="Keep playing until Ctrl-C.")
@click.option("--fast", is_flag=True, hidden=True, help="Without pauses, for tests.")
def demo(forever: bool, fast: bool) -> int:
    """Three nodes on a private PostgreSQL: watch them elect a leader and survive its death.

    Takes some ten seconds, needs no database and leaves nothing behind. Exit code 1 means that two nodes led at the
    same time, 2 that something else went wrong.
    """
    screen = make_screen()
    with Stopper() as stopper:
        try:
            story = _run(screen, stopper, forever=forever, fast=fast)
        except _Interrupted:
            assert stopper.signum is not None
            screen.tell("Interrupted. Everything that was started is gone.")
            return exit_code_for_signal(stopper.signum)
    screen.sum_up("Summary", story.figures.rows(story.cluster.claims.count), HINT)
    return EXIT_OK


def _run(screen: Screen, stopper: Stopper, *, forever: bool, fast: bool) -> Story:
    pace, pause_s = (FAST, 0.0) if fast else (Pace(), PAUSE_S)
    try:
        with Workplace() as place:
            screen.tell("A private PostgreSQL starts, in a folder that goes away at the end.")
            with EmbeddedPostgres(place.server_folder, settings=SETTINGS) as server:
                screen.tell(f"PostgreSQL {server.version} is ready.")
                story = Story(Cluster(place, server.dsn, pace), screen, pace, pause_s)
                return asyncio.run(_tell(story, stopper, forever=forever))
    except PgLeaderLockError as error:
        # A Ctrl-C at a terminal reaches PostgreSQL's programs as well, so their failure is expected then.
        if stopper.signum is not None and not isinstance(error, TwoLeaders):
            raise _Interrupted from error
        raise


async def _tell(story: Story, stopper: Stopper, *, forever: bool) -> Story:
    try:
        ended = await stopper.unless_asked(_play(story, forever=forever))
    finally:
        await story.cluster.close()
    if not ended and not (forever and story.figures.failover_s):
        raise _Interrupted
    return story


async def _play(story: Story, *, forever: bool) -> None:
    with story.screen.showing(story.cluster.nodes):
        await story.open()
        await story.play()
        while forever:
            await story.play()


def _shown(durations_s: list[float]) -> str:
    if len(durations_s) == 1:
        return _time(durations_s[0])
    median_s, worst_s = statistics.median(durations_s), max(durations_s)
    return f"{_time(median_s)} (median of {len(durations_s)}, worst {_time(worst_s)})"


def _time(duration_s: float) -> str:
    return f"{duration_s * 1000:.1f} ms" if duration_s < 1 else f"{duration_s:.2f} s"
