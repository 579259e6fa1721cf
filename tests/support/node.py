"""A node of a cluster as a real process, to be stopped, frozen and killed. Speaks JSON lines with the test.

Run as a script it is the node; imported, `Node` is the test's end of it. The node obeys a few words on its standard
input and ends when that closes, so that no test leaves one behind.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pgleaderlock import FixedInterval, LeaderLock

__all__ = ["Node", "node"]

WAIT_S = 20.0


class Node:
    """The test's end of a node process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: list[dict[str, Any]] = []

    @property
    def pid(self) -> int:
        return self.process.pid

    async def hears(self, what: str, **fields: Any) -> dict[str, Any]:
        """The next line that says `what`, with these fields."""
        assert self.process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            while True:
                line = await self.process.stdout.readline()
                assert line, f"the node ended before it said {what!r}; it had said {self.said}"
                message = json.loads(line)
                self.said.append(message)
                if message["what"] == what and all(message.get(key) == value for key, value in fields.items()):
                    return dict(message)

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n".encode())

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@contextlib.asynccontextmanager
async def node(dsn: str, name: str, **options: Any) -> AsyncIterator[Node]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__)),
        dsn,
        name,
        json.dumps(options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Node(process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        await process.stdout.read()  # to its end: a pipe that is open when the loop closes is reported in another test


def _say(what: str, **fields: Any) -> None:
    print(json.dumps({"what": what, **fields}), flush=True)  # noqa: T201


async def _main(dsn: str, name: str, options: dict[str, Any]) -> None:
    retry_s = options.pop("retry_s", 0.2)
    lock = LeaderLock.for_name(dsn, name, retry_strategy=FixedInterval(retry_s), **options)
    lock.on_state_change(lambda old, new: _say("state", old=old.value, new=new.value))
    lock.on_lost(lambda: _say("lost"))
    lock.on_acquired(lambda: _say("acquired"))
    words: asyncio.StreamReader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), sys.stdin)
    async with lock:
        while line := await words.readline():
            match line.decode().strip():
                case "freeze":
                    before = lock.is_leader
                    os.kill(os.getpid(), signal.SIGSTOP)
                    _say("thawed", is_leader=lock.is_leader, state=lock.state.value, before=before)
                case "step_down":
                    await lock.step_down()
                case "fork":
                    if (child := os.fork()) == 0:
                        _say("child", pid=os.getpid(), is_leader=lock.is_leader)
                        signal.pause()  # outlives its parent, until the test ends it
                    del child
                case "ask":
                    _say("answer", is_leader=lock.is_leader, state=lock.state.value)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
