"""The fence for SQLAlchemy: connections and sessions, async and sync, with the driver psycopg."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool

from pgleaderlock.contrib.sqlalchemy import fenced
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.errors import ConfigurationError, FenceLost, NotLeader, SchemaError, StaleEpoch
from pgleaderlock.models import LeaderToken
from support.fencing import Leader, database, ledger_database, until_waiting

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
Target = sa.Connection | Session
INSERT = sa.text("INSERT INTO written VALUES (:what)")


class Base(DeclarativeBase):
    pass


class Written(Base):
    __tablename__ = "written"
    what: Mapped[str] = mapped_column(primary_key=True)


def url(dsn: str) -> sa.URL:
    parts = {key: str(value) for key, value in conninfo_to_dict(dsn).items()}
    return sa.URL.create(
        "postgresql+psycopg",
        parts["user"],
        parts["password"],
        parts["host"],
        int(parts["port"]),
        parts["dbname"],
        {"sslmode": parts["sslmode"]},
    )


@pytest.fixture
def ledger(postgres: EmbeddedPostgres, nothing_left: None) -> Iterator[str]:
    with ledger_database(postgres.dsn) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("CREATE TABLE written (what text PRIMARY KEY)")
        yield dsn


@pytest.fixture
def leader(ledger: str) -> Iterator[Leader]:
    with Leader(ledger, "billing") as leading:
        yield leading


@pytest.fixture
def engine(ledger: str) -> Iterator[sa.Engine]:
    made = sa.create_engine(url(ledger), poolclass=NullPool)
    yield made
    made.dispose()


@pytest.fixture
async def async_engine(ledger: str) -> AsyncIterator[AsyncEngine]:
    made = create_async_engine(url(ledger), poolclass=NullPool)
    yield made
    await made.dispose()


@pytest.fixture(params=[sa.Connection, Session])
def target(request: pytest.FixtureRequest, engine: sa.Engine) -> Iterator[sa.Connection | Session]:
    with engine.connect() if request.param is sa.Connection else Session(engine) as opened:
        yield opened


@pytest.fixture(params=[AsyncConnection, AsyncSession])
async def async_target(
    request: pytest.FixtureRequest, async_engine: AsyncEngine
) -> AsyncIterator[AsyncConnection | AsyncSession]:
    async with async_engine.connect() if request.param is AsyncConnection else AsyncSession(async_engine) as opened:
        yield opened


def written(dsn: str) -> list[str]:
    with psycopg.connect(dsn, autocommit=True) as conn:
        return [row[0] for row in conn.execute("SELECT what FROM written ORDER BY what").fetchall()]


ENDINGS = ["COMMIT", "COMMIT; BEGIN"]


# --- Blocking


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("way", ["own", "joined", "implicit"])
def test_a_transaction_that_ends_inside_the_block_is_an_error(
    leader: Leader, target: Target, ending: str, way: str
) -> None:
    token = leader.win()
    if way == "implicit":
        target.execute(INSERT, {"what": "before"})
    with (  # noqa: PT012 - the story is the claim
        pytest.raises(FenceLost),
        target.begin() if way == "joined" else contextlib.nullcontext(),
        fenced(target, token),
    ):
        target.execute(sa.text(ending))
        target.execute(INSERT, {"what": "after"})
    target.rollback()


def test_a_commit_by_sqlalchemy_itself_may_be_the_last_of_the_block(
    ledger: str, leader: Leader, target: Target
) -> None:
    with fenced(target, leader.win()):
        target.execute(INSERT, {"what": "fenced"})
        target.commit()
    assert written(ledger) == ["fenced"]


def test_the_current_epoch_commits_and_a_stale_one_writes_nothing(ledger: str, leader: Leader, target: Target) -> None:
    token = leader.win()
    with fenced(target, token) as same:
        assert same is target
        assert leader.bumped() == ("busy", None)
        target.execute(INSERT, {"what": "current"})
    assert not target.in_transaction()
    leader.win()
    with pytest.raises(StaleEpoch, match="is stale") as caught, fenced(target, token):
        target.execute(INSERT, {"what": "stale"})
    assert isinstance(caught.value.__cause__, psycopg.Error)
    assert not target.in_transaction()
    assert written(ledger) == ["current"]


@pytest.mark.parametrize("level", LEVELS)
def test_it_holds_at_every_isolation_level(ledger: str, leader: Leader, level: str) -> None:
    engine = sa.create_engine(url(ledger), isolation_level=level, poolclass=NullPool)
    with engine.connect() as conn:
        token = leader.win()
        with pytest.raises(StaleEpoch), conn.begin():  # noqa: PT012 - the story is the claim
            conn.execute(sa.text("SELECT 1"))
            newer = leader.win()
            with fenced(conn, token):
                conn.execute(INSERT, {"what": "stale"})
        with fenced(conn, newer):
            conn.execute(INSERT, {"what": "current"})
    assert written(ledger) == ["current"]


def test_objects_of_a_session_are_flushed_behind_the_fence(ledger: str, leader: Leader, engine: sa.Engine) -> None:
    token = leader.win()
    with Session(engine) as session:
        with fenced(session, token):
            session.add(Written(what="current"))
        leader.win()
        with pytest.raises(StaleEpoch), fenced(session, token):
            session.add(Written(what="stale"))
    assert written(ledger) == ["current"]


def test_a_block_that_is_open_is_joined_and_not_ended(ledger: str, leader: Leader, target: Target) -> None:
    token = leader.win()
    with target.begin():
        with fenced(target, token):
            target.execute(INSERT, {"what": "within"})
        assert written(ledger) == []
        assert leader.bumped() == ("busy", None)
    assert written(ledger) == ["within"]


def test_an_open_transaction_is_joined_and_nothing_may_follow_a_commit_inside_the_block(
    ledger: str, leader: Leader, target: Target
) -> None:
    token = leader.win()
    target.execute(INSERT, {"what": "before"})  # begins one by itself
    with fenced(target, token):
        target.execute(INSERT, {"what": "within"})
    assert leader.bumped() == ("busy", None)
    assert written(ledger) == []
    target.commit()
    assert written(ledger) == ["before", "within"]
    target.execute(sa.text("SELECT 1"))
    with pytest.raises(InvalidRequestError), fenced(target, token):  # noqa: PT012 - the story is the claim
        target.commit()
        target.execute(INSERT, {"what": "fenced by nothing"})
    target.rollback()
    assert written(ledger) == ["before", "within"]


def test_an_exception_rolls_back(ledger: str, leader: Leader, target: Target) -> None:
    token = leader.win()
    with pytest.raises(ZeroDivisionError), fenced(target, token):  # noqa: PT012 - the story is the claim
        target.execute(INSERT, {"what": "never"})
        raise ZeroDivisionError
    assert written(ledger) == []
    assert leader.bumped() == ("won", 2)


@pytest.mark.parametrize("how", ["engine", "connection"])
def test_autocommit_is_refused_because_a_fence_would_be_over_at_once(ledger: str, leader: Leader, how: str) -> None:
    token = leader.win()
    engine = sa.create_engine(
        url(ledger), poolclass=NullPool, **({"isolation_level": "AUTOCOMMIT"} if how == "engine" else {})
    )
    with engine.connect() as conn:
        if how == "connection":
            conn = conn.execution_options(isolation_level="AUTOCOMMIT")  # noqa: PLW2901 - as one writes it
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"), fenced(conn, token):
            conn.execute(INSERT, {"what": "never"})
    assert written(ledger) == []


# --- Async


async def test_the_same_for_async(ledger: str, leader: Leader, async_target: Any) -> None:
    token = leader.win()
    async with fenced(async_target, token) as same:
        assert same is async_target
        assert leader.bumped() == ("busy", None)
        await async_target.execute(INSERT, {"what": "current"})
    assert not async_target.in_transaction()
    leader.win()
    with pytest.raises(StaleEpoch):
        async with fenced(async_target, token):
            await async_target.execute(INSERT, {"what": "stale"})
    assert written(ledger) == ["current"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("way", ["own", "joined", "implicit"])
async def test_an_async_transaction_that_ends_inside_the_block_is_an_error(
    leader: Leader, async_target: Any, ending: str, way: str
) -> None:
    token = leader.win()
    if way == "implicit":
        await async_target.execute(INSERT, {"what": "before"})
    with pytest.raises(FenceLost):  # noqa: PT012 - the story is the claim
        async with (
            async_target.begin() if way == "joined" else contextlib.nullcontext(),
            fenced(async_target, token),
        ):
            await async_target.execute(sa.text(ending))
            await async_target.execute(INSERT, {"what": "after"})
    await async_target.rollback()


async def test_an_async_transaction_is_joined(ledger: str, leader: Leader, async_target: Any) -> None:
    token = leader.win()
    async with async_target.begin():
        async with fenced(async_target, token):
            await async_target.execute(INSERT, {"what": "block"})
        assert leader.bumped() == ("busy", None)
    await async_target.execute(INSERT, {"what": "by itself"})
    async with fenced(async_target, token):
        await async_target.execute(INSERT, {"what": "within"})
    assert written(ledger) == ["block"]
    await async_target.commit()
    assert written(ledger) == ["block", "by itself", "within"]
    await async_target.execute(sa.text("SELECT 1"))
    with pytest.raises(InvalidRequestError):  # noqa: PT012 - the story is the claim
        async with fenced(async_target, token):
            await async_target.commit()
            await async_target.execute(INSERT, {"what": "fenced by nothing"})
    await async_target.rollback()
    assert written(ledger) == ["block", "by itself", "within"]


async def test_overtaken_between_snapshot_and_fence_it_begins_again(ledger: str, leader: Leader) -> None:
    leader.win()
    engine = create_async_engine(url(ledger), isolation_level="REPEATABLE READ", poolclass=NullPool)

    async def attempt() -> None:
        async with engine.connect() as conn, fenced(conn, leader.token(2)):
            await conn.execute(INSERT, {"what": "current"})

    with leader.conn.transaction():
        assert leader.bumped() == ("won", 2)
        task = asyncio.create_task(attempt())
        await until_waiting(ledger)
    await task
    assert written(ledger) == ["current"]


# --- Bad input, and what it must not bring along


def test_other_errors_are_clear_too(postgres: EmbeddedPostgres, leader: Leader, target: Target) -> None:
    with pytest.raises(NotLeader), fenced(target, LeaderToken("nobody", 1, "")):
        pass
    with pytest.raises(ConfigurationError, match="LeaderToken"):
        fenced(target, 7)  # type: ignore[call-overload]
    with database(postgres.dsn) as elsewhere:
        engine = sa.create_engine(url(elsewhere), poolclass=NullPool)
        with engine.connect() as conn, pytest.raises(SchemaError, match="pgleaderlock migrate"):
            fenced(conn, leader.win()).__enter__()


@pytest.mark.parametrize("wrong", [None, "dsn", sa])
def test_what_is_nothing_of_sqlalchemy_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="fenced takes a Connection"):
        fenced(wrong, LeaderToken("billing", 1, ""))


_WITHOUT = """
import sys
sys.modules[{missing!r}] = None
try:
    import {module}
except ImportError as error:
    print(error)
else:
    print("imported")
"""


@pytest.mark.parametrize(
    ("missing", "module", "said"),
    [
        ("greenlet", "pgleaderlock.contrib.sqlalchemy", "imported"),
        (
            "sqlalchemy",
            "pgleaderlock.contrib.sqlalchemy",
            "pgleaderlock.contrib.sqlalchemy needs sqlalchemy: pip install 'pgleaderlock[sqlalchemy]'",
        ),
        (
            "prometheus_client",
            "pgleaderlock.metrics",
            "pgleaderlock.metrics needs prometheus_client: pip install 'pgleaderlock[metrics]'",
        ),
        (
            "opentelemetry",
            "pgleaderlock.contrib.otel",
            "pgleaderlock.contrib.otel needs opentelemetry: pip install 'pgleaderlock[otel]'",
        ),
    ],
)
def test_a_missing_package_of_an_extra_is_said_with_the_remedy(missing: str, module: str, said: str) -> None:
    code = _WITHOUT.format(missing=missing, module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == said


def test_the_core_never_imports_sqlalchemy() -> None:
    code = "import sys, pgleaderlock, pgleaderlock.fence; print('sqlalchemy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
