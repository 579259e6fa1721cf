"""A TOML file with the line of each of its keys, and errors that name line and remedy.

`tomllib` parses the file, but keeps no line numbers. So a small scanner walks over the same text afterwards: the text
is known to be valid, and the scanner only has to find where keys are and where values end.

A text made here must never repeat a value: it may be a password.
"""

import bisect
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgleaderlock.errors import ConfigurationError

__all__ = ["ConfigFileError", "FileUnreadable", "Place", "Problem", "TomlFile", "read_toml", "scan_lines"]

# Far more than a thousand roles need. A larger file was given by mistake: an image, a dump, a log.
FILE_BYTES_MAX = 1_000_000

Place = tuple[str | int, ...]
"""Where a value is in the document: keys, and indices in arrays."""

_TRIVIA = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
# Up to two more quotes belong to the text before a closing triple. An atom may hold a blank: a date and its time.
_STRINGS = (r'"""(?:\\.|[^\\])*?"""(?:"{0,2})', r"'''.*?'''(?:'{0,2})", r'"(?:\\.|[^"\\\n])*"', r"'[^'\n]*'")
_STRING = re.compile("|".join(_STRINGS), re.DOTALL)
_ATOM = re.compile(r"[^,\]}#\n]+")


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: where it is, what it is, and what to do."""

    where: str
    """Such as `pgleaderlock.toml line 12`, `environment HEARTBEAT_INTERVAL_MS`, `flag --dsn`."""
    text: str
    remedy: str = ""
    line: int | None = None

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.text, self.remedy) if part)


class ConfigFileError(ConfigurationError):
    """Settings are wrong. `problems` has every mistake that was found; the text has one line for each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problems,)


class FileUnreadable(ConfigFileError):
    """The file is missing or cannot be read."""


@dataclass(frozen=True, slots=True)
class TomlFile:
    """The contents of a file, and the line of each value."""

    path: Path
    document: dict[str, Any]
    lines: Mapping[Place, int]
    world_readable: bool = False

    def line(self, place: Place) -> int:
        """The line of a value, or of the innermost thing around it that has one."""
        while place not in self.lines and place:
            place = place[:-1]
        return self.lines.get(place, 1)

    def where(self, place: Place) -> str:
        return f"{self.path} line {self.line(place)}"

    def problem(self, place: Place, text: str, remedy: str) -> Problem:
        return Problem(self.where(place), text, remedy, self.line(place))


def read_toml(path: Path) -> TomlFile:
    """The file, or a `ConfigFileError` with one problem."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(FILE_BYTES_MAX + 1)
    except IsADirectoryError:
        raise _unreadable(path, "it is a folder", "give the file in it") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise _unreadable(path, reason, "give a file that exists and that this user may read") from error
    if len(raw) > FILE_BYTES_MAX:
        raise _unreadable(path, f"it has more than {FILE_BYTES_MAX:,} bytes", "this is hardly the file that you meant")
    try:
        # Some editors begin a file with a byte-order mark; TOML has none.
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        problem = Problem(f"{path} line {line}", "this is not UTF-8", "save the file as UTF-8", line)
        raise ConfigFileError([problem]) from None
    document = _parsed(path, text)
    return TomlFile(path, document, scan_lines(text), stat.S_ISREG(mode) and bool(mode & stat.S_IROTH))


def _unreadable(path: Path, reason: str, remedy: str) -> FileUnreadable:
    return FileUnreadable([Problem(str(path), f"cannot be read: {reason}", remedy)])


# --- Errors of the parser

# How a message of tomllib begins, and its remedy.
_REMEDIES = (
    ("Cannot overwrite a value", "this key is given twice: keep one of them"),
    ("Cannot declare", "this section is there twice: make it one"),
    ("Cannot mutate", "this section is there twice: make it one"),
    ("Unclosed array", "close it with ]"),
    ("Unclosed inline table", "close it with }"),
    ("Illegal character '\\n'", "close the quotes in the same line"),
    ("Unterminated string", "close the quotes"),
    ("Expected ']", "close the name of the section with ]"),
    ("Expected '='", "write key = value; a key with anything but letters, digits, _ and - needs quotes"),
    ("Unescaped '\\'", "double the backslash, or use 'single quotes'"),
)
_UNQUOTED_DURATION = re.compile(r"=\s*([0-9]+(?:\.[0-9]+)?\s*[a-zA-Z]+)\s*(?:#.*)?$")
_UNQUOTED_WORD = "put texts and durations in quotes; a switch is true or false, in small letters"


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        reason, remedy, line = "it is nested too deeply", "write it flat", None
    except tomllib.TOMLDecodeError as error:
        reason, _, position = str(error).rpartition(" (at ")
        found = re.search(r"line (\d+)", position)
        line = int(found[1]) if found else max(1, len(text.splitlines()))
        remedy = _remedy(reason, text.splitlines()[line - 1] if text else "")
    except ValueError:  # an integer of thousands of digits, which Python refuses to read
        reason, remedy, line = "a number is too long", "give one of at most 19 digits", None
    where = str(path) if line is None else f"{path} line {line}"
    raise ConfigFileError([Problem(where, f"this is not TOML ({reason})", remedy, line)]) from None


def _remedy(reason: str, line: str) -> str:
    # The line itself is not shown: it may hold a password.
    if duration := _UNQUOTED_DURATION.search(line):
        return f'put the duration in quotes: "{duration[1].replace(" ", "")}"'
    return next((remedy for start, remedy in _REMEDIES if reason.startswith(start)), _UNQUOTED_WORD)


# --- Line numbers


def scan_lines(text: str) -> dict[Place, int]:
    """The line of every key, section and element of an array, in a text that is known to be TOML."""
    return _Scanner(text).scanned()


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._ends = [found.start() for found in re.finditer("\n", text)]
        self._lines: dict[Place, int] = {}
        self._elements: dict[Place, int] = {}
        """Arrays of tables, and how many tables each has so far."""

    def scanned(self) -> dict[Place, int]:
        table: Place = ()
        self._skip()
        while self._at < len(self._text):
            if self._text.startswith("[", self._at):
                table = self._header()
            else:
                self._assignment(table)
            self._skip()
        return self._lines

    def _line(self) -> int:
        return bisect.bisect_left(self._ends, self._at) + 1

    def _skip(self) -> None:
        """Over blanks, ends of lines and comments."""
        self._at = self._end_of(_TRIVIA)

    def _end_of(self, pattern: re.Pattern[str]) -> int:
        found = pattern.match(self._text, self._at)
        assert found is not None, "tomllib has accepted this text"
        return found.end()

    def _header(self) -> Place:
        line = self._line()
        is_array = self._text.startswith("[[", self._at)
        self._at += 2 if is_array else 1
        keys = self._keys()
        self._at += 2 if is_array else 1
        place: Place = ()
        for key in keys[:-1]:
            place = self._inside((*place, key))
            self._lines.setdefault(place, line)
        place = (*place, keys[-1])
        if is_array:
            count = self._elements[place] = self._elements.get(place, 0) + 1
            self._lines.setdefault(place, line)
            place = (*place, count - 1)
        # The section's own line replaces the one that a subsection before it has set.
        self._lines[place] = line
        return place

    def _inside(self, place: Place) -> Place:
        """An array of tables in the middle of a header stands for its last table."""
        self._lines.setdefault(place, self._line())
        return (*place, self._elements[place] - 1) if place in self._elements else place

    def _keys(self) -> list[str]:
        """The parts of a dotted key; stops at what follows it."""
        keys = []
        while True:
            self._skip()
            start = self._at
            if self._text[start] in "\"'":
                self._at = self._end_of(_STRING)
                keys.append(str(tomllib.loads(f"key = {self._text[start : self._at]}")["key"]))
            else:
                self._at = self._end_of(_BARE_KEY)
                keys.append(self._text[start : self._at])
            self._skip()
            if not self._text.startswith(".", self._at):
                return keys
            self._at += 1

    def _assignment(self, table: Place) -> None:
        line = self._line()
        place = table
        for key in self._keys():
            place = (*place, key)
            self._lines.setdefault(place, line)
        self._at += 1  # =
        self._skip()
        self._value(place)

    def _value(self, place: Place) -> None:
        opened = self._text[self._at]
        if opened in "\"'":
            self._at = self._end_of(_STRING)
        elif opened in "[{":
            self._several(place, opened)
        else:
            self._at = self._end_of(_ATOM)

    def _several(self, place: Place, opened: str) -> None:
        """An array, or a table in one line."""
        self._at += 1
        index = 0
        while True:
            self._skip()
            if self._text[self._at] in "]}":
                self._at += 1
                return
            if self._text[self._at] == ",":
                self._at += 1
                index += 1
            elif opened == "[":
                self._lines[*place, index] = self._line()
                self._value((*place, index))
            else:
                self._assignment(place)
