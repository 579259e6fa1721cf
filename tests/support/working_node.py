"""A node of an election as a real process whose work takes until it is told to finish; SIGTERM drains it.

Run as a script it is the node. For each role it works whenever it may, one unit after the other, inside `acting()`: a
line `began` in the table `journal`, then it waits for the word `finish` on its standard input, then a line `finished`.
Each line is a fenced transaction of its own. SIGTERM is what it is for a program of the user's: a drain of everything,
then the end. Imported, `working_node` starts one; `election_node.ElectionNode` is the test's end of it.
"""

import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psycopg

from pgleaderlock import ElectionObserver, LeaderElection, LeaderToken, NotLeader, fenced
from support.election_node import ElectionNode

__all__ = ["JOURNAL", "working_node"]

JOURNAL = """CREATE TABLE journal (
    line bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at timestamptz NOT NULL DEFAULT clock_timestamp(),
    role text NOT NULL, node text NOT NULL, epoch bigint NOT NULL, what text NOT NULL)"""


@contextlib.asynccontextmanager
async def working_node(
    dsn: str, name: str, roles: Sequence[str], folder: Path, **options: Any
) -> AsyncIterator[ElectionNode]:
    """A node for the length of a block; killed at its end if it still runs."""
    with (folder / f"{name}.log").open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "support.working_node",
            json.dumps({"dsn": dsn, "name": name, "roles": list(roles), "options": options}),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            cwd=Path(__file__).parents[1],
        )
    node = ElectionNode(name, process)
    try:
        yield node
    finally:
        await node.end()


# --- The node


def _say(what: str, **fields: Any) -> None:
    print(json.dumps({"what": what, **fields}), flush=True)  # noqa: T201


class _Tries(ElectionObserver):
    """How often each role was tried, and somebody else held it."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.news = asyncio.Event()

    def attempted(self, role: str, result: str) -> None:
        self.held[role] += result == "held"
        self.news.set()

    def drain_began(self, role: str) -> None:
        _say("draining", role=role)

    async def more(self, roles: Sequence[str], times: int) -> None:
        """Return when each of them was tried so often from now on, in vain."""
        before = self.held.copy()
        while any(self.held[role] < before[role] + times for role in roles):
            self.news.clear()
            await self.news.wait()


class _Worker:
    def __init__(self, election: LeaderElection, dsn: str) -> None:
        self._election, self._dsn = election, dsn
        self.may_finish = asyncio.Event()

    async def work(self, role: str) -> None:
        gate = self._election.gate(role)
        while await gate.wait_open():
            try:
                with gate.acting() as token:
                    await self._unit(token)
            except NotLeader:
                continue

    async def _unit(self, token: LeaderToken) -> None:
        await self._note(token, "began")
        _say("began", role=token.role)
        await self.may_finish.wait()
        await self._note(token, "finished")

    async def _note(self, token: LeaderToken, what: str) -> None:
        line = (token.role, self._election.node_id, token.epoch, what)
        async with await psycopg.AsyncConnection.connect(self._dsn, autocommit=True) as conn, fenced(conn, token):
            await conn.execute("INSERT INTO journal (role, node, epoch, what) VALUES (%s, %s, %s, %s)", line)


async def _main(name: str, roles: list[str], dsn: str, options: dict[str, Any]) -> None:
    options["acquire_delay_s"] = tuple(options["acquire_delay_s"])
    election = LeaderElection(dsn, roles, node_id=name, **options)
    worker, tries = _Worker(election, dsn), _Tries()
    election.observe(tries)
    asked_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, asked_to_stop.set)
    words: asyncio.StreamReader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), sys.stdin)

    async def obey() -> None:
        while word := (await words.readline()).strip():
            if word == b"finish":
                worker.may_finish.set()
            if word == b"try":
                await tries.more(roles, 3)
                _say("try")
        asked_to_stop.set()  # the test has gone

    async with election:
        _say("started")
        tasks = [asyncio.create_task(worker.work(role)) for role in roles] + [asyncio.create_task(obey())]
        await asked_to_stop.wait()
        _say("clean" if await election.drain() else "not clean")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(_main(**json.loads(sys.argv[1])))
