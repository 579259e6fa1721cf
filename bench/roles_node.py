"""A node of many roles in a separate process, for the figures of drain and of steady state.

    python -m bench.roles_node DSN NODE OPTIONS_AS_JSON

OPTIONS are those of `LeaderElection`, with `roles`, and `works`: with it, the node commits fenced writes for each role
all the time, inside `acting()`. It prints, by the machine's monotonic clock, when a gate opens or when it sees another
node's term. On SIGTERM it drains every role and ends. On its standard input it obeys `add N` (add N roles), `begin`
(count from now on) and `end` (print the counts), and it ends when that closes.
"""

import asyncio
import contextlib
import json
import signal
import sys
import time
from typing import Any

import psycopg

from pgleaderlock import LeaderElection, NotLeader, fenced
from pgleaderlock._election.engine import Engine
from pgleaderlock._pg.session import DedicatedSession

WORK_GAP_S = 0.005


def _say(what: str, **fields: Any) -> None:
    print(json.dumps({"what": what, "at": time.monotonic(), **fields}), flush=True)


class Counted:
    """Ticks of the engine, statements of the session, and the most statements of one tick."""

    def __init__(self) -> None:
        self.ticks = self.statements = self.most = self._in_tick = 0
        self._cpu_s = time.process_time()
        tick, execute = Engine._tick, DedicatedSession._execute

        async def counted_tick(engine: Engine) -> None:
            self._in_tick = 0
            await tick(engine)
            self.ticks += bool(self._in_tick)  # a tick that sends nothing costs the server nothing
            self.most = max(self.most, self._in_tick)

        async def counted_execute(session: DedicatedSession, *args: Any) -> Any:
            self.statements += 1
            self._in_tick += 1
            return await execute(session, *args)

        Engine._tick = counted_tick  # type: ignore[method-assign, assignment]
        DedicatedSession._execute = counted_execute  # type: ignore[method-assign, assignment]

    def begin(self) -> None:
        self.ticks = self.statements = self.most = 0
        self._cpu_s = time.process_time()

    def end(self, election: LeaderElection) -> None:
        led = sum(election.gate(role).is_leader for role in election.roles)
        cpu_s = time.process_time() - self._cpu_s
        _say("counted", ticks=self.ticks, statements=self.statements, most=self.most, cpu_s=cpu_s, led=led)


async def _work(election: LeaderElection, role: str, dsn: str) -> None:
    gate = election.gate(role)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        while await gate.wait_open():
            with contextlib.suppress(NotLeader), gate.acting() as token:
                async with fenced(conn, token):
                    await conn.execute("INSERT INTO bench_writes VALUES (%s)", (token.epoch,))
            await asyncio.sleep(WORK_GAP_S)


async def _watch(election: LeaderElection) -> None:
    async for change in election.changes():
        _say("open" if change.is_leader else "seen", role=change.role)


async def main(dsn: str, node: str, options: dict[str, Any]) -> None:
    works, roles, counted = options.pop("works", False), options.pop("roles"), Counted()
    loop, asked_to_stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, asked_to_stop.set)
    words: asyncio.StreamReader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), sys.stdin)
    election = LeaderElection(dsn, roles, node_id=node, **options)

    async def obey() -> None:
        while word := (await words.readline()).split():
            match word[0]:
                case b"add":
                    for number in range(int(word[1])):
                        await election.add_role(f"role-{number:04}")
                    _say("added")
                case b"begin":
                    counted.begin()
                case b"end":
                    counted.end(election)
        asked_to_stop.set()

    watching = asyncio.create_task(_watch(election)) if works else None
    await asyncio.sleep(0)
    async with election:
        _say("ready")
        tasks = [asyncio.create_task(obey())]
        tasks += [asyncio.create_task(_work(election, role, dsn)) for role in roles if works]
        await asked_to_stop.wait()
        await election.drain()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    if watching is not None:
        watching.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
