"""Shows the library's log records on standard error, as text for people or as JSON lines for machines.

The library logs through the standard library's logger `pgleaderlock`; only this module passes those records to loguru.
Fields from `extra=` are kept: in JSON as members, in text as `key=value` if the message does not contain them already.

Variables in tracebacks are not shown, because the DSN is among them.
"""

import json
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING

from loguru import logger

if TYPE_CHECKING:
    from loguru import Message, Record

__all__ = ["InterceptHandler", "configure"]

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_LOGGER_NAME = "pgleaderlock"
_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# Members of the line itself; a field of the same name gets an underscore appended.
_LINE_MEMBERS = frozenset({"time", "level", "logger", "message", "exception"})


class InterceptHandler(logging.Handler):
    """Hands each record of the standard library to loguru, with its level, origin, exception and fields."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            level: str | int = logger.level(record.levelname).name
        except ValueError:
            level = record.levelno
        fields = {key: value for key, value in vars(record).items() if key not in _STANDARD_ATTRIBUTES}

        def set_origin(loguru_record: "Record") -> None:
            loguru_record["name"] = record.name
            loguru_record["function"] = record.funcName
            loguru_record["line"] = record.lineno

        bound = logger.bind(fields=fields).patch(set_origin).opt(exception=record.exc_info)
        # Pass the text as an argument, not as the format, so that braces in it have no meaning.
        bound.log(level, "{}", record.getMessage())


def configure(level: str, json: bool = False) -> None:
    """Sends what `pgleaderlock` logs at `level` or above to standard error. May be called again to change it."""
    level = level.upper()
    if level not in LEVELS:
        raise ValueError(f"{level!r} is not a log level: give one of {', '.join(LEVELS)}")
    logger.remove()
    if json:
        logger.add(_write_json, level=level, format="{message}", backtrace=False, diagnose=False, colorize=False)
    else:
        logger.add(
            sys.stderr, level=level, format=_text_format, backtrace=False, diagnose=False, colorize=_colour_wanted()
        )
    library_logger = logging.getLogger(_LOGGER_NAME)
    library_logger.handlers = [InterceptHandler()]
    library_logger.propagate = False
    library_logger.setLevel(level)


def _colour_wanted() -> bool:
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _text_format(record: "Record") -> str:
    # loguru evaluates this text as a format again: external text must go through `extra`, never into this text.
    said = record["message"]
    unsaid = [f" {key}={value}" for key, value in _fields(record).items() if not _says(said, key, value)]
    record["extra"]["unsaid"] = "".join(unsaid)
    return (
        "<green>{time:YYYY-MM-DD HH:mm:ss.SSS}</green> <level>{level: <8}</level> {name} | {message}{extra[unsaid]}\n"
        "{exception}"
    )


def _says(message: str, key: str, value: object) -> bool:
    # The library's own messages begin with the event and go on with the fields.
    if key == "event":
        return message.split(" ", 1)[0] == value
    return f"{key.rstrip('_')}=" in message


def _write_json(message: "Message") -> None:
    record = message.record
    line: dict[str, object] = {
        "time": record["time"].isoformat(timespec="milliseconds"),
        "level": record["level"].name,
        "logger": record["name"],
        "message": record["message"],
    }
    line |= {f"{key}_" if key in _LINE_MEMBERS else key: value for key, value in _fields(record).items()}
    if record["exception"] is not None:
        kind, error, trace = record["exception"]
        line["exception"] = "".join(traceback.format_exception(kind, error, trace))
    # One write per line, so that lines of several processes on one pipe do not mix.
    sys.stderr.write(json.dumps(line, default=str) + "\n")
    sys.stderr.flush()


def _fields(record: "Record") -> Mapping[str, object]:
    fields = {key: value for key, value in record["extra"].items() if key not in ("fields", "unsaid")}
    fields |= record["extra"].get("fields", {})
    return fields
