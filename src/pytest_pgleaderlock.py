"""The pytest plugin of pgleaderlock: fakes without a database, and real elections on an embedded PostgreSQL.

Imports pgleaderlock only when a test asks for one of the fixtures: pytest loads this module in every run.
"""

import contextlib
import functools
import itertools
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from pgleaderlock import LeaderElection, sync, testing
    from pgleaderlock.embedded import EmbeddedPostgres
    from pgleaderlock.testing import sync as sync_testing

__all__ = ["MakeElection", "MakeSyncElection"]

NO_DSN = "host=in-memory"
NOT_DURABLE = {"fsync": "off", "full_page_writes": "off"}


class MakeElection(Protocol):
    """`leader_election(roles, **options)`."""

    def __call__(self, roles: Any, **options: Any) -> "LeaderElection": ...


class MakeSyncElection(Protocol):
    """`sync_leader_election(roles, **options)`."""

    def __call__(self, roles: Any, **options: Any) -> "sync.LeaderElection": ...


# --- Without a database


@pytest.fixture
def fake_election() -> "functools.partial[testing.FakeElection]":
    """`fake_election(roles, **options)`: a `pgleaderlock.testing.FakeElection`, not started."""
    from pgleaderlock.testing import FakeElection  # noqa: PLC0415 - imported only if the fixture is used

    return functools.partial(FakeElection, NO_DSN)


@pytest.fixture
def fake_lock() -> "functools.partial[testing.FakeLock]":
    """`fake_lock(name, **options)`: a `pgleaderlock.testing.FakeLock`, not started."""
    from pgleaderlock.testing import FakeLock  # noqa: PLC0415 - imported only if the fixture is used

    return functools.partial(FakeLock.for_name, NO_DSN)


@pytest.fixture
def sync_fake_election() -> "functools.partial[sync_testing.FakeElection]":
    """`sync_fake_election(roles, **options)`: a `pgleaderlock.testing.sync.FakeElection`, not started."""
    from pgleaderlock.testing.sync import FakeElection  # noqa: PLC0415 - imported only if the fixture is used

    return functools.partial(FakeElection, NO_DSN)


@pytest.fixture
def sync_fake_lock() -> "functools.partial[sync_testing.FakeLock]":
    """`sync_fake_lock(name, **options)`: a `pgleaderlock.testing.sync.FakeLock`, not started."""
    from pgleaderlock.testing.sync import FakeLock  # noqa: PLC0415 - imported only if the fixture is used

    return functools.partial(FakeLock.for_name, NO_DSN)


# --- On a real server


@pytest.fixture(scope="session")
def pgleaderlock_postgres() -> "Iterator[EmbeddedPostgres]":
    """A private PostgreSQL with the ledger, one per test process; needs `pgleaderlock[embedded]`. Use its `dsn`."""
    import psycopg  # noqa: PLC0415 - imported only if the fixture is used

    from pgleaderlock.embedded import EmbeddedPostgres  # noqa: PLC0415
    from pgleaderlock.migrate import sql  # noqa: PLC0415

    # Not one of pytest's folders: for root, the server runs under another account, which must have access to the
    # folder.
    with (
        tempfile.TemporaryDirectory(prefix="pgleaderlock-") as folder,
        EmbeddedPostgres(_passable(folder) / "pg", port=0, settings=NOT_DURABLE) as server,
    ):
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            conn.execute(sql().encode())
        yield server


@pytest.fixture
def leader_election(pgleaderlock_postgres: "EmbeddedPostgres") -> MakeElection:
    """`leader_election(roles, **options)`: a `LeaderElection` on that server, not started.

    Elections of one test compete with each other; those of other tests have other namespaces.
    """
    from pgleaderlock import LeaderElection  # noqa: PLC0415 - imported only if the fixture is used

    settings = _settings()
    return lambda roles, **options: LeaderElection(pgleaderlock_postgres.dsn, roles, **{**next(settings), **options})


@pytest.fixture
def sync_leader_election(pgleaderlock_postgres: "EmbeddedPostgres") -> Iterator[MakeSyncElection]:
    """The same with `pgleaderlock.sync.LeaderElection`. Elections that still run at the end of the test are shut
    down."""
    from pgleaderlock.sync import LeaderElection  # noqa: PLC0415 - imported only if the fixture is used

    settings = _settings()
    with contextlib.ExitStack() as made:

        def make(roles: Any, **options: Any) -> "sync.LeaderElection":
            election = LeaderElection(pgleaderlock_postgres.dsn, roles, **{**next(settings), **options})
            made.callback(election.shutdown)
            return election

        yield make


def _settings() -> Iterator[Any]:
    """The default options for the elections of one test."""
    namespace = f"test-{uuid.uuid4().hex[:12]}"
    return ({"namespace": namespace, "node_id": f"node-{number}"} for number in itertools.count(1))


def _passable(folder: str) -> Path:
    path = Path(folder)
    path.chmod(0o711)
    return path
