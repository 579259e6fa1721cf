"""Giving roles up on purpose: no new work, then the end of the work in flight, then the end of the term, then the lock.

Nothing is released before the work has stopped, unless somebody's patience is over: then it is released as not clean,
and the successor waits. Imports `_board`, `_roles`, `_fsm`, `models` and the standard library.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

from pgleaderlock._board import Board
from pgleaderlock._fsm import Input
from pgleaderlock._roles import Role
from pgleaderlock.models import LockState

__all__ = ["Ended", "Releases"]

Ended = Future[bool]


@dataclass(slots=True)
class _Wait:
    """Somebody wants to hear when each of these roles was given up: those that are left, and how it went so far."""

    left: set[Role]
    told: Ended
    clean: bool = True


class Releases:
    """The releases that are going on, and who waits for their end. Used by the engine's task, on its loop."""

    def __init__(self, board: Board, quiet: Callable[[Role], Awaitable[None]], woken: Callable[[], None]) -> None:
        self._board = board
        self._quiet = quiet
        self._woken = woken
        self._going_on: dict[str, asyncio.Future[None]] = {}
        self._waits: list[_Wait] = []

    # --- In a tick

    async def begin(self) -> None:
        """Shut the gates of what is to be given up, and wait for its work beside the ticks."""
        board, began, unbegun = self._board, [], {}
        asked = [role for role in board.roles.values() if role.drained or role.release_asked or board.stopping]
        for role in asked:
            if role.driver.state is LockState.LEADER:
                self._begin(role)
                began.append(role)
            elif role.holds_lock and not role.in_term and (board.stopping or role.drained):
                unbegun[role.name] = role.keys  # won, but the term has not begun
        if unbegun:
            await board.there().unlock(unbegun)
            for name in unbegun:
                board.roles[name].holds_lock = False
        await self._note("drain_began", {role.name: None for role in began if role.drained})
        if board.forced:
            self.stop_waiting(self._going_on)
            await asyncio.sleep(0)

    def _begin(self, role: Role) -> None:
        if self._board.stopping:
            role.driver.request_stop()
        role.gate.drain()
        self._board.observers.tell("drain_began", role.name)
        role.driver.feed(Input.STOP_REQUESTED if self._board.stopping else Input.RELEASE_REQUESTED)
        going_on: asyncio.Future[None] = asyncio.ensure_future(self._quiet(role))
        going_on.add_done_callback(lambda _: self._woken())
        self._going_on[role.name] = going_on

    async def finish(self) -> float | None:
        """End the terms whose work has stopped, then give their locks back; answers when others had their chance."""
        board = self._board
        ready = {name: drained for name, drained in self._going_on.items() if drained.done()}
        if not ready:
            return None
        roles = [board.roles[name] for name in ready]
        now = board.clock.now()
        terms = {}
        for role in roles:
            drained = self._going_on.pop(role.name)
            # Clean only if the releaser had waited its own predecessor out, and nothing of it is still at work.
            quiet = not drained.cancelled() and drained.exception() is None and not role.gate.in_flight
            terms[role.name] = (role.epoch or 0, quiet and role.settled_at <= now)
        for role in roles:
            role.gate.close("released")
        ledger = board.there()
        for_others = [request.request_id for role in roles for request in role.requests if request.to_node_id]
        if for_others:
            await ledger.reserve(for_others)
        ended = await ledger.end_terms(terms)
        settled = []
        for role in roles:
            role.released_clean = role.name in ended and terms[role.name][1]
            requests, role.requests = role.requests, []
            # Of those for another node, whoever leads next says that they are done.
            settled += [(request.request_id, "done", _how(role)) for request in requests if not request.to_node_id]
        await ledger.settle_requests(settled)  # before anybody else can lead, and settle them in its own way
        await ledger.unlock({role.name: role.keys for role in roles})
        others_first_until = board.clock.now() + board.settings.acquire_delay_s[1]
        for role in roles:
            epoch, _ = terms[role.name]
            role.holds_lock = False
            self._over(role, clean=role.released_clean)
            role.not_before = others_first_until
            role.driver.feed(Input.RELEASE_SUCCEEDED)
            board.observers.tell("lost", role.name, epoch, "released")
            board.observers.tell("drain_ended", role.name, role.released_clean)
        await self._note("drain_ended", {role.name: _how(role) for role in roles if role.drained})
        return others_first_until

    async def _note(self, kind: str, details: Mapping[str, str | None]) -> None:
        """For people. Only of what was drained by somebody's wish: the rest is told by the end of its term."""
        if details:
            await self._board.there().note_drain(kind, details)

    # --- Out of the ordinary

    def stop_waiting(self, names: Collection[str]) -> None:
        """Patience is over: release without the end of the work."""
        for name in names:
            if name in self._going_on:
                self._going_on[name].cancel()

    def lost(self, role: Role) -> None:
        """The role was lost before it could be given up."""
        role.requests.clear()
        role.released_clean = False
        self._over(role, clean=False)
        if (drained := self._going_on.pop(role.name, None)) is not None:
            drained.cancel()

    # --- Those who wait

    def tell_when_free(self, roles: Collection[Role]) -> Ended:
        """Resolves when each of them was given up: with True, if each was released cleanly or not led at all."""
        wait = _Wait(set(roles), Future())
        self._waits.append(wait)
        if self._board.ledger is None:
            self.tell()  # nothing can be on its way to us
        return wait.told

    def resumed(self, roles: Collection[Role]) -> None:
        """What is not led yet will not be given up any more: nobody has to wait for that."""
        for role in roles:
            if not role.in_term:
                self._over(role, clean=True)

    def _over(self, role: Role, *, clean: bool) -> None:
        for wait in self._waits:
            if role in wait.left:
                wait.left.discard(role)
                wait.clean &= clean

    def tell(self, *, over: bool = False) -> None:
        """Called when no statement is on its way: what is not held now will not be, either."""
        waits, self._waits = self._waits, []
        for wait in waits:
            if wait.told.cancelled():
                continue
            wait.left = {role for role in wait.left if not role.free}
            if over or not wait.left:
                with contextlib.suppress(InvalidStateError):  # cancelled from another thread, just now
                    wait.told.set_result(wait.clean and not wait.left)
            else:
                self._waits.append(wait)

    def end(self) -> None:
        for drained in self._going_on.values():
            drained.cancel()
        self._going_on.clear()


def _how(role: Role) -> str:
    return "clean" if role.released_clean else "not clean"
