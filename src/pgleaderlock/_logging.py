"""Structured logging on the standard library: `key=value` in the text, the same fields in `extra=`.

A thin wrapper and no more: handlers, levels and formats belong to the application. The library never
configures logging. Sits at the bottom: imports the standard library only.
"""

import logging
from collections.abc import Mapping

__all__ = ["StructuredLogger", "get_logger"]

# A field may not take the name of a LogRecord attribute: logging raises KeyError on it.
_RESERVED = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class StructuredLogger:
    """A logger whose messages are an event word and fields, some of them bound once and for all."""

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

    def _log(self, level: int, event: str, fields: Mapping[str, object], exc_info: BaseException | None = None) -> None:
        if not self._logger.isEnabledFor(level):
            return
        # What belongs to this event comes first, what belongs to the lock last.
        merged = {**fields, **{key: value for key, value in self._bound.items() if key not in fields}}
        text = " ".join([event, *(f"{key.rstrip('_')}={_shown(value)}" for key, value in merged.items())])
        extra = {f"{key}_" if key in _RESERVED else key: value for key, value in merged.items()}
        self._logger.log(level, "%s", text, extra={"event": event, **extra}, exc_info=exc_info, stacklevel=3)


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
