"""Did two nodes ever say at the same time that they lead? Decided from what they said and when.

Every claim carries two readings of the clock, one before the node asked itself and one after. A term lasts at least
from the second reading of its first claim to the first reading of its last one. Two terms of different nodes whose
certain parts touch are two leaders at once; everything less is a matter of rounding, and not reported.

Pure: no clock, no I/O. Imports the standard library only. All readings must come from one clock of one machine.
"""

from dataclasses import dataclass

__all__ = ["Claims", "Overlap"]

# How many terms are remembered. An overlap is found while both are recent.
TERMS_MAX = 100


@dataclass
class _Term:
    holder: str
    began_at: float
    last_at: float


@dataclass(frozen=True)
class Overlap:
    """Two nodes led for at least `seconds` at the same time."""

    one: str
    other: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.one} and {self.other} both said that they lead, for {self.seconds * 1000:.1f} ms at least"


class Claims:
    """All that was claimed so far."""

    def __init__(self) -> None:
        self.count = 0
        self._terms: list[_Term] = []

    def begin(self, holder: str, after: float) -> None:
        """The first claim of a term; `after` is the clock after the node asked itself."""
        self.count += 1
        self._terms.append(_Term(holder, after, after))
        del self._terms[:-TERMS_MAX]

    def repeat(self, holder: str, before: float) -> Overlap | None:
        """A later claim of the holder's newest term; `before` is the clock before the node asked itself."""
        self.count += 1
        term = next(term for term in reversed(self._terms) if term.holder == holder)
        term.last_at = max(term.last_at, before)
        for other in self._terms:
            shared_s = min(term.last_at, other.last_at) - max(term.began_at, other.began_at)
            if other.holder != holder and shared_s > 0:
                return Overlap(holder, other.holder, shared_s)
        return None
