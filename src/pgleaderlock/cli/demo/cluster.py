"""The demo's nodes, from their parent's side: `Cluster` starts, kills, freezes and watches them, `Claims` checks them.

A node reports what it does in JSON lines; the parent uses nothing else. The parent must never read the database, and
never decide who leads. `Workplace` is the temporary folder, which is removed at the end.
"""

import asyncio
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import pgleaderlock
from pgleaderlock._base.clock import BOOT_CLOCK
from pgleaderlock.cli.demo import janitor
from pgleaderlock.cli.output import EXIT_NO
from pgleaderlock.embedded.reaper import REAPER_LOCK
from pgleaderlock.errors import PgLeaderLockError

__all__ = ["Claims", "Cluster", "DemoFailed", "Node", "Overlap", "Pace", "TwoLeaders", "Workplace"]

PATIENCE_S = 30.0
END_TIMEOUT_S = 4.0
SERVER = "server"
LOCK = "demo"
# How many terms are remembered. An overlap is found while both are recent.
TERMS_MAX = 100
_SAID_BYTES_MAX = 2000


class DemoFailed(PgLeaderLockError):
    """Something did not happen in time, or a node died that should not have."""


class TwoLeaders(PgLeaderLockError):
    """Two nodes led at the same time, which must never happen."""

    exit_code = EXIT_NO


class Workplace:
    """A temporary folder, and the janitor process that removes it however the demo ends."""

    def __init__(self) -> None:
        parent, mode = _folder_for_server()
        self._janitor = subprocess.Popen(
            [sys.executable, "-I", "-S", janitor.__file__, parent, mode, f"{SERVER}/{REAPER_LOCK}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        assert self._janitor.stdout is not None
        line = self._janitor.stdout.readline()
        if not line:
            self._leave()
            raise DemoFailed(f"no temporary folder could be made in {parent}: set TMPDIR to one that is writable")
        self.folder = Path(os.fsdecode(line.rstrip(b"\n")))
        self.server_folder = self.folder / SERVER
        self.group = self._janitor.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._leave()

    def _leave(self) -> None:
        assert self._janitor.stdin is not None
        assert self._janitor.stdout is not None
        self._janitor.stdin.close()
        self._janitor.stdout.read()  # Ends when the janitor has done its work.
        self._janitor.stdout.close()
        self._janitor.wait()


def _folder_for_server() -> tuple[str, str]:
    """Where to make the folder, and with which permissions."""
    parent = Path(tempfile.gettempdir()).resolve()
    if os.geteuid() != 0:
        return str(parent), "700"
    # PostgreSQL does not run as root. The account that it runs as must be able to pass through.
    open_to_all = all(folder.stat().st_mode & stat.S_IXOTH for folder in (parent, *parent.parents))
    return str(parent) if open_to_all else "/tmp", "711"  # noqa: S108 - the janitor uses mkdtemp.


@dataclass(frozen=True)
class Pace:
    """The timing of the nodes' lock. It is short, because people are watching."""

    health_interval_s: float = 0.5
    health_timeout_s: float = 1.0
    session_lease_s: float = 2.5
    standby_wait_s: float = 30.0


class Node:
    """One node process, and what it has reported so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = 0
        self.state = "starting"
        self.claims = 0
        self.asked_at: float | None = None
        self.woke: Mapping[str, Any] | None = None
        self.frozen = False
        self.ended: str | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.leads_since = 0.0
        """The first claim of its term; 0 when it does not lead."""

    @property
    def alive(self) -> bool:
        return self.ended is None and not self.frozen

    @property
    def leads(self) -> bool:
        return self.alive and self.leads_since > 0

    @property
    def stands_by(self) -> bool:
        """Is it in hot standby? Then an attempt is under way and waits at the server."""
        return self.alive and self.state == "acquiring"


class Cluster:
    """All nodes, and what they have claimed."""

    def __init__(self, place: Workplace, dsn: str, pace: Pace) -> None:
        self.nodes: dict[str, Node] = {}
        self.claims = Claims()
        self._place = place
        self._dsn = dsn
        self._pace = pace
        self._news = asyncio.Event()
        self._overlap: Overlap | None = None
        self._readers: set[asyncio.Task[None]] = set()

    # --- Actions on nodes

    async def start(self, name: str) -> Node:
        self.nodes[name] = node = Node(name)
        package = Path(pgleaderlock.__file__).parent.parent
        path = os.pathsep.join(part for part in (str(package), os.environ.get("PYTHONPATH")) if part)
        with self._said(node).open("ab") as said:
            node.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "pgleaderlock.cli.demo.node"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env={**os.environ, "PYTHONPATH": path},
                process_group=self._place.group,
            )
        node.pid = node.process.pid
        self._send(node, {"dsn": self._dsn, "lock": LOCK, **asdict(self._pace)})
        reader = asyncio.ensure_future(self._listen(node))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        return node

    def kill(self, node: Node) -> float:
        """Send SIGKILL; returns the clock just before it."""
        node.ended = "killed"
        return self._signal(node, signal.SIGKILL)

    def freeze(self, node: Node) -> float:
        """Send SIGSTOP; returns the clock just before it."""
        node.frozen = True
        node.woke = None
        node.leads_since = 0.0
        return self._signal(node, signal.SIGSTOP)

    def thaw(self, node: Node) -> float:
        """Send SIGCONT; returns the clock just before it."""
        node.frozen = False
        return self._signal(node, signal.SIGCONT)

    def step_down(self, node: Node) -> None:
        node.asked_at = None
        self._send(node, {"do": "step_down"})

    # --- Watching nodes

    def leader(self) -> Node | None:
        """The node whose term began last, among those that report that they lead."""
        return max(
            (node for node in self.nodes.values() if node.leads), key=lambda node: node.leads_since, default=None
        )

    def successor_of(self, former: Node) -> Node | None:
        leader = self.leader()
        return None if leader is former else leader

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until the condition holds. Raises when a node has died, or two have led at once."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not self._checked(condition):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise DemoFailed(f"timed out after {PATIENCE_S:g} s, waiting until {what}{self._last_output()}") from None

    async def watch(self, pause_s: float) -> None:
        """Let time pass. Raises as `until` does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                while self._checked(lambda: True):
                    self._news.clear()
                    await self._news.wait()

    async def close(self) -> None:
        """End every node: first by the end of its input, then by SIGKILL."""
        ends = []
        for node in self.nodes.values():
            if node.process is not None and node.process.returncode is None:
                node.ended = node.ended or "ended"
                if node.frozen:
                    self.thaw(node)
                if node.process.stdin is not None:
                    node.process.stdin.close()
                ends.append(asyncio.ensure_future(node.process.wait()))
        if ends:
            await asyncio.wait(ends, timeout=END_TIMEOUT_S)
        for node in self.nodes.values():
            if node.process is not None and node.process.returncode is None:
                node.process.kill()
        await asyncio.gather(*ends, *self._readers)

    # --- Inside

    def _checked(self, condition: Callable[[], object]) -> bool:
        if self._overlap is not None:
            raise TwoLeaders(f"two leaders at once: {self._overlap}")
        for node in self.nodes.values():
            if node.ended == "died":
                raise DemoFailed(f"{node.name} has ended by itself{self._last_output(node)}")
        return bool(condition())

    def _signal(self, node: Node, signum: int) -> float:
        assert node.process is not None
        at = BOOT_CLOCK.now()
        node.process.send_signal(signum)
        self._news.set()
        return at

    def _send(self, node: Node, message: Mapping[str, object]) -> None:
        assert node.process is not None
        assert node.process.stdin is not None
        node.process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _listen(self, node: Node) -> None:
        assert node.process is not None
        assert node.process.stdout is not None
        while line := await node.process.stdout.readline():
            self._hear(node, json.loads(line))
            self._news.set()
        node.ended = node.ended or "died"
        await node.process.wait()
        self._news.set()

    def _hear(self, node: Node, said: Mapping[str, Any]) -> None:
        match said["event"]:
            case "state":
                node.state = said["state"]
                if node.state != "leader":
                    node.leads_since = 0.0
            case "claim" if said["first"]:
                node.leads_since = said["after"]
                node.claims += 1
                self.claims.begin(node.name, said["after"])
            case "claim":
                node.claims += 1
                self._overlap = self._overlap or self.claims.repeat(node.name, said["before"])
            case "asked":
                node.asked_at = said["at"]
            case "woke":
                node.woke = said

    def _said(self, node: Node) -> Path:
        return self._place.folder / f"{node.name}.log"

    def _last_output(self, node: Node | None = None) -> str:
        for each in [node] if node is not None else self.nodes.values():
            text = self._said(each).read_bytes()[-_SAID_BYTES_MAX:].decode(errors="replace")
            if words := " | ".join(line.strip() for line in text.splitlines() if line.strip()):
                return f"; the last output of {each.name}: {words}"
        return ""


@dataclass
class _Term:
    holder: str
    began_at: float
    last_at: float


@dataclass(frozen=True)
class Overlap:
    """Two nodes led for at least `seconds` at the same time."""

    one: str
    other: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.one} and {self.other} both said that they lead, for {self.seconds * 1000:.1f} ms at least"


class Claims:
    """Decides from the nodes' reports, and the times in them, whether two nodes ever led at the same time.

    Each claim carries two readings of the machine's clock, one before the node asked its lock and one after. So a term
    lasts at least from the second reading of its first claim to the first reading of its last one. If these certain
    parts of two terms of different nodes overlap, two nodes led at once. Less than that is rounding, and not reported.
    """

    def __init__(self) -> None:
        self.count = 0
        self._terms: list[_Term] = []

    def begin(self, holder: str, after: float) -> None:
        """The first claim of a term; `after` is the clock after the node asked its lock."""
        self.count += 1
        self._terms.append(_Term(holder, after, after))
        del self._terms[:-TERMS_MAX]

    def repeat(self, holder: str, before: float) -> Overlap | None:
        """A later claim of the holder's newest term; `before` is the clock before the node asked its lock."""
        self.count += 1
        term = next(term for term in reversed(self._terms) if term.holder == holder)
        term.last_at = max(term.last_at, before)
        for other in self._terms:
            shared_s = min(term.last_at, other.last_at) - max(term.began_at, other.began_at)
            if other.holder != holder and shared_s > 0:
                return Overlap(holder, other.holder, shared_s)
        return None
