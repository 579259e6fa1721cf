"""The faces of pgleaderlock behind one set of names, so that one test holds all to the same behaviour.

A test is async and speaks to `Face`. Of the async face the objects are used as they are; of `pgleaderlock.sync`, what
is awaited in the other one runs in a thread. A work is one object that both faces can run. The fakes of
`pgleaderlock.testing` are two faces more, each on a database in memory, in real time.
"""

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import pgleaderlock
import pgleaderlock.sync
import pgleaderlock.testing
import pgleaderlock.testing.sync
from pgleaderlock._base.clock import BOOT_CLOCK
from pgleaderlock.keys import KeyPair
from support import server_side

__all__ = ["FACES", "SERVER_FACES", "Face", "Work"]

WAIT_S = 60.0


class Work:
    """Says that it has begun, and goes on until leadership ends. In its first terms it does what it is told instead."""

    def __init__(self, *first: Callable[..., Any]) -> None:
        self.terms: list[tuple[Any, ...]] = []
        self.running = 0
        self._first = list(first)
        self._begun = threading.Semaphore(0)

    async def begun(self) -> None:
        """A term has begun, once for each call."""
        assert await asyncio.to_thread(self._begun.acquire, timeout=WAIT_S), "the work did not begin"

    def _begin(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        self.terms.append(args)
        self.running += 1
        self._begun.release()
        return self._first.pop(0) if self._first else None

    async def run(self, *args: Any) -> Any:
        act = self._begin(args)
        try:
            if act is not None:
                return act()
            await asyncio.get_running_loop().create_future()
        finally:
            self.running -= 1

    def run_blocking(self, *args_and_stop: Any) -> Any:
        *args, stop = args_and_stop
        act = self._begin(tuple(args))
        try:
            if act is not None:
                return act()
            assert stop.wait(WAIT_S), "nobody ended the term"
            return None
        finally:
            self.running -= 1


class Face:
    """The async face."""

    name = "async"
    module: Any = pgleaderlock
    blocking = False
    lock_type: Any = pgleaderlock.LeaderLock
    election_type: Any = pgleaderlock.LeaderElection

    def lock(self, dsn: str, name: str, **options: Any) -> Any:
        return self.adapt(self.lock_type.for_name(self.place(dsn), name, **options), pgleaderlock.LeaderLock)

    def election(self, dsn: str, roles: Any, **options: Any) -> Any:
        return self.adapt(self.election_type(self.place(dsn), roles, **options), pgleaderlock.LeaderElection)

    def place(self, dsn: str) -> Any:
        """What is given for the DSN."""
        return dsn

    def holders(self, dsn: str, keys: KeyPair) -> list[int]:
        """The sessions that hold the lock, by the server."""
        return server_side.holders(dsn, keys)

    def terminate(self, dsn: str, keys: KeyPair) -> None:
        """The server ends the session that holds the lock."""
        server_side.terminate(dsn, keys)

    def gate(self, election: Any, role: str) -> Any:
        return election.gate(role)

    async def guard(self, how: str, *args: Any, **options: Any) -> Any:
        return await getattr(self.module, how)(*args, **options)

    def lead(self, who: Any, *args: Any, **options: Any) -> "asyncio.Task[Any]":
        *named, work = args
        return asyncio.ensure_future(who.lead(*named, work.run, **options))

    def adapt(self, made: Any, _like: type) -> Any:
        return made


class SyncFace(Face):
    name = "sync"
    module = pgleaderlock.sync
    blocking = True
    lock_type = pgleaderlock.sync.LeaderLock
    election_type = pgleaderlock.sync.LeaderElection

    def gate(self, election: Any, role: str) -> Any:
        return Threaded(election.gate(role), pgleaderlock.LeaderGate)

    async def guard(self, how: str, *args: Any, **options: Any) -> Any:
        got = await asyncio.to_thread(getattr(self.module, how), *args, **options)
        return Threaded(got, pgleaderlock.LeadershipGuard)

    def lead(self, who: Any, *args: Any, **options: Any) -> "asyncio.Task[Any]":
        *named, work = args
        return asyncio.ensure_future(_in_thread(who.made.lead, *named, work.run_blocking, **options))

    def adapt(self, made: Any, like: type) -> Any:
        return Threaded(made, like)


class _InMemory:
    """Of both fakes: one database in memory for each DSN."""

    def __init__(self) -> None:
        self._databases: dict[str, pgleaderlock.testing.FakeDatabase] = {}

    def place(self, dsn: str) -> Any:
        return self._databases.setdefault(dsn, pgleaderlock.testing.FakeDatabase(clock=BOOT_CLOCK))

    def holders(self, dsn: str, keys: KeyPair) -> list[int]:
        holder = self.place(dsn).locks.get(keys)
        return [] if holder is None else [holder.pid]


class FakeFace(_InMemory, Face):
    name = "fake"
    lock_type = pgleaderlock.testing.FakeLock
    election_type = pgleaderlock.testing.FakeElection

    def terminate(self, dsn: str, keys: KeyPair) -> None:
        self.place(dsn).locks[keys].end("terminated")


class SyncFakeFace(_InMemory, SyncFace):
    name = "sync-fake"
    lock_type = pgleaderlock.testing.sync.FakeLock
    election_type = pgleaderlock.testing.sync.FakeElection

    def terminate(self, dsn: str, keys: KeyPair) -> None:
        async def end() -> None:
            self.place(dsn).locks[keys].end("terminated")

        pgleaderlock.sync.background.call(end)


class Threaded:
    """A blocking object, with what its async twin awaits run in a thread."""

    def __init__(self, made: Any, like: type) -> None:
        self.made = made
        self._like = like

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.made, name)
        twin = getattr(self._like, name, None)
        return functools.partial(_in_thread, found) if inspect.iscoroutinefunction(twin) else found

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.made.__enter__)
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.made.__exit__, *error)

    def changes(self) -> AsyncIterator[Any]:
        return _stepwise(self.made.changes())


async def _in_thread(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return await asyncio.to_thread(call, *args, **options)


async def _stepwise(blocking: Any) -> AsyncIterator[Any]:
    try:
        while (item := await asyncio.to_thread(next, blocking, None)) is not None:
            yield item
    finally:
        await asyncio.to_thread(blocking.close)


SERVER_FACES = (Face(), SyncFace())
FACES = (*SERVER_FACES, FakeFace(), SyncFakeFace())
