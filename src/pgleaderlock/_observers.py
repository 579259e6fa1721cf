"""Tells all observers of one election, in the order of their registration. One that fails disturbs nobody.

Imports `observer`, `_logging` and the standard library only.
"""

from asyncio import CancelledError

from pgleaderlock._logging import StructuredLogger
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.observer import ElectionObserver

__all__ = ["Observers"]


class Observers:
    """Empty, it is false: what costs something to tell is not even put together then."""

    def __init__(self, log: StructuredLogger) -> None:
        self._log = log
        self._all: tuple[ElectionObserver, ...] = ()  # replaced, never changed: another thread may be telling them

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, observer: ElectionObserver) -> None:
        if not isinstance(observer, ElectionObserver):
            raise ConfigurationError(
                f"observe takes an ElectionObserver, not {type(observer).__name__}: derive yours from it"
            )
        self._all = (*self._all, observer)

    def tell(self, hook: str, *args: object) -> None:
        for observer in self._all:
            self.tell_one(observer, hook, *args)

    def tell_one(self, observer: ElectionObserver, hook: str, *args: object) -> None:
        try:
            getattr(observer, hook)(*args)
        except (Exception, CancelledError) as error:  # the latter is its own: nothing is awaited here
            self._log.error("observer_failed", exc_info=error, hook=hook, observer=type(observer).__name__, error=error)
