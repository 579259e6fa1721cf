"""Counts and latencies of a load run, in bounded memory.

Imports the standard library only.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["COUNTED", "Figures", "Latencies"]

COUNTED = {
    "acquired": "acquired",
    "held": "refused: held by another",
    "released": "released",
    "lost": "lost while holding",
    "crashed": "crashed on purpose",
    "stalled": "stalled on purpose",
    "stale_writes_refused": "stale writes refused",
    "stale_renewals_refused": "stale renewals refused",
    "errors": "no answer, or an error",
}
"""What is counted, and how it is called where people read it."""
# Neighbouring buckets differ by two hundredths: that is how exact a percentile is.
_STEP = math.log(1.02)
_LEAST_S = 1e-6


class Latencies:
    """Durations in buckets that grow by a fixed ratio: some 900 of them cover a microsecond to a minute."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.max_s = 0.0

    def add(self, duration_s: float) -> None:
        self.count += 1
        self.max_s = max(self.max_s, duration_s)
        self._buckets[int(math.log(max(duration_s, _LEAST_S) / _LEAST_S) / _STEP)] += 1

    def percentile_s(self, share: float) -> float:
        """The duration that this share of all did not exceed, rounded up by two hundredths at most."""
        if not self.count:
            return 0.0
        wanted = math.ceil(self.count * share)
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return min(self.max_s, _LEAST_S * math.exp((bucket + 1) * _STEP))
        return self.max_s

    def as_json(self) -> dict[str, float]:
        shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
        figures = {f"{name}_ms": round(self.percentile_s(share) * 1000, 3) for name, share in shares.items()}
        return {"count": self.count, **figures, "max_ms": round(self.max_s * 1000, 3)}


@dataclass
class Figures:
    """What has happened so far."""

    counts: "Counter[str]" = field(default_factory=Counter)
    """Of `COUNTED`."""
    latencies: dict[str, Latencies] = field(
        default_factory=lambda: {"acquire": Latencies(), "renew": Latencies(), "release": Latencies()}
    )
    last_error: str = ""

    @property
    def operations(self) -> int:
        return sum(latencies.count for latencies in self.latencies.values())
