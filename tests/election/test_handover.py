"""A leader that is asked to end: its work first, then its locks, then the work of the others. Real processes."""

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any

from support.elections import PATIENT, admin, fresh_database
from support.working_node import JOURNAL, working_node

ROLES = ("scheduler", "metrics_aggregator", "log_compactor")

# The order of all things that have happened to one role, as the server's clock has them.
STORY = """
    SELECT what FROM (
        SELECT at, node || ' ' || what AS what FROM journal WHERE role = %(role)s
        UNION ALL
        SELECT ended_at, node_id || ' ' || reason FROM pgleaderlock.terms WHERE role = %(role)s AND ended_at IS NOT NULL
        UNION ALL
        SELECT began_at, node_id || ' leads' FROM pgleaderlock.terms WHERE role = %(role)s
    ) AS story ORDER BY at"""


async def test_sigterm_finishes_the_work_then_releases_then_others_lead(dsn: str, tmp_path: Path) -> None:
    """Three nodes, three roles, one leads all of them. T is ten minutes: who leads after it had no T to wait for."""
    with fresh_database(dsn, ledger=True) as database:
        with admin(database) as conn:
            conn.execute(JOURNAL.encode())
        async with contextlib.AsyncExitStack() as nodes:

            async def node(name: str) -> Any:
                return await nodes.enter_async_context(working_node(database, name, ROLES, tmp_path, **PATIENT))

            leader = await node("leader")
            await all_of(leader.hears("began", role=role) for role in ROLES)
            others = [await node("second"), await node("third")]
            await all_of(other.asked("try") for other in others)

            leader.signal(signal.SIGTERM)
            await all_of(leader.hears("draining", role=role) for role in ROLES)
            # Nothing new is let in, and the others have gone on trying: in vain, as long as the work takes.
            await all_of(other.asked("try") for other in others)
            assert [message for other in others for message in other.said if message["what"] == "began"] == []

            leader.tell("finish")
            await leader.hears("clean")
            await leader.end(kill=False)
            assert leader.process.returncode == 0
            await all_of(one_of(other.hears("began", role=role) for other in others) for role in ROLES)
            stories = {role: read(database, role) for role in ROLES}
    for role, story in stories.items():
        successor = story[-1].split()[0]
        assert successor in ("second", "third"), role
        assert story == [
            "leader leads",
            "leader began",
            "leader finished",
            "leader released",
            f"{successor} leads",
            f"{successor} began",
        ], role


def read(database: str, role: str) -> list[str]:
    with admin(database) as conn:
        return [row["what"] for row in conn.execute(STORY.encode(), {"role": role}).fetchall()]


async def all_of(waits: Any) -> None:
    await asyncio.gather(*waits)


async def one_of(waits: Any) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)
