"""How often a test repeats itself: a few times every day, and as often as the claim says when it is to be proven.

`make test` runs the small counts, `make proof` (PGLEADERLOCK_PROOF=1) the full ones. Imports the standard library only.
"""

import os

__all__ = ["count", "proof_asked"]


def proof_asked() -> bool:
    """Whether the full counts are asked for."""
    return os.environ.get("PGLEADERLOCK_PROOF", "") not in {"", "0"}


def count(small: int, proof: int) -> int:
    """`small`, or `proof` when the full counts are asked for."""
    return proof if proof_asked() else small
