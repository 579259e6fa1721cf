"""Who should lead what: the plan by which nodes share roles so that their counts differ by at most one. Pure.

All nodes look at the same facts (`held`: every live candidate that balances, and what it leads) and come to the same
answer without talking to each other. Two rules do it:

- **A free role goes to whoever is below its share** (`choose`). Others hold back, so the roles of a dead node are
  spread while they are won, and nothing has to be moved afterwards. Holding back is a courtesy: whoever uses it bounds
  it by time, because a role without a leader is worse than an uneven share.
- **A led role moves only if two counts differ by more than one** (`plan`): one role, from the fullest node to the
  emptiest, and none while a role is still on its way. Each such move is one that every plan would have to make, and
  after the last one nothing moves until a node comes or goes.

A role is left where it is whenever it may be: among equal shares, those who lead more already keep the odd ones.

Imports the standard library only. No I/O, no clock, no chance, no memory: the same facts give the same answer, on every
node and in every process.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

__all__ = ["Held", "Move", "choose", "fair_share", "moves_needed", "next_move", "plan"]

Held = Mapping[str, Collection[str]]
"""Node → the roles it leads. Every live candidate is in it, also one that leads nothing; nobody else is."""


@dataclass(frozen=True, slots=True)
class Move:
    """One role that is to change hands. Only `from_node` acts: it drains the role, and `to_node` wins it."""

    role: str
    from_node: str
    to_node: str


def plan(held: Held, me: str, free: Collection[str] = (), barred: Collection[Move] = ()) -> Move | None:
    """The move that `me` has to make now; None if there is none, or if it is another node's turn."""
    move = next_move(held, free, barred)
    return move if move is not None and move.from_node == me else None


def next_move(held: Held, free: Collection[str] = (), barred: Collection[Move] = ()) -> Move | None:
    """The one move that is due, the same on every node; None once the counts differ by at most one.

    `free`: roles that have just become free. While there is one, nothing moves: it may be a move on its way, or it may
    fill the gap by itself. Leave out those that nobody wins, or they would stop the balance for ever.
    `barred`: moves that the giver has tried and that came to nothing, because `to_node` does not compete for that role.
    """
    if free or len(held) < 2:
        return None
    from_node = min(held, key=lambda node: (-len(held[node]), node))
    for to_node in sorted(held, key=lambda node: (len(held[node]), node)):
        if len(held[from_node]) - len(held[to_node]) < 2:
            return None
        for role in sorted(held[from_node]):
            move = Move(role, from_node, to_node)
            if move not in barred:
                return move
    return None


def fair_share(held: Held, me: str, free: Collection[str] = ()) -> int:
    """How many roles `me` should lead when all that are led or free have been shared out.

    Where they do not go evenly, the odd ones belong to those who lead most already (then by name), so that a role is
    never given away for the sake of order.
    """
    return _shares(held if me in held else {**held, me: ()}, len(free))[me]


def choose(held: Held, me: str, free: Collection[str]) -> list[str]:
    """Which of the free roles `me` goes for: as many as it is below its share. The rest is for the others.

    Each node begins with different ones, so that two nodes seldom want the same. Empty: hold back.
    """
    room = fair_share(held, me, free) - len(held.get(me, ()))
    if room <= 0:
        return []
    return sorted(free, key=lambda role: _rank(me, role))[:room]


def moves_needed(held: Held, free: Collection[str] = ()) -> int:
    """How many roles have to change hands at least until the counts differ by at most one."""
    shares = _shares(held, len(free))
    return sum(max(0, len(roles) - shares[node]) for node, roles in held.items())


def _shares(held: Held, free: int) -> dict[str, int]:
    if not held:
        return {}
    each, odd = divmod(sum(map(len, held.values())) + free, len(held))
    fullest_first = sorted(held, key=lambda node: (-len(held[node]), node))
    return {node: each + (place < odd) for place, node in enumerate(fullest_first)}


def _rank(node: str, role: str) -> bytes:
    # Not hash(): it differs from process to process, and an answer would not be the same twice.
    return hashlib.blake2b(f"{node}\0{role}".encode(), digest_size=8).digest()
