"""Structured logging on the standard library: `key=value` in the text, the same fields in `extra=`.

Handlers, levels and formats belong to the application: the library never configures logging.
"""

import logging
import time
from collections.abc import Callable, Mapping

__all__ = ["Seldom", "StructuredLogger", "get_logger"]

# A field may not take the name of a LogRecord attribute: logging raises KeyError on it.
_RESERVED = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class StructuredLogger:
    """A logger whose messages are an event name and fields, some of them bound to the logger."""

    def __init__(self, logger: logging.Logger, bound: Mapping[str, object] | None = None) -> None:
        self._logger = logger
        self._bound = dict(bound or {})

    def bind(self, **fields: object) -> "StructuredLogger":
        """The same logger with more fields on every message."""
        return StructuredLogger(self._logger, {**self._bound, **fields})

    def debug(self, event: str, **fields: object) -> None:
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, exc_info: BaseException | None = None, **fields: object) -> None:
        self._log(logging.ERROR, event, fields, exc_info)

    def failed_at_exit(self, event: str, failure: Exception, leaving: BaseException, **fields: object) -> None:
        """Log a failure at the end of a `with` block, and add it as a note to the exception that leaves the block."""
        self._log(logging.WARNING, event, {**fields, "error": failure})
        leaving.add_note(f"{event}: {failure}")

    def _log(self, level: int, event: str, fields: Mapping[str, object], exc_info: BaseException | None = None) -> None:
        if not self._logger.isEnabledFor(level):
            return
        # The fields of the event come first, those bound to the logger last.
        merged = {**fields, **{key: value for key, value in self._bound.items() if key not in fields}}
        text = " ".join([event, *(f"{key.rstrip('_')}={_shown(value)}" for key, value in merged.items())])
        extra = {f"{key}_" if key in _RESERVED else key: value for key, value in merged.items()}
        self._logger.log(level, "%s", text, extra={"event": event, **extra}, exc_info=exc_info, stacklevel=3)


class Seldom:
    """Rate-limits an event that a client, or a broken disk, can cause at every request: at most one line per
    `interval_s`, with the number of lines dropped before it."""

    def __init__(self, log: Callable[..., None], interval_s: float = 5.0) -> None:
        """`log` is a method of a logger, such as `warning`."""
        self._log = log
        self._interval_s = interval_s
        self._said_at = float("-inf")
        self._left_out = 0

    def __call__(self, event: str, **fields: object) -> None:
        now = time.monotonic()
        if now - self._said_at < self._interval_s:
            self._left_out += 1
            return
        self._said_at = now
        if self._left_out:
            fields["left_out"], self._left_out = self._left_out, 0
        self._log(event, **fields)


def get_logger(name: str) -> StructuredLogger:
    return StructuredLogger(logging.getLogger(name))


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    text = str(value)
    if text and not any(char.isspace() or char in '"=' for char in text):
        return text
    # One line, quoted: a database's error text may span several lines.
    return '"' + " ".join(text.split()).replace("\\", "\\\\").replace('"', '\\"') + '"'
