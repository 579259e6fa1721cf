"""Chance for delays, so that many processes do not try in step.

The system's own source has no state in the process: a forked child has no copy of it, so the children of one parent
draw different delays. Imports the standard library only.
"""

import random

__all__ = ["JITTER"]

JITTER: random.Random = random.SystemRandom()
