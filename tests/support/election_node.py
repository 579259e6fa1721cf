"""A node of an election as a real process that acts through its gates, and the judge of what all of them have done.

Run as a script it is the node: a thread of its own asks each role's gate, and for each leave it gets appends one line
to a file outside the database, with the boot-time clock read before and after the gate was asked. It obeys a few words
on its standard input and ends when that closes, so that no test leaves one behind. Imported, `ElectionNode` is the
test's end of it, and `SendLog` reads and judges the file.

The judge needs no trust in anybody's order: an act of an older epoch is a violation only if it was *certainly* after
one of a newer epoch, that is, if its gate was asked after the other one's had answered.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pgleaderlock import LeaderElection, LeaderToken, NotLeader
from pgleaderlock.probes import ProbeServer

__all__ = ["SEND_GAP_S", "WAIT_S", "ElectionNode", "Send", "SendLog", "boot_ns", "election_node"]

# A bound against hanging, never a measure.
WAIT_S = 30.0
POLL_S = 0.02
SEND_GAP_S = 0.002


def boot_ns() -> int:
    """The clock of all acts."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


# --- The test's end


class ElectionNode:
    """One node process as the test sees it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.said: list[dict[str, Any]] = []
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def hears(self, what: str, *, since: int = 0, **fields: Any) -> dict[str, Any]:
        """The first line from number `since` on that says `what`, with these fields."""

        def found() -> dict[str, Any] | None:
            for message in self.said[since:]:
                if message["what"] == what and all(message.get(key) == value for key, value in fields.items()):
                    return message
            return None

        await self.until(lambda: found() is not None)
        message = found()
        assert message is not None
        return message

    async def until(self, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        """Wait until the condition holds; it is looked at whenever the node has said something."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                assert not self._reading.done(), f"node {self.name} has ended; it had said {self.said[-20:]}"
                self._news.clear()
                await self._news.wait()

    def acquired(self) -> dict[str, int]:
        """The roles that it has won, and when it last did."""
        return {message["role"]: message["at_ns"] for message in self.said if message["what"] == "acquired"}

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((" ".join(str(word) for word in words) + "\n").encode())

    async def asked(self, *words: object) -> dict[str, Any]:
        """Tell it something, and what it answers."""
        since = len(self.said)
        self.tell(*words)
        return await self.hears(str(words[0]), since=since)

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def end(self, *, kill: bool = True) -> None:
        """Kill it, or wait until it has ended by itself."""
        if kill and self.process.returncode is None:
            self.signal(signal.SIGKILL)
        async with asyncio.timeout(WAIT_S):
            await self.process.wait()
            await self._reading
        if self.process.stdin is not None:
            self.process.stdin.close()

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.said.append(json.loads(line))
            self._news.set()
        self._news.set()


async def start_node(
    dsn: str, name: str, roles: Sequence[str], sends: Path, options: Mapping[str, Any]
) -> ElectionNode:
    """Start a node; it writes what it does to `sends`, and what goes wrong to a file beside it."""
    with sends.with_name(f"{name}.log").open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__)),
            json.dumps({"dsn": dsn, "name": name, "roles": list(roles), "sends": str(sends), "options": options}),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )
    return ElectionNode(name, process)


@contextlib.asynccontextmanager
async def election_node(
    dsn: str, name: str, roles: str | Sequence[str], sends: Path, **options: Any
) -> AsyncIterator[ElectionNode]:
    """A node for the length of a block; killed at its end if it still runs."""
    node = await start_node(dsn, name, [roles] if isinstance(roles, str) else roles, sends, options)
    try:
        yield node
    finally:
        await node.end()


class Send(NamedTuple):
    """One act: who did it for which term, and when its gate was asked and had answered."""

    role: str
    epoch: int
    node: str
    holder: str
    before_ns: int
    after_ns: int


class SendLog:
    """What all nodes have done, read from the file they append to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sends: list[Send] = []
        self._offset = 0

    def read(self) -> list[Send]:
        """Everything so far."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._offset)
            whole, end, _ = file.read().rpartition(b"\n")
            self._offset += len(whole) + len(end)
            for line in whole.decode().splitlines():
                role, epoch, node, holder, before, after = line.split()
                # Of a long storm there are millions, with few different words.
                role, node, holder = map(sys.intern, (role, node, holder))
                self.sends.append(Send(role, int(epoch), node, holder, int(before), int(after)))
        return self.sends

    def by_role(self) -> dict[str, list[Send]]:
        """Everything so far, role by role."""
        found: dict[str, list[Send]] = defaultdict(list)
        for send in self.read():
            found[send.role].append(send)
        return dict(found)

    async def until(self, condition: Callable[[Send], bool], timeout_s: float = WAIT_S) -> Send:
        """The first send from now on for which the condition holds. Nothing announces a line in a file."""
        seen = len(self.read())
        async with asyncio.timeout(timeout_s):
            while True:
                for send in self.read()[seen:]:
                    if condition(send):
                        return send
                seen = len(self.sends)
                await asyncio.sleep(POLL_S)

    def last(self, role: str) -> Send | None:
        """The latest send of a role: who leads it, as far as anybody can see."""
        return next((send for send in reversed(self.read()) if send.role == role), None)

    def epochs(self, role: str) -> dict[int, set[str]]:
        """Which holders have acted under which epoch of a role."""
        return _epochs(send for send in self.read() if send.role == role)

    def epochs_of_all(self) -> dict[str, dict[int, set[str]]]:
        """The same for all roles, in one pass."""
        return {role: _epochs(sends) for role, sends in self.by_role().items()}

    def changes(self, role: str) -> int:
        """How often another node than before acted for a role."""
        nodes = [send.node for send in sorted(self.read(), key=lambda send: send.before_ns) if send.role == role]
        return sum(before != after for before, after in itertools.pairwise(nodes))

    def changes_of_all(self) -> int:
        """The same for all roles together, in one pass."""
        last: dict[str, str] = {}
        changes = 0
        for send in sorted(self.read(), key=lambda send: send.before_ns):
            changes += last.get(send.role, send.node) != send.node
            last[send.role] = send.node
        return changes

    def violations(self, *, without: str = "") -> list[tuple[Send, Send]]:
        """Every act that was certainly after one of a newer epoch of its role, with the earliest such.

        What the node `without` has done counts for nothing.
        """
        found = []
        for sends in self.by_role().values():
            first: dict[int, Send] = {}
            acts = [send for send in sends if send.node != without]
            for send in acts:
                if send.epoch not in first or send.after_ns < first[send.epoch].after_ns:
                    first[send.epoch] = send
            newer: dict[int, Send] = {}
            earliest: Send | None = None
            for epoch in sorted(first, reverse=True):
                if earliest is not None:
                    newer[epoch] = earliest
                if earliest is None or first[epoch].after_ns < earliest.after_ns:
                    earliest = first[epoch]
            found += [
                (send, newer[send.epoch])
                for send in acts
                if send.epoch in newer and send.before_ns > newer[send.epoch].after_ns
            ]
        return found


def _epochs(sends: Iterable[Send]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = defaultdict(set)
    for send in sends:
        found[send.epoch].add(send.holder)
    return dict(found)


# --- The node


def _say(what: str, **fields: Any) -> None:
    print(json.dumps({"what": what, **fields}), flush=True)  # noqa: T201


class _Acting(threading.Thread):
    """Asks the gates without end, whatever the event loop does, and writes down each time it may act."""

    def __init__(self, election: LeaderElection, name: str, sends: str, gap_s: float) -> None:
        super().__init__(daemon=True)
        self._election, self._node, self._gap_s = election, name, gap_s
        self._file = os.open(sends, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def run(self) -> None:
        gates = [(role, self._election.gate(role)) for role in self._election.roles]
        turn = 0
        while True:
            turn += 1
            for role, gate in gates:
                before = boot_ns()
                try:
                    token = gate.require_leader()
                    if turn % 2:
                        gate.ensure_epoch(token.epoch)
                except NotLeader:
                    continue
                after = boot_ns()
                line = f"{role} {token.epoch} {self._node} {token.holder_identity} {before} {after}\n"
                os.write(self._file, line.encode())
            time.sleep(self._gap_s)


def _answer(election: LeaderElection, role: str) -> dict[str, Any]:
    """What the gate says at this very moment."""
    try:
        return {"epoch": election.gate(role).require_leader().epoch, "reason": None}
    except NotLeader as refused:
        return {"epoch": None, "reason": refused.reason}


async def _obey(election: LeaderElection, words: list[str]) -> bool:
    """One order; False when it was the last."""
    role = words[1] if len(words) > 1 else election.roles[0]
    match words[0]:
        case "ask":
            _say("ask", **_answer(election, role), state=election.state(role).value)
        case "block":
            time.sleep(float(words[1]))  # noqa: ASYNC251 - this is the fault
            _say("block", **_answer(election, election.roles[0]))
        case "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
            _say("freeze", **_answer(election, role))
        case "hold":  # work that does not end
            await asyncio.sleep(0)
            _held.enter_context(election.gate(role).acting())
            _say("hold")
        case "veto":
            election.gate(role).disable()
            _say("veto")
        case "fail":  # the work fails wherever it is begun
            _failing.append(asyncio.create_task(election.lead(role, _fail)))
            _say("fail")
        case "step_down":
            await election.step_down(role)
            _say("step_down")
        case "again":
            await election.shutdown()
            await election.start()
            _say("again")
        case "drain":
            await election.shutdown()
            _say("drain")
            return False
        case "memory":
            _say("memory", rss_kb=_resident_kb(), led=sum(election.gate(name).is_leader for name in election.roles))
    return True


_held = contextlib.ExitStack()
_failing: list[asyncio.Task[None]] = []


async def _fail(_token: LeaderToken) -> None:
    await asyncio.sleep(0)
    raise ValueError("as the test wants it")


def _resident_kb() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


async def _tell_changes(election: LeaderElection) -> None:
    async for change in election.changes():
        _say("change", role=change.role, is_leader=change.is_leader, epoch=change.epoch, at_ns=boot_ns())


async def _main(name: str, roles: list[str], dsn: str, sends: str, options: dict[str, Any]) -> None:
    acts, held, probed = options.pop("acts", True), options.pop("held", False), options.pop("probed", False)
    gap_s = options.pop("send_gap_s", SEND_GAP_S)
    if "acquire_delay_s" in options:
        options["acquire_delay_s"] = tuple(options["acquire_delay_s"])
    election = LeaderElection(dsn, roles, node_id=name, **options)
    election.on_acquired(lambda role: _say("acquired", role=role, at_ns=boot_ns()))
    election.on_lost(lambda role: _say("lost", role=role))
    words: asyncio.StreamReader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), sys.stdin)
    telling = asyncio.create_task(_tell_changes(election))
    if held:  # until it is told to go: a process takes longer to start than an election
        _say("held")
        await words.readline()
    async with election, contextlib.AsyncExitStack() as stack:
        if probed:
            from prometheus_client import CollectorRegistry

            from pgleaderlock.metrics import ElectionMetrics

            metrics = ElectionMetrics(election, CollectorRegistry())
            probes = await stack.enter_async_context(ProbeServer(election, metrics=metrics.exposition))
            _say("probed", port=probes.port)
        _say("started")
        if acts:
            _Acting(election, name, sends, gap_s).start()
        while (line := await words.readline()) and await _obey(election, line.decode().split()):
            pass
    telling.cancel()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(_main(**json.loads(sys.argv[1])))
