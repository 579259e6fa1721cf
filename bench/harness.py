"""What the figures share: the record of a result, the turns of the sides, percentiles and ratios.

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
    """The limit is a lower bound, not an upper one."""

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
    """The smallest value that at least this percentage of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


async def in_turns(sides: Mapping[str, Callable[[int], Awaitable[float]]], blocks: int) -> dict[str, list[float]]:
    """Measure the sides in turns, block by block, so that changes of the machine's load affect all of them alike.

    Each block has a new random order: a side that always came after the same other one would pay for its background
    work and its cold caches. Each call gets the number of its block. Block 0 warms up and does not count.
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
