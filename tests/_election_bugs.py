"""Defects found in the election, each as a test that fails until it is mended. Not collected by name.

`Engine._evict_silent` asks once for each role of the silent session, and each try may take EVICTION_WAIT_MS: meanwhile
no heartbeat is sent, and the node loses what it leads. Once for each session is enough.
"""

import asyncio
import os
import signal
from pathlib import Path

from pgleaderlock.embedded import EmbeddedPostgres
from support.election_node import WAIT_S, election_node
from test_election_many_roles import MANY, open_gates, server, session_of, statements

__all__ = ["server"]

PATIENT = {**MANY, "late_threshold_s": 4.0, "session_lease_s": 5.0}


async def test_a_session_that_cannot_be_ended_is_tried_once_for_all_its_roles(
    server: EmbeddedPostgres, tmp_path: Path
) -> None:
    """Its backend does not react, and each try to end it takes a while: the heart of whoever tries must go on beating.

    The lease should have ended it; a backend that stands still cannot see to that.
    """
    roles = [f"role-{number}" for number in range(40)]
    short = {**MANY, "heartbeat_interval_s": 0.3, "late_threshold_s": 0.6, "session_lease_s": 0.8}
    async with election_node(server.dsn, "first", roles, tmp_path / "sends", **short) as first:
        await first.until(lambda: len(first.acquired()) == len(roles))
        stuck = await session_of(server, "first")
        async with election_node(server.dsn, "second", [*roles, "own"], tmp_path / "sends", **PATIENT) as second:
            await second.until(lambda: open_gates(second) == {"own"})
            here = await session_of(server, "second")
            os.kill(stuck, signal.SIGSTOP)
            try:
                first.signal(signal.SIGKILL)
                await until_asked(server, here, "evict", 1)
                before = statements(server, here)
                await until_asked(server, here, "beat", before.count("beat") + 3)
                tried = statements(server, here).count("evict")
                print(f"{tried} tries to end the session of {len(roles)} roles")  # noqa: T201
                assert tried <= 4
                assert open_gates(second) == {"own"}
            finally:
                os.kill(stuck, signal.SIGCONT)
            await second.until(lambda: open_gates(second) == {*roles, "own"})
            lost = [said for said in second.said if said["what"] == "change" and said["role"] == "own"]
            assert [said["is_leader"] for said in lost if said["epoch"]] == [True], "its own role was led throughout"


async def until_asked(server: EmbeddedPostgres, pid: int, kind: str, times: int) -> None:
    """Until a backend was asked this so often. Nothing announces a line in the log."""
    async with asyncio.timeout(WAIT_S):
        while statements(server, pid).count(kind) < times:
            await asyncio.sleep(0.1)
