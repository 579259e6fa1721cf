"""The last resort against a leader that does not notice that it is none: ends the process.

A thread of its own, because the event loop may be what is stuck. Imports `gate`, `_clock`, `_logging` and the standard
library.
"""

import os
import threading
from collections.abc import Callable, Collection

from pgleaderlock._clock import Clock
from pgleaderlock._logging import get_logger
from pgleaderlock.gate import LeaderGate

__all__ = ["EXIT_CODE", "Watchdog"]

EXIT_CODE = 70  # EX_SOFTWARE
LOOKS = 4
LOOK_S_MAX = 1.0


class Watchdog:
    """Ends the process once a gate has been shut for `after_s` while work behind it goes on."""

    def __init__(self, gates: Callable[[], Collection[LeaderGate]], after_s: float, clock: Clock) -> None:
        self._gates = gates
        self._after_s = after_s
        self._clock = clock
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="pgleaderlock watchdog", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        shut_since: dict[LeaderGate, float] = {}
        while not self._closed.wait(min(self._after_s / LOOKS, LOOK_S_MAX)):
            now = self._clock.now()
            for gate in self._gates():
                if gate.is_leader or not gate.in_flight:
                    shut_since.pop(gate, None)
                elif now - shut_since.setdefault(gate, now) >= self._after_s:
                    get_logger("pgleaderlock").error("hard_stop", role=gate.role, in_flight=gate.in_flight)
                    os._exit(EXIT_CODE)
