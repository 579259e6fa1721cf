"""What was asked of this node from afar: to step down from a role, to drain everything, to compete again.

Requests are rows, so they are obeyed however late they are read, and once: each has an outcome in the end. Imports
`_board`, `_releases`, `ledger`, `models` and the standard library.
"""

from pgleaderlock._board import Board
from pgleaderlock._releases import Ended, Releases
from pgleaderlock.ledger import Beat, Request, Settled
from pgleaderlock.models import LockState

__all__ = ["Requests"]


class Requests:
    """Used by the engine's task, on its loop."""

    def __init__(self, board: Board, releases: Releases) -> None:
        self._board = board
        self._releases = releases
        self.draining = False
        """The node as a whole is drained: by its application, or by a request. Outlives the session."""
        self.to_tell: bool | None = None
        """What its application has decided, and the ledger has not heard yet."""
        self._drains: dict[int, Ended] = {}
        """Those that the ledger has open. Each is obeyed once, however often it is read."""
        self._unanswered: set[int] = set()

    # --- By its application

    def drain_node(self) -> None:
        self._set(draining=True)
        self.to_tell = True

    def resume_node(self, *, everything: bool) -> None:
        """Compete for all of them again; or for some, which is the end of the drain of the node as a whole."""
        if everything:
            self._set(draining=False)
        self.draining = False
        self.to_tell = False

    def told(self, draining: bool | None) -> None:
        """The ledger has heard this."""
        if self.to_tell == draining:
            self.to_tell = None

    # --- From afar

    async def obey(self, beat: Beat) -> None:
        """Begin what the last heartbeat has told us of."""
        if beat.draining is not None and self.to_tell is None and beat.draining != self.draining:
            self._set(draining=beat.draining)
        settled, still_open = [], {request.request_id for request in beat.requests}
        self._drains = {request_id: ended for request_id, ended in self._drains.items() if request_id in still_open}
        for request in beat.requests:
            if request.kind == "step_down":
                settled += self._step_down(request)
            elif request.kind == "drain":
                if request.request_id not in self._drains:
                    self._obey(draining=True, recorded=beat.draining)
                    roles = list(self._board.roles.values())
                    self._drains[request.request_id] = self._releases.tell_when_free(roles)
            elif request.kind == "resume":
                self._obey(draining=False, recorded=beat.draining)
                settled.append((request.request_id, "done", None))
        # Until nobody has it open: an answer does not count while another session of this node is still at it.
        self._unanswered = set(self._drains)
        await self._board.there().settle_requests(settled)

    async def finish(self) -> None:
        """Write down the drains that have ended."""
        for request_id in list(self._unanswered):
            ended = self._drains[request_id]
            if not self.draining:
                await self._board.there().settle_request(request_id, "refused", "resumed before it had ended")
            elif ended.done():
                detail = "clean" if ended.result() else "not clean: work was still in flight, or a term was lost"
                await self._board.there().settle_request(request_id, "done", detail)
            else:
                continue
            self._unanswered.discard(request_id)

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
        role.requests.append(request)
        role.release_asked = True
        return []

    def _obey(self, *, draining: bool, recorded: bool | None) -> None:
        """The record says so already, unless the request was for an earlier session of ours: then it has to be told."""
        self._set(draining=draining)
        self.to_tell = None if recorded is draining else draining

    def _set(self, *, draining: bool) -> None:
        self.draining = draining
        for role in self._board.roles.values():
            if draining:
                role.drain()
            else:
                role.drained = False
        if not draining:
            self._releases.resumed(self._board.roles.values())
