"""What the figures share: how a result is written down, how two sides take turns, and how percentiles are taken.

Imports the standard library.
"""

import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Figure", "in_turns", "median", "percentile", "ratio"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report."""

    what: str
    ours: str
    baseline: str
    measured: float
    limit: float
    unit: str = "×"
    at_least: bool = False
    """The limit is a floor and not a ceiling."""

    @property
    def holds(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def __str__(self) -> str:
        verdict = "ok  " if self.holds else "MISS"
        sign = "≥" if self.at_least else "≤"
        return (
            f"{verdict} {self.what:58s} {self.measured:8.2f} {self.unit:3s} ({sign} {self.limit:g} {self.unit})"
            f"\n       ours {self.ours}; {self.baseline}"
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that is not exceeded by `percent` of them."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


async def in_turns(sides: Mapping[str, Callable[[int], Awaitable[float]]], blocks: int) -> dict[str, list[float]]:
    """What each side measures, block by block and side by side, so that the machine's moods meet all of them alike.

    The order is a new one in each block: a side that always comes after the same other one pays for what that one
    leaves behind, be it work in the background or a cold cache. Each is given the number of its block. The first block,
    0, warms up and does not count.
    """
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for block in range(blocks + 1):
        for name in random.sample(list(sides), len(sides)):
            value = await sides[name](block)
            if block:
                measured[name].append(value)
    return measured


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the blocks' ratios."""
    return median([mine / other for mine, other in zip(ours, theirs, strict=True)])
