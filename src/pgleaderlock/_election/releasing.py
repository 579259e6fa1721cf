"""Releasing roles: refuse new work, wait for the work in flight, end the term, then release the lock.

`Releases` does that. `Requests` carries out the requests that operators make through the ledger: to step down from a
role, to drain the node, to resume it. A role is not released before its work has stopped, unless the caller's timeout
has passed: then the release is not clean, and the successor waits.
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
    """A caller that waits until its roles are given up: the roles left, and whether all were released cleanly so
    far."""

    left: set[Role]
    told: Ended
    clean: bool = True

    def over(self, role: Role, *, clean: bool) -> None:
        if role in self.left:
            self.left.discard(role)
            self.clean &= clean

    def settle(self, *, over: bool) -> bool:
        """Resolve the caller's future if no role is left, or if the election is over; True once it is resolved."""
        if self.told.cancelled():
            return True
        self.left = {role for role in self.left if not role.free}
        if self.left and not over:
            return False
        with contextlib.suppress(InvalidStateError):  # cancelled from another thread, just now
            self.told.set_result(self.clean and not self.left)
        return True


class Releases:
    """The releases under way, and the callers that wait for them. Used by the engine's task, on its loop."""

    def __init__(self, board: Board) -> None:
        self._board, self._owner = board, board.owner
        self._going_on: dict[str, asyncio.Future[None]] = {}
        self._waits: list[_Wait] = []

    # --- In a tick

    async def begin(self) -> None:
        """Shut the gates of the roles to be given up, and start to wait for their work beside the ticks."""
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
        if role.release_forced:
            going_on.cancel()

    async def finish(self) -> float | None:
        """End the terms whose work has stopped, then release their locks. Returns until when other nodes go first; None
        if nothing was released."""
        board = self._board
        ready = {name: drained for name, drained in self._going_on.items() if drained.done()}
        if not ready:
            return None
        roles = [board.roles[name] for name in ready]
        now = board.clock.now()
        terms = {}
        for role in roles:
            drained = self._going_on.pop(role.name)
            # Clean only if this node had waited its own predecessor out, and none of its work is still running.
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
        # A request in favour of another node is settled by the next leader. The others are settled here, before the
        # lock is free, because the next leader would record another outcome for them.
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
        """Record an event for people, for given-up roles only: other releases show as the end of the term."""
        if details:
            await self._board.open_ledger().note_drain(kind, details)

    # --- Out of the ordinary

    def stop_waiting(self, names: Collection[str]) -> None:
        """The caller's timeout has passed: release without waiting for the work, even if the release has yet to
        begin."""
        for name in names:
            if name in self._going_on:
                self._going_on[name].cancel()
            else:
                self._board.roles[name].force_release()

    def lost(self, role: Role) -> None:
        """The role was lost before it could be released."""
        self._over(role, clean=False)
        if (drained := self._going_on.pop(role.name, None)) is not None:
            drained.cancel()

    # --- Callers that wait

    def tell_when_free(self, roles: Collection[Role]) -> Ended:
        """A future that resolves once all of the roles are given up: True if each was released cleanly or not led."""
        wait = _Wait(set(roles), Future())
        self._waits.append(wait)
        if self._board.ledger is None:
            self.tell()  # without a session, no role can be won
        return wait.told

    def resumed(self, roles: Collection[Role]) -> None:
        """No caller has to wait for a resumed role that is not led: it will not be given up any more."""
        for role in roles:
            if not role.in_term:
                self._over(role, clean=True)

    def _over(self, role: Role, *, clean: bool) -> None:
        for wait in self._waits:
            wait.over(role, clean=clean)

    def tell(self, *, over: bool = False) -> None:
        """Answer the callers that are done. Call it only when no statement is under way that could win a role."""
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
    """Carries out the requests to this node in the ledger. Used by the engine's task, on its loop.

    A request is a row, so it is carried out once, however late it is read, and its outcome is recorded.
    """

    def __init__(self, board: Board, releases: Releases) -> None:
        self._board = board
        self._releases = releases
        self.draining = False
        """The node as a whole is drained: by its application, or by a request. Outlives the session."""
        self.to_tell: bool | None = None
        """The new value of `draining` that the ledger has not recorded yet."""
        self._asked: dict[int, Ended | None] = {}
        """The requests to the node that are open in the ledger; a drain has the future of its end. Each is carried out
        once, however often it is read."""
        self._unanswered: set[int] = set()
        self._cancel_at = self._release_at = NEVER
        """When a drain cancels the work that it waits for, and when it stops waiting for that work."""

    @property
    def due_at(self) -> float:
        return min(self._cancel_at, self._release_at)

    # --- Requests of the application

    def drain_node(self) -> None:
        """Drain every role, and those that are added later."""
        self.draining = self.to_tell = True
        for role in self._board.roles.values():
            role.drain(with_node=True)

    def resume_node(self, roles: Collection[Role]) -> None:
        """Compete for these roles again, which ends the drain of the node. The others stay drained one by one."""
        self.draining = self.to_tell = False
        self._cancel_at = self._release_at = NEVER
        for role in self._board.roles.values():
            role.node_resumed(stays=role not in roles)
        self._releases.resumed([role for role in self._board.roles.values() if not role.drained])

    def told(self, draining: bool | None) -> None:
        """The ledger has recorded this value."""
        if self.to_tell == draining:
            self.to_tell = None

    # --- Requests in the ledger

    async def obey(self, beat: Beat) -> None:
        """Begin to carry out the requests that the last heartbeat has returned."""
        settled, still_open = [], {request.request_id for request in beat.requests}
        self._asked = {request_id: ended for request_id, ended in self._asked.items() if request_id in still_open}
        for request in beat.requests:
            if request.kind == "step_down":
                settled += self._step_down(request)
            elif request.request_id not in self._asked:
                if request.kind == "drain":
                    await self._limit_work(request)
                self._asked[request.request_id] = self._drain_or_resume(request)
        # Answer again until the ledger has closed the request: other sessions of this node may still be working on it.
        self._unanswered = set(self._asked)
        await self._board.open_ledger().settle_requests(settled)
        if self.to_tell is not None:
            self._board.due.beat_soon()  # the heartbeat tells other nodes

    async def _limit_work(self, request: Request) -> None:
        """Note the time limit of a drain. The shortest one counts: a second drain can end the work that a first one
        waits for."""
        limit_s = await self._board.open_ledger().work_timeout_s(request.request_id)
        if limit_s is not None:
            self._cancel_at = min(self._cancel_at, self._board.clock.now() + limit_s)

    def end_work(self) -> None:
        """If the operator's time limit has passed, cancel the work; if it then does not end either, stop waiting for
        it."""
        now = self._board.clock.now()
        waiting = [role for role in self._board.led() if role.given_up or role.driver.state is LockState.RELEASING]
        if self._cancel_at <= now:
            self._cancel_at, self._release_at = NEVER, now + CANCELLED_END_S
            for role in waiting:
                role.gate.cancel_acting()
        elif self._release_at <= now:
            self._release_at = NEVER
            self._releases.stop_waiting([role.name for role in waiting])

    def _drain_or_resume(self, request: Request) -> Ended | None:
        """Drain or resume the node. A role that the application has drained by name stays drained."""
        roles = list(self._board.roles.values())
        if request.kind == "drain":
            self.drain_node()
            return self._releases.tell_when_free(roles)
        self.resume_node(roles)
        return None

    def _step_down(self, request: Request) -> list[Settled]:
        """Begin to step down; returns the outcome if it is known already."""
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
        """Record the outcome of the node's requests that are done, once the ledger shows whether the node is
        drained."""
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
