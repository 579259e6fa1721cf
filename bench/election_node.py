"""A node of an election in a separate process. It prints, by the machine's monotonic clock, when it leads, when it has
committed a fenced write and when it may act. It obeys `step_down` on its standard input, and ends when that closes.

    python -m bench.election_node DSN ROLE OPTIONS_AS_JSON
"""

import asyncio
import json
import sys
import time

import psycopg

from pgleaderlock import LeaderElection, fenced


def _say(what: str) -> None:
    print(json.dumps({"what": what, "at": time.monotonic()}), flush=True)


async def main(dsn: str, role: str, options: dict[str, object]) -> None:
    words: asyncio.StreamReader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), sys.stdin)
    election = LeaderElection(dsn, role, **options)  # type: ignore[arg-type]
    gate = election.gate(role)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=None) as conn:

        @election.on_acquired
        async def write(_role: str) -> None:
            # The fence needs no clock, and so no wait: the token is valid before the gate opens.
            token = gate.token
            if token is not None:
                async with fenced(conn, token):
                    await conn.execute("INSERT INTO bench_writes VALUES (%s)", (token.epoch,))
                _say("written")

        async def watch() -> None:
            async for change in election.changes():
                _say("open" if change.is_leader else "seen")

        watcher = asyncio.ensure_future(watch())
        async with election:
            _say("ready")
            while word := (await words.readline()).strip():
                if word == b"step_down":
                    await election.step_down(role)
        watcher.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
