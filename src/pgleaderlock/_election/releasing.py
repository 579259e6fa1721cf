"""Giving roles up on purpose: no new work, then the end of the work in flight, then the end of the term, then the lock.

`Releases` carries it out, `Requests` obeys what operators ask from elsewhere: to step down from a role, to drain the
node, to resume it. Nothing is released before its work has stopped, unless the caller's time is over: then the release
is not clean, and the successor waits.
"""

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

from pgleaderlock._election.ledger import Beat, Request, Settled
from pgleaderlock._election.role import NEVER, Board, Role
from pgleaderlock.models import LEAD_CANCELLED, WORK_FAILED, LockState
from pgleaderlock.observer import DrainBegan, DrainEnded, Lost

__all__ = ["CANCELLED_END_S", "Ended", "Releases", "Requests"]

Ended = Future[bool]
CANCELLED_END_S = 1.0
"""How long a drain waits for work that it has cancelled."""


@dataclass(slots=True)
class _Wait:
    """A caller that waits until these roles were given up: those that are left, and how it went so far."""

    left: set[Role]
    told: Ended
    clean: bool = True

    def over(self, role: Role, *, clean: bool) -> None:
        if role in self.left:
            self.left.discard(role)
            self.clean &= clean

    def settle(self, *, over: bool) -> bool:
        """Answer the caller if nothing is left, or if the election is over; True if there is nothing more to do."""
        if self.told.cancelled():
            return True
        self.left = {role for role in self.left if not role.free}
        if self.left and not over:
            return False
        with contextlib.suppress(InvalidStateError):  # cancelled from another thread, just now
            self.told.set_result(self.clean and not self.left)
        return True


class Releases:
    """The releases that are going on, and who waits for their end. Used by the engine's task, on its loop."""

    def __init__(self, board: Board) -> None:
        self._board, self._owner = board, board.owner
        self._going_on: dict[str, asyncio.Future[None]] = {}
        self._waits: list[_Wait] = []

    # --- In a tick

    async def begin(self) -> None:
        """Shut the gates of what is to be given up, and wait for its work beside the ticks."""
        board, began, unbegun = self._board, [], []
        asked = [role for role in board.roles.values() if role.given_up or role.release_asked or board.stopping]
        for role in asked:
            if role.driver.state is LockState.LEADER:
                self._begin(role)
                began.append(role)
            elif role.holds_lock and not role.in_term and (board.stopping or role.given_up):
                unbegun.append(role)  # won, but the term has not begun
        if unbegun:
            await board.open_ledger().unlock({role.name: role.keys for role in unbegun})
            for role in unbegun:
                role.unlocked()
        await self._note("drain_began", {role.name: _why(role) for role in began if role.given_up})
        self.stop_waiting([role.name for role in began if role.hurried_epoch == role.epoch])
        if board.forced:
            self.stop_waiting(self._going_on)
            await asyncio.sleep(0)

    def _begin(self, role: Role) -> None:
        role.gate.drain()
        self._owner.notify(DrainBegan(role.name))
        role.releasing(stopping=self._board.stopping)
        going_on: asyncio.Future[None] = asyncio.ensure_future(self._owner.quiet(role))
        going_on.add_done_callback(lambda _: self._board.due.woken.set())
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
            terms[role.name] = (role.epoch, quiet and role.settled_at <= now)
        for role in roles:
            role.gate.close("released")
        ledger = board.open_ledger()
        requests = [(role, request) for role in roles for request in role.requests]
        for_others = [request.request_id for _, request in requests if request.to_node_id]
        if for_others:
            await ledger.reserve(for_others)
        ended = await ledger.end_terms(terms)
        clean = {name: name in ended and clean for name, (_, clean) in terms.items()}
        # Requests in favour of another node are settled by the next leader. The others are settled here, before the
        # lock is free: the next leader would settle them in its own way.
        await ledger.settle_requests(
            [
                (request.request_id, "done", _how(clean[role.name]))
                for role, request in requests
                if not request.to_node_id
            ]
        )
        await ledger.unlock({role.name: role.keys for role in roles})
        others_first_until = board.clock.now() + board.settings.acquire_delay_s[1]
        for role in roles:
            role.released(clean=clean[role.name], rest_until=others_first_until)
            self._over(role, clean=role.released_clean)
            self._owner.notify(Lost(role.name, role.epoch, "released"))
            self._owner.notify(DrainEnded(role.name, role.released_clean))
        await self._note("drain_ended", {role.name: _how(role.released_clean) for role in roles if role.given_up})
        return others_first_until

    async def _note(self, kind: str, details: Mapping[str, str | None]) -> None:
        """For people. Only of roles that this node does not compete for: other releases show as the end of the term."""
        if details:
            await self._board.open_ledger().note_drain(kind, details)

    # --- Out of the ordinary

    def stop_waiting(self, names: Collection[str]) -> None:
        """The caller's time is over: release without the end of the work."""
        for name in names:
            if name in self._going_on:
                self._going_on[name].cancel()

    def lost(self, role: Role) -> None:
        """The role was lost before it could be given up."""
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
        """What is not led yet will not be given up any more: no caller has to wait for that."""
        for role in roles:
            if not role.in_term:
                self._over(role, clean=True)

    def _over(self, role: Role, *, clean: bool) -> None:
        for wait in self._waits:
            wait.over(role, clean=clean)

    def tell(self, *, over: bool = False) -> None:
        """Called when no statement is on its way: what is not held now will not be, either."""
        self._waits = [wait for wait in self._waits if not wait.settle(over=over)]

    def end(self) -> None:
        for drained in self._going_on.values():
            drained.cancel()
        self._going_on.clear()


def _why(role: Role) -> str | None:
    if not role.works.given_up:
        return None
    return LEAD_CANCELLED if role.works.left else WORK_FAILED


def _how(clean: bool) -> str:
    return "clean" if clean else "not clean"


class Requests:
    """What was asked of this node from elsewhere. Used by the engine's task, on its loop.

    Requests are rows, so they are obeyed however late they are read, and once: each has an outcome in the end.
    """

    def __init__(self, board: Board, releases: Releases) -> None:
        self._board = board
        self._releases = releases
        self.draining = False
        """The node as a whole is drained: by its application, or by a request. Outlives the session."""
        self.to_tell: bool | None = None
        """What was decided about that and the ledger has not heard yet."""
        self._asked: dict[int, Ended | None] = {}
        """What was asked of the node and is open in the ledger; with a drain, when it has ended. Each is obeyed once,
        however often it is read."""
        self._unanswered: set[int] = set()
        self._cancel_at = self._release_at = NEVER
        """When the work that a drain waits for is cancelled, and when it is not waited for any longer."""

    @property
    def due_at(self) -> float:
        return min(self._cancel_at, self._release_at)

    # --- By its application

    def drain_node(self) -> None:
        """Drain every role, and those that are added later."""
        self.draining = self.to_tell = True
        for role in self._board.roles.values():
            role.drain(with_node=True)

    def resume_node(self, roles: Collection[Role]) -> None:
        """Compete for these again, which ends the drain of the node as a whole. The others stay drained, by name."""
        self.draining = self.to_tell = False
        self._cancel_at = self._release_at = NEVER
        for role in self._board.roles.values():
            role.node_resumed(stays=role not in roles)
        self._releases.resumed([role for role in self._board.roles.values() if not role.drained])

    def told(self, draining: bool | None) -> None:
        """The ledger has heard this."""
        if self.to_tell == draining:
            self.to_tell = None

    # --- From elsewhere

    async def obey(self, beat: Beat) -> None:
        """Begin what the last heartbeat has told us of."""
        settled, still_open = [], {request.request_id for request in beat.requests}
        self._asked = {request_id: ended for request_id, ended in self._asked.items() if request_id in still_open}
        for request in beat.requests:
            if request.kind == "step_down":
                settled += self._step_down(request)
            elif request.request_id not in self._asked:
                if request.kind == "drain":
                    await self._limit_work(request)
                self._asked[request.request_id] = self._drain_or_resume(request)
        # Again, until the ledger has closed it: other sessions of this node may still be at it.
        self._unanswered = set(self._asked)
        await self._board.open_ledger().settle_requests(settled)
        if self.to_tell is not None:
            self._board.due.beat_soon()  # so that others see what this node has just begun

    async def _limit_work(self, request: Request) -> None:
        """Of several drains the shortest limit counts: a second one may end what the first one waits for."""
        limit_s = await self._board.open_ledger().work_timeout_s(request.request_id)
        if limit_s is not None:
            self._cancel_at = min(self._cancel_at, self._board.clock.now() + limit_s)

    def end_work(self) -> None:
        """The time that an operator gave the work is over: cancel it, and a moment later wait for it no longer."""
        now = self._board.clock.now()
        waiting = [role for role in self._board.led() if role.driver.state is LockState.RELEASING]
        if self._cancel_at <= now:
            self._cancel_at, self._release_at = NEVER, now + CANCELLED_END_S
            for role in waiting:
                role.gate.cancel_acting()
        elif self._release_at <= now:
            self._release_at = NEVER
            self._releases.stop_waiting([role.name for role in waiting])

    def _drain_or_resume(self, request: Request) -> Ended | None:
        """What its application has drained by name stays drained."""
        roles = list(self._board.roles.values())
        if request.kind == "drain":
            self.drain_node()
            return self._releases.tell_when_free(roles)
        self.resume_node(roles)
        return None

    def _step_down(self, request: Request) -> list[Settled]:
        """Begin it; or answer what became of it already."""
        role, to = self._board.roles.get(request.role or ""), request.to_node_id
        if role is None or role.driver.state is not LockState.LEADER:
            return []
        if any(known.request_id == request.request_id for known in role.requests):
            return []
        if to == self._board.identity.node_id:
            return [(request.request_id, "done", f"{to} leads it already")]
        if to is not None and not request.to_is_live:
            return [(request.request_id, "refused", f"{to} is no live candidate: nothing was given up")]
        role.ask_release(request)
        return []

    async def finish(self) -> None:
        """Answer what was asked of the node and is done, once its record says so, too."""
        if self.to_tell is not None:
            return
        answers: list[Settled] = []
        for request_id in sorted(self._unanswered):
            ended = self._asked[request_id]
            if ended is None:
                answers.append((request_id, "done", None))
            elif not self.draining:
                answers.append((request_id, "refused", "resumed before it had ended"))
            elif ended.done():
                detail = "clean" if ended.result() else "not clean: work was still in flight, or a term was lost"
                answers.append((request_id, "done", detail))
        await self._board.open_ledger().settle_requests(answers)
        self._unanswered -= {request_id for request_id, _, _ in answers}
