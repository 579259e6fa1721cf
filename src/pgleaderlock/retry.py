"""Retry strategies: how long to wait before the next attempt, or None to give up.

Pure: no clock, no sleeping, no I/O. A strategy without memory may be shared between locks; one with memory
offers `copy()`, which each lock calls once, so that two locks never disturb each other's sequence.
"""

import math
import random
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from pgleaderlock.errors import ConfigurationError
from pgleaderlock.models import RetryContext

__all__ = [
    "JITTER",
    "DecorrelatedJitter",
    "DefaultRetry",
    "ExponentialBackoff",
    "FixedInterval",
    "RetryStrategy",
    "checked_delay_s",
    "reconnect_jitter_s",
]


# The source of random delays, so that many processes do not try in step. The operating system's generator has no state
# in the process, so forked children of one parent draw different delays.
JITTER: random.Random = random.SystemRandom()
JITTER_S_MIN = 0.1
JITTER_FRACTION = 0.2


@runtime_checkable
class RetryStrategy(Protocol):
    """Chooses the delay after each failed attempt of a lock."""

    def next_delay_s(self, ctx: RetryContext) -> float | None:
        """Seconds until the next attempt; None gives up, and the lock stops."""
        ...


@dataclass(frozen=True, slots=True)
class ExponentialBackoff:
    """`base_s`, then `multiplier` times longer after each failure, never beyond `max_s`."""

    base_s: float = 1.0
    max_s: float = 30.0
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        _check_bounds(self.base_s, self.max_s)
        _check_number("multiplier", self.multiplier, at_least=1.0)

    def next_delay_s(self, ctx: RetryContext) -> float | None:
        return self.delay_s(ctx.attempt)

    def delay_s(self, attempt: int) -> float:
        """Seconds to wait after failure number `attempt`, counted from 1."""
        if self.base_s == 0:
            return 0.0
        try:
            delay_s = self.base_s * self.multiplier ** (attempt - 1)
        except OverflowError:  # after a thousand doublings the power no longer fits a float
            return self.max_s
        return min(delay_s, self.max_s)


@dataclass(frozen=True, slots=True)
class FixedInterval:
    """The same delay every time."""

    interval_s: float = 5.0

    def __post_init__(self) -> None:
        _check_number("interval_s", self.interval_s, at_least=0.0)

    def next_delay_s(self, ctx: RetryContext) -> float | None:
        return self.interval_s


@dataclass(frozen=True, slots=True)
class DefaultRetry:
    """`held_s` while another session holds the lock; `errors` while the database fails.

    Retries must not overload a database that is down. A try for a held lock costs only one small statement.
    """

    held_s: float = 1.0
    errors: ExponentialBackoff = field(default_factory=ExponentialBackoff)

    def __post_init__(self) -> None:
        _check_number("held_s", self.held_s, at_least=0.0)

    def next_delay_s(self, ctx: RetryContext) -> float | None:
        return self.held_s if ctx.last_error is None else self.errors.next_delay_s(ctx)


class DecorrelatedJitter:
    """A random delay between `base_s` and three times the previous one, never beyond `max_s`.

    Many nodes that fail together drift apart quickly. The sequence starts anew at attempt 1.
    """

    def __init__(self, base_s: float = 1.0, max_s: float = 30.0, *, rng: random.Random | None = None) -> None:
        _check_bounds(base_s, max_s)
        self.base_s = base_s
        self.max_s = max_s
        self._rng = rng or JITTER
        self._previous_s = base_s

    def next_delay_s(self, ctx: RetryContext) -> float | None:
        if ctx.attempt == 1:
            self._previous_s = self.base_s
        self._previous_s = min(self.max_s, self._rng.uniform(self.base_s, self._previous_s * 3))
        return self._previous_s

    def copy(self) -> "DecorrelatedJitter":
        """A strategy with the same settings and its own memory."""
        return DecorrelatedJitter(self.base_s, self.max_s, rng=self._rng)

    def __repr__(self) -> str:
        return f"DecorrelatedJitter(base_s={self.base_s}, max_s={self.max_s})"


def checked_delay_s(delay_s: object) -> float | None:
    """The strategy's return value. Raises `ConfigurationError` if that is not a delay."""
    if delay_s is None:
        return None
    try:
        _check_number("delay", delay_s, at_least=0.0)
    except ConfigurationError:
        raise ConfigurationError(
            f"the retry strategy returned {delay_s!r}: it must return seconds, or None to give up"
        ) from None
    return float(delay_s)  # type: ignore[arg-type]  # a number, as was just checked


def reconnect_jitter_s(delay_s: float, rng: random.Random) -> float:
    """A random time to add to the delay of a reconnect, so that many nodes do not reconnect at once.

    A thousand nodes may notice a restart in the same millisecond, and all have the same constant delay.
    """
    return rng.uniform(0.0, max(JITTER_S_MIN, delay_s * JITTER_FRACTION))


def _check_bounds(base_s: float, max_s: float) -> None:
    _check_number("base_s", base_s, at_least=0.0)
    _check_number("max_s", max_s, at_least=0.0)
    if base_s > max_s:
        raise ConfigurationError(f"base_s={base_s} is longer than max_s={max_s}: lower base_s or raise max_s")


def _check_number(what: str, value: object, *, at_least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationError(f"{what} must be a number, not {type(value).__name__}")
    try:
        usable = math.isfinite(value) and value >= at_least
    except OverflowError:  # an integer beyond every float
        usable = False
    if not usable:
        raise ConfigurationError(f"{what}={value} is not usable: give a finite number, {at_least:g} or more")
