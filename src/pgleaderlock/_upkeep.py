"""Now and then, a little of the ledger's oldest history is deleted: by any node, between two heartbeats.

Never in a tick that has sent something else, and never shortly before a heartbeat. Imports `_board`.
"""

from pgleaderlock._board import Board

__all__ = ["Upkeep"]

NEVER = float("inf")
# How often a node looks, on average; and again if there was more than a step's worth.
EVERY_S = 600.0
AGAIN_S = 5.0


class Upkeep:
    def __init__(self, board: Board) -> None:
        self._board = board
        self.due_at = NEVER

    def plan(self, mean_s: float | None = None) -> None:
        """Some time from now; at random, so that the nodes take turns."""
        if self._board.settings.retention_s is None:
            self.due_at = NEVER
        else:
            mean_s = EVERY_S if mean_s is None else mean_s
            self.due_at = self._board.clock.now() + mean_s * self._board.rng.uniform(0.5, 1.5)

    async def run(self, beat_due_at: float) -> bool:
        """Called when nothing else was sent in this tick; True if this has sent something."""
        now, interval_s = self._board.clock.now(), self._board.settings.heartbeat_interval_s
        keep_s = self._board.settings.retention_s
        if now < self.due_at or keep_s is None:
            return False
        if beat_due_at - now < interval_s / 2:
            self.due_at = max(now, beat_due_at) + interval_s / 10  # after the heartbeat there is time
            return False
        self.plan(AGAIN_S if await self._board.there().prune(keep_s) else None)
        return True
