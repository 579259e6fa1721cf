"""Many processes, one name, again and again: one winner each time, and nobody hangs."""

import asyncio
import sys
import uuid
from pathlib import Path

import pytest

from pgleaderlock import key_pair
from support import racer
from support.counts import count
from support.server_side import holders

WAIT_S = 60.0


async def _line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_S):
        return (await process.stdout.readline()).decode().strip()


def _tell(process: asyncio.subprocess.Process, word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n".encode())


@pytest.mark.timeout(600)
async def test_of_all_processes_that_race_exactly_one_wins_each_time(dsn: str) -> None:
    name = f"race-{uuid.uuid4()}"
    racers = count(8, 50)
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(racer.__file__)),
            dsn,
            name,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        for _ in range(racers)
    ]
    winners = set()
    try:
        assert await asyncio.gather(*map(_line, processes)) == ["ready"] * racers
        for _ in range(count(10, 100)):
            for process in processes:
                _tell(process, "try")
            said = await asyncio.gather(*map(_line, processes))
            assert sorted(said) == ["not"] * (racers - 1) + ["won"]
            winner = said.index("won")
            winners.add(winner)
            assert len(holders(dsn, key_pair(name))) == 1
            _tell(processes[winner], "release")
            assert await _line(processes[winner]) == "released"
    finally:
        for process in processes:
            process.kill()
        await asyncio.gather(*(process.wait() for process in processes))
    assert len(winners) > 1, "it was no race: the same process won each time"
