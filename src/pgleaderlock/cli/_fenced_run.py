"""`run --fenced`: every role of an election from start to end, and what is logged of each.

Imports `election`, `_logging`, `_probes`, `_reach`, `_signals` and `errors`. It must never end before what is in flight
has ended: a signal is a drain of everything, then the end.
"""

import asyncio
import signal

from pgleaderlock._logging import StructuredLogger
from pgleaderlock.cli._output import EXIT_OK
from pgleaderlock.cli._probes import Watched
from pgleaderlock.cli._reach import explained, hopeless
from pgleaderlock.cli._signals import Stopper
from pgleaderlock.election import LeaderElection
from pgleaderlock.errors import NotLeader, PgLeaderLockError

__all__ = ["FencedElection"]


class FencedElection:
    """Who leads each role by the ledger, under which epoch, and whether its gate is open here."""

    def __init__(self, election: LeaderElection, stopper: Stopper, log: StructuredLogger) -> None:
        self._election = election
        self._stopper = stopper
        self._log = log
        self._log_of = {role: log.bind(lock=role) for role in election.roles}

    async def watched(self, host: str, port: int | None) -> int:
        async with Watched(self._election, host=host, port=port) as around:
            return await self.run(around)

    async def run(self, around: Watched) -> int:
        self._listen()
        watching = asyncio.ensure_future(self._watch())
        asked = asyncio.ensure_future(self._stopper.asked())
        await asyncio.sleep(0)  # both are there before anything happens
        starting = asyncio.ensure_future(self._election.start())
        try:
            await asyncio.wait([asked, starting], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()  # a missing ledger is raised here
                error = self._election.last_error
                if isinstance(error, PgLeaderLockError) and hopeless(error):
                    raise explained(error)
                around.ready()
            signum = await asked
            around.stopping()
            self._log.info("stopping", signal=signal.Signals(signum).name)
            await self._election.drain()
        finally:
            asked.cancel()
            await self._election.shutdown()
            await asyncio.wait([starting, watching])
        return EXIT_OK

    async def _watch(self) -> None:
        """Ends with the election."""
        async for change in self._election.changes():
            log = self._log_of[change.role]
            if change.is_leader:
                log.info("gate_open", epoch=change.epoch, holder=change.holder)
                continue
            try:
                self._election.gate(change.role).require_leader()
            except NotLeader as refused:
                log.info("gate_shut", reason=refused.reason, epoch=change.epoch, holder=change.holder)

    def _listen(self) -> None:
        """Log each callback by its name. (The library itself logs the changes of state.)"""
        election, log, log_of = self._election, self._log, self._log_of
        election.on_acquired(lambda role: log_of[role].info("on_acquired", epoch=election.gate(role).current_epoch))
        election.on_released(lambda role: log_of[role].info("on_released"))
        election.on_lost(lambda role: log_of[role].warning("on_lost"))
        election.on_error(lambda error: log.warning("on_error", error=error))
        election.on_stopped(lambda: log.info("on_stopped"))
