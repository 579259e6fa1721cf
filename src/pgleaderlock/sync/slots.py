"""`once` for threads: that of `pgleaderlock.slots`, with the work in the calling thread."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from pgleaderlock import slots as aio
from pgleaderlock._pg.conninfo import Dsn
from pgleaderlock.models import LeaderToken
from pgleaderlock.slots import Once
from pgleaderlock.sync.leading import lead_here

__all__ = ["once"]

T = TypeVar("T")


def once(dsn: Dsn, name: str, work: Callable[[LeaderToken, threading.Event], T], **options: Any) -> Once[T]:
    """Run `work(token, stop)` in this thread if it was not run in this tick yet; of all callers, one does.

    `stop` is set if the term ends before the work. The options are those of `pgleaderlock.once`.
    """
    return lead_here(work, lambda relay: aio.once(dsn, name, relay, **options), work)
