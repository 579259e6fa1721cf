"""Fixtures for the tests of the SQLite store alone: its file, its clock, its disk."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pgleaderlock.server.sqlite.store import SqliteStore
from support.fakes import FakeClock
from support.stores import OpenStore
from support.torn_disk import Disk


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks.db"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def opened(path: Path, clock: FakeClock) -> OpenStore:
    @asynccontextmanager
    async def open_it(**options: Any) -> AsyncIterator[SqliteStore]:
        store = SqliteStore(options.pop("path", path), **{"clock": clock, **options})
        await store.open()
        try:
            yield store
        finally:
            await store.close()

    return open_it


@pytest.fixture
def disk() -> Iterator[Disk]:
    """Keeps record of what is written and synced, and fails when it is told to."""
    disk = Disk()
    yield disk
    disk.unregister()
