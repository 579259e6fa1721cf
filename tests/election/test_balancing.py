"""The plan of the balance: by hand for what it says, and in a simulated cluster for what comes of it.

In the simulation 1,000 roles are shared by nodes that join and die at random. What a dead node led is won again by the
survivors in random order, each of them on a look that is a round old, subject to the rule of holding back. Moves are
counted against the least that any plan would need.
"""

import itertools
import random
from collections.abc import Collection, Mapping

import pytest

from pgleaderlock._election.balancing import Move, choose, fair_share, moves_needed, next_move, plan
from support.counts import count

ROLES = 1000
ROUNDS_MAX = 3 * ROLES


# -- by hand ----------------------------------------------------------------------------------------------------------

BALANCED: list[dict[str, str]] = [
    {},
    {"a": ""},
    {"a": "xyz"},
    {"a": "", "b": ""},
    {"a": "x", "b": ""},
    {"a": "xy", "b": "z"},
    {"a": "p", "b": "qr", "c": "s"},
]


@pytest.mark.parametrize("held", BALANCED)
def test_counts_that_differ_by_at_most_one_are_left_alone(held: dict[str, str]) -> None:
    assert next_move(held) is None
    assert moves_needed(held) == 0


UNEVEN: list[tuple[dict[str, str], Move, int]] = [
    ({"a": "xy", "b": ""}, Move("x", "a", "b"), 1),
    ({"a": "", "b": "yx"}, Move("x", "b", "a"), 1),
    # The fullest gives, by name among equals; the emptiest gets, by name among equals.
    ({"a": "pq", "b": "rst", "c": "uvw", "d": ""}, Move("r", "b", "d"), 2),
    ({"a": "pqrs", "b": "", "c": ""}, Move("p", "a", "b"), 2),
    # Nobody has more than the larger share, and yet one is too empty.
    ({"a": "pq", "b": "rs", "c": ""}, Move("p", "a", "c"), 1),
    ({"a": "pqr", "b": "stu", "c": "vwx", "d": "yz", "e": ""}, Move("p", "a", "e"), 2),
]


@pytest.mark.parametrize(("held", "move", "needed"), UNEVEN)
def test_one_role_moves_from_the_fullest_to_the_emptiest(held: dict[str, str], move: Move, needed: int) -> None:
    assert next_move(held) == move
    assert moves_needed(held) == needed
    # In whatever order the facts were read; and only the giver acts.
    assert next_move({node: held[node][::-1] for node in reversed(held)}) == move
    assert [node for node in held if plan(held, node)] == [move.from_node]
    assert plan(held, "somebody else") is None


def test_nothing_moves_while_a_role_is_free() -> None:
    assert next_move({"a": "pqr", "b": ""}, free=["s"]) is None


def test_a_move_that_came_to_nothing_is_not_tried_again() -> None:
    held = {"a": "pqr", "b": "", "c": "s"}
    barred = [Move("p", "a", "b")]
    assert next_move(held, barred=barred) == Move("q", "a", "b")
    barred += [Move("q", "a", "b"), Move("r", "a", "b")]
    assert next_move(held, barred=barred) == Move("p", "a", "c")
    barred += [Move(role, "a", "c") for role in "pqr"]
    assert next_move(held, barred=barred) is None


SHARES: list[tuple[dict[str, str], str, dict[str, int]]] = [
    # led, free -> the share of each
    ({"a": "", "b": ""}, "pqr", {"a": 2, "b": 1}),
    ({"a": "", "b": "p"}, "qr", {"a": 1, "b": 2}),  # who leads more keeps the odd one
    ({"a": "pq", "b": "r"}, "stu", {"a": 3, "b": 3}),
    ({"a": "pqrst", "b": ""}, "u", {"a": 3, "b": 3}),  # too full: it holds back
    ({"a": "", "b": "", "c": "", "d": ""}, "p", {"a": 1, "b": 0, "c": 0, "d": 0}),
]


@pytest.mark.parametrize(("held", "free", "shares"), SHARES)
def test_a_free_role_is_for_those_below_their_share(held: dict[str, str], free: str, shares: dict[str, int]) -> None:
    assert {node: fair_share(held, node, free) for node in held} == shares
    for node, share in shares.items():
        chosen = choose(held, node, free)
        assert len(chosen) == min(len(free), max(0, share - len(held[node])))
        assert set(chosen) <= set(free)
        assert chosen == choose(held, node, free[::-1])


def test_a_node_that_nobody_has_seen_yet_counts_itself() -> None:
    assert fair_share({"a": "pqr"}, "b", "s") == 2
    assert choose({"a": "pqr"}, "b", "s") == ["s"]
    assert choose({}, "a", "pq") != []
    assert sorted(choose({}, "a", "pq")) == ["p", "q"]


def test_nodes_begin_with_different_free_roles() -> None:
    free = [f"role-{number}" for number in range(100)]
    held: dict[str, str] = {"a": "", "b": ""}
    # By chance 25 of 50 are the same; all 50 if the order were one and the same.
    assert len(set(choose(held, "a", free)) & set(choose(held, "b", free))) < 40


# -- simulated --------------------------------------------------------------------------------------------------------


def least(held: Mapping[str, Collection[str]], free: Collection[str]) -> int:
    """The fewest moves that any plan would need, counted without a word of the plan's own."""
    counts = sorted(map(len, held.values()), reverse=True)
    each, odd = divmod(sum(counts) + len(free), len(counts))
    return sum(max(0, led - each - (place < odd)) for place, led in enumerate(counts))


class Cluster:
    """Nodes that follow the plan, with nothing but what they see in the ledger."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.held: dict[str, set[str]] = {}
        self.free = {f"role-{number:04}" for number in range(ROLES)}
        self.moves = 0
        self.wasted = 0
        """What the nodes' own doing has added to the moves that are still to come."""
        self._names = (f"node-{number:03}" for number in itertools.count())

    def join(self) -> None:
        self.held[next(self._names)] = set()

    def die(self) -> None:
        self.free |= self.held.pop(self.rng.choice(sorted(self.held)))

    def round(self) -> bool:
        """Each node acts once, in random order, on the facts of the round's beginning; True if anything happened.

        A node knows its own roles at once. What another one has won or given away in this round it does not know.
        """
        seen = {node: frozenset(held) for node, held in self.held.items()}
        seen_free = frozenset(self.free)
        happened = False
        for node in self.rng.sample(sorted(seen), len(seen)):
            before = least(self.held, self.free)
            move = plan(seen, node, seen_free)
            if move is not None:
                self.held[node].remove(move.role)
                self.free.add(move.role)
                self.moves += 1
                happened = True
            # A few at a time: in a real cluster the others' tries fall in between.
            for role in choose(seen, node, seen_free)[: self.rng.randint(1, 40)]:
                if role in self.free:
                    self.free.remove(role)
                    self.held[node].add(role)
                    happened = True
            self.wasted += least(self.held, self.free) - before + (move is not None)
        return happened

    def settle(self) -> None:
        for _ in range(ROUNDS_MAX):
            if not self.round():
                break
        else:
            pytest.fail("it does not settle")
        counts = [len(held) for held in self.held.values()]
        assert not self.free
        assert sum(counts) == ROLES
        assert max(counts) - min(counts) <= 1
        assert not any(self.round() for _ in range(3)), "it settled, and went on"

    def change(self) -> None:
        if len(self.held) < 2 or (len(self.held) < 12 and self.rng.random() < 0.5):
            self.join()
        else:
            self.die()


@pytest.mark.parametrize("seed", range(count(3, 100)))
def test_a_thousand_roles_settle_with_the_fewest_moves_after_each_join_and_death(seed: int) -> None:
    cluster = Cluster(seed)
    cluster.join()
    cluster.settle()
    assert cluster.moves == 0
    for _ in range(20):
        cluster.change()
        needed, before = least(cluster.held, cluster.free), cluster.moves
        assert needed == moves_needed(cluster.held, cluster.free)
        cluster.settle()
        assert cluster.moves - before == needed
    assert cluster.moves > ROLES / 2, "too little happened to prove anything"


@pytest.mark.parametrize("seed", range(count(3, 100)))
def test_no_move_is_wasted_when_nodes_join_and_die_in_the_middle_of_it(seed: int) -> None:
    cluster = Cluster(seed)
    cluster.join()
    cluster.settle()
    for _ in range(40):
        cluster.change()
        for _ in range(cluster.rng.randint(0, 60)):
            cluster.round()
    cluster.settle()
    assert cluster.moves > ROLES / 10, "too little happened to prove anything"
    assert cluster.wasted == 0


def test_the_least_number_of_moves_is_the_least() -> None:
    """Against every way of sharing that there is, for small clusters."""
    for counts in itertools.product(range(6), repeat=4):
        held = {f"node-{number}": [f"{number}{role}" for role in range(led)] for number, led in enumerate(counts)}
        each, odd = divmod(sum(counts), len(counts))
        least = min(
            sum(max(0, led - each - (place in larger)) for place, led in enumerate(counts))
            for larger in itertools.combinations(range(len(counts)), odd)
        )
        assert moves_needed(held) == least, counts
