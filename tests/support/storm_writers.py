"""Writers in a storm of faults, and a judge of what they wrote that needs the tables alone.

The writers look into the ledger for a token and write under it, until long after it is over; no gate stops them, so the
fence has to. The judge is a trigger: in the transaction in which an epoch begins, it counts the writes of the epochs
since the last one. At the end there must be exactly as many, or one was committed after a newer epoch had begun.

Imports pgleaderlock, psycopg, `election_storm` and the standard library.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import psycopg
from psycopg import IsolationLevel

from pgleaderlock.errors import ConnectionError, StaleEpoch
from pgleaderlock.fence import fenced, meaning
from pgleaderlock.models import LeaderToken
from support.commit_order import WRITES_TABLE
from support.election_storm import Storm

__all__ = [
    "INSERT",
    "LEVELS",
    "StormWriters",
    "WritesJudged",
    "count_writes",
    "judge_writes",
    "write_after_a_look",
    "write_by_fenced",
    "write_by_sql",
]

LEVELS = [IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE]
STORM_WRITERS = 16
INSERT = "INSERT INTO writes (role, epoch) VALUES (%s, %s)"
# How long a writer keeps its transaction open: most of them, and every fourth pair. Others shall come between.
SHORT_S, LONG_S = (0.0, 0.01), (0.05, 0.2)
RECONNECT_S = 0.05
CONNECT_TIMEOUT_S = 5

_TOKEN = """
SELECT l.role, l.epoch, s.holder_identity, l.namespace
FROM pgleaderlock.leaders l JOIN pgleaderlock.sessions s USING (session_id) WHERE l.role = %s
"""

Write = Callable[[psycopg.AsyncConnection[Any], LeaderToken, float], Awaitable[None]]


async def write_by_fenced(conn: psycopg.AsyncConnection[Any], token: LeaderToken, dawdle_s: float) -> None:
    async with fenced(conn, token):
        await conn.execute(INSERT, (token.role, token.epoch))
        await asyncio.sleep(dawdle_s)


async def write_by_sql(conn: psycopg.AsyncConnection[Any], token: LeaderToken, dawdle_s: float) -> None:
    async with conn.transaction():
        await conn.execute("SELECT pgleaderlock.fence(%s, %s)", (token.role, token.epoch))
        await conn.execute(INSERT, (token.role, token.epoch))
        await asyncio.sleep(dawdle_s)


async def write_after_a_look(conn: psycopg.AsyncConnection[Any], token: LeaderToken, dawdle_s: float) -> None:
    """What looks like a fence and is none."""
    async with conn.transaction():
        row = await (await conn.execute(_TOKEN, (token.role,))).fetchone()
        if row is None or row[1] != token.epoch:
            raise StaleEpoch(f"epoch {token.epoch} is over")
        await conn.execute(INSERT, (token.role, token.epoch))
        await asyncio.sleep(dawdle_s)


class StormWriters:
    """They look into the ledger for a token and write under it, until long after it is over; no gate stops them."""

    def __init__(self, storm: Storm, ways: tuple[Write, ...], number: int = STORM_WRITERS) -> None:
        self._storm, self._ways, self._number, self._over = storm, ways, number, False
        self.written: Counter[tuple[str, str]] = Counter()
        """Acknowledged, by level of isolation and way of writing."""
        self.refused: Counter[tuple[str, str]] = Counter()

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            for number in range(self._number):
                group.create_task(self._write(number))
            yield
            self._over = True  # and each ends its last transaction

    @property
    def all_have_done_both(self) -> bool:
        """Each kind of writer has written, and was refused."""
        kinds = len(LEVELS) * len(self._ways)
        return len(self.written) == len(self.refused) == kinds

    async def _write(self, number: int) -> None:
        """One writer; it connects again whenever a fault has taken its connection."""
        rng = random.Random(self._storm.seed + number)
        while not self._over:
            with contextlib.suppress(psycopg.OperationalError, ConnectionError):
                dsn = self._storm.pooled or self._storm.server.dsn
                async with await psycopg.AsyncConnection.connect(
                    dsn, autocommit=True, prepare_threshold=None, connect_timeout=CONNECT_TIMEOUT_S
                ) as conn:
                    await self._write_on(conn, number, rng)
            await asyncio.sleep(RECONNECT_S)

    async def _write_on(self, conn: psycopg.AsyncConnection[Any], number: int, rng: random.Random) -> None:
        level, way = LEVELS[number % len(LEVELS)], self._ways[number % len(self._ways)]
        dawdle_s = LONG_S if number // 2 % 4 == 0 else SHORT_S
        await conn.set_isolation_level(level)
        tokens: dict[str, LeaderToken] = {}
        while not self._over:
            role = rng.choice(self._storm.roles)
            if role not in tokens or rng.random() < 0.2:
                row = await (await conn.execute(_TOKEN, (role,))).fetchone()
                assert row is not None
                tokens[role] = LeaderToken(*row)
            await asyncio.sleep(rng.uniform(*SHORT_S))
            try:
                async with conn.transaction() if rng.random() < 0.5 else contextlib.nullcontext():
                    await conn.execute("SELECT 1")  # where a transaction is open, its snapshot is older than the fence
                    await way(conn, tokens[role], rng.uniform(*dawdle_s))
            except (StaleEpoch, psycopg.Error) as error:
                if not isinstance(error, StaleEpoch) and not isinstance(meaning(error, tokens[role]), StaleEpoch):
                    raise
                self.refused[level.name, way.__name__] += 1
            else:
                self.written[level.name, way.__name__] += 1


# --- The judge

_COUNTED = """
CREATE INDEX ON public.writes (role, epoch);
CREATE TABLE public.begun (
    role text NOT NULL, before bigint NOT NULL, epoch bigint NOT NULL, writes bigint NOT NULL);
CREATE FUNCTION public.begin_epoch() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.begun
    SELECT NEW.role, OLD.epoch, NEW.epoch, count(*) FROM public.writes w
    WHERE w.role = NEW.role AND w.epoch >= OLD.epoch AND w.epoch < NEW.epoch;
    RETURN NULL;
END
$$;
CREATE TRIGGER begin_epoch AFTER UPDATE OF epoch ON pgleaderlock.leaders
    FOR EACH ROW WHEN (NEW.epoch <> OLD.epoch) EXECUTE FUNCTION public.begin_epoch();
"""
_JUDGED = """
WITH counted AS (
    SELECT b.*, (SELECT count(*) FROM public.writes w
                 WHERE w.role = b.role AND w.epoch >= b.before AND w.epoch < b.epoch) - b.writes AS late
    FROM public.begun b
)
SELECT (SELECT count(*) FROM public.writes),
       (SELECT count(*) FROM counted),
       (SELECT coalesce(sum(late), 0)::bigint FROM counted),
       (SELECT count(*) FROM (SELECT FROM counted GROUP BY role, epoch HAVING count(*) > 1) twice),
       (SELECT count(*) FROM counted WHERE epoch <= before)
"""


class WritesJudged(NamedTuple):
    """What the tables say. The last three must be 0."""

    writes: int
    epochs: int
    stale: int
    """Writes that were committed after a newer epoch of their role had begun."""
    twice: int
    """Epochs that began twice."""
    backwards: int
    """Epochs that were followed by a lower one."""


async def count_writes(dsn: str) -> None:
    """Make the tables, and count from now on. Before anybody leads: the ledger must be there."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        await conn.execute(WRITES_TABLE)
        await conn.execute(_COUNTED.encode())


async def judge_writes(dsn: str) -> WritesJudged:
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        row = await (await conn.execute(_JUDGED)).fetchone()
        assert row is not None
        return WritesJudged(*row)
