"""What was asked of this node from afar: to step down from a role, to drain everything, to compete again.

Requests are rows, so they are obeyed however late they are read, and once: each has an outcome in the end. Imports
`_board`, `_releases`, `ledger`, `models` and the standard library.
"""

from collections.abc import Collection

from pgleaderlock._board import Board
from pgleaderlock._releases import Ended, Releases
from pgleaderlock._roles import Role
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
        self._asked: dict[int, Ended | None] = {}
        """What was asked of the node and is open in the ledger; with a drain, when it has ended. Each is obeyed once,
        however often it is read."""
        self._unanswered: set[int] = set()

    # --- By its application

    def drain_node(self) -> None:
        self._set(draining=True)
        self.to_tell = True

    def resume_node(self, roles: Collection[Role]) -> None:
        """Compete for these again, which ends the drain of the node as a whole. The others stay drained, by name."""
        for role in self._board.roles.values():
            role.drained_here |= role.node_drained and role not in roles
        self._set(draining=False)
        self.to_tell = False

    def told(self, draining: bool | None) -> None:
        """The ledger has heard this."""
        if self.to_tell == draining:
            self.to_tell = None

    # --- From afar

    async def obey(self, beat: Beat) -> None:
        """Begin what the last heartbeat has told us of."""
        settled, still_open = [], {request.request_id for request in beat.requests}
        self._asked = {request_id: ended for request_id, ended in self._asked.items() if request_id in still_open}
        for request in beat.requests:
            if request.kind == "step_down":
                settled += self._step_down(request)
            elif request.request_id not in self._asked:
                self._set(draining=request.kind == "drain")
                self.to_tell = self.draining
                self._asked[request.request_id] = (
                    self._releases.tell_when_free(list(self._board.roles.values())) if self.draining else None
                )
        # Again, until the ledger has closed it: other sessions of this node may still be at it.
        self._unanswered = set(self._asked)
        await self._board.there().settle_requests(settled)

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
        await self._board.there().settle_requests(answers)
        self._unanswered -= {request_id for request_id, _, _ in answers}

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

    def _set(self, *, draining: bool) -> None:
        """What its application has drained by name stays as it is."""
        self.draining = draining
        roles = self._board.roles.values()
        for role in roles:
            role.node_drained = draining
            role.release_asked |= draining
        if not draining:
            self._releases.resumed([role for role in roles if not role.drained])
