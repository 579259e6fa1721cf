"""`exec --fenced`: the command behind the gate of an election.

Imports `election`, `_one_run`, `_exec_ends`, `_probes`, `_reach`, `models` and `errors`. It must never start the
command twice, and never give the role back while somebody of its group lives.
"""

import asyncio
import contextlib
from typing import Any

from pgleaderlock.cli._contender import warn
from pgleaderlock.cli._exec_ends import for_people, not_won, outcome
from pgleaderlock.cli._one_run import Ended, Job, NotWon, OneRun
from pgleaderlock.cli._output import exit_code_for_signal
from pgleaderlock.cli._probes import Watched
from pgleaderlock.cli._reach import hopeless
from pgleaderlock.election import LeaderElection
from pgleaderlock.errors import LockError, NotLeader, ShutdownError
from pgleaderlock.models import LeaderToken, LockState

__all__ = ["SHUTDOWN_TIMEOUT_S", "FencedRun"]

# The command has ended: a server that does not answer must not hold up its exit code.
SHUTDOWN_TIMEOUT_S = 5.0


class FencedRun:
    """Competes in an election, and runs the command behind its gate."""

    def __init__(self, dsn: str, job: Job, election: LeaderElection, *, switched_off: str = "") -> None:
        """`switched_off` says where this node was told never to lead; empty if it was not."""
        assert job.lock_key.name is not None
        self._switched_off = switched_off
        self._dsn = dsn
        self._job = job
        self._election = election
        self._role = job.lock_key.name
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._warned: str | None = None
        self._looked = bool(switched_off)
        """The first try is over, however it went."""

    async def watched(self, host: str, port: int | None) -> int:
        async with Watched(self._election, host=host, port=port) as around:
            return await self.run(around)

    async def run(self, around: Watched) -> int:
        self._run = run = OneRun(self._job)
        self._listen()
        run.catch_signals()
        watching = asyncio.ensure_future(self._watch())
        await asyncio.sleep(0)  # it watches from now on
        leading: asyncio.Future[None] | None = None
        try:
            await self._election.start()
            leading = asyncio.ensure_future(self._election.lead(self._role, self._work))
            around.ready()
            await self._compete(leading)
            if run.began:
                await asyncio.wait([leading])
            run.called_off = True
        finally:
            watching.cancel()
            around.stopping()
            with contextlib.suppress(ShutdownError):
                await self._election.shutdown(SHUTDOWN_TIMEOUT_S)
        with contextlib.suppress(Ended, LockError):
            await leading
        if run.began:
            return outcome(run)
        if run.interrupted_by.done():
            return exit_code_for_signal(run.interrupted_by.result())
        if self._switched_off:
            raise NotWon(f"not won: this node is switched off, it never leads ({self._switched_off})")
        error = self._error or self._election.last_error
        if error is not None and self._election.leader(self._role) is None:
            raise for_people(error)
        raise await not_won(self._dsn, self._job)

    @property
    def last_error(self) -> Exception | None:
        """Why the gate is shut; for `OneRun`."""
        try:
            self._election.gate(self._role).require_leader()
        except NotLeader as refused:
            return (self._election.last_error if refused.reason == "lost" else None) or refused
        return None

    async def _work(self, token: LeaderToken) -> None:
        await self._run.work(self, {"PGLEADERLOCK_ROLE": token.role, "PGLEADERLOCK_EPOCH": str(token.epoch)})

    async def _compete(self, leading: "asyncio.Future[None]") -> None:
        """Return when the command runs or never will. Once the lock is won, the gate is waited for, however long."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._job.wait_s
        while not (self._run.began or leading.done() or self._run.interrupted_by.done()):
            left_s = None
            if self._election.state(self._role) is not LockState.LEADER:
                left_s = deadline - loop.time() if self._job.wait_s else None
                if self._hopeless() or (self._looked if left_s is None else left_s <= 0):
                    return
            self._news.clear()
            news = asyncio.ensure_future(self._news.wait())
            ends: list[asyncio.Future[Any]] = [leading, self._run.interrupted_by, news]
            await asyncio.wait(ends, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()

    def _hopeless(self) -> bool:
        return self._error is not None and not self._connected and hopeless(self._error)

    async def _watch(self) -> None:
        """Whatever becomes of the first try, the election tells of it: who leads, or that it does not know."""
        async for _ in self._election.changes():
            self._looked = True
            self._news.set()

    def _listen(self) -> None:
        election = self._election
        self._connected = False

        @election.on_state_change
        def changed(_role: str, _old: LockState, new: LockState) -> None:
            if new is LockState.LEADER:
                self._connected, self._error = True, None
            self._news.set()

        @election.on_error
        def failed(error: Exception) -> None:
            self._error = error
            if self._job.wait_s and not self._run.began and str(error) != self._warned:
                self._warned = str(error)
                warn(f"{error} (trying again for up to {self._job.wait_s:g} s)")
            self._news.set()
