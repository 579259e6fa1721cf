"""The former place of the plan by which nodes share roles; it lives in `pgleaderlock._election.balancing`."""

from pgleaderlock._election.balancing import Held, Move, choose, fair_share, moves_needed, next_move, plan

__all__ = ["Held", "Move", "choose", "fair_share", "moves_needed", "next_move", "plan"]
