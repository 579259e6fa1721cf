"""What a mutant is: a name, a change of a copy of the package, and the tests that must notice it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ["Change", "Edit", "Mutant", "Site", "Splice", "Tests"]

Tests = tuple[str, ...]


class Change(Protocol):
    def plant(self, package: Path) -> None:
        """Make the change in a copy of the package, or raise `LookupError` if it does not apply."""
        ...


@dataclass(frozen=True)
class Mutant:
    """One broken promise, and the tests that must notice: the quick ones first."""

    name: str
    changes: tuple[Change, ...]
    tests: Tests


@dataclass(frozen=True)
class Edit:
    """Replaces a text by another one: the only one in the file, or the first one behind `after`."""

    file: str
    old: str
    new: str
    after: str = ""

    def plant(self, package: Path) -> None:
        path = package / self.file
        head, anchor, tail = path.read_text().partition(self.after) if self.after else ("", "", path.read_text())
        found = tail.count(self.old)
        if (self.after and not anchor) or found == 0 or (found > 1 and not self.after):
            where = f" behind {self.after!r}" if self.after else ""
            raise LookupError(f"{self.file} has {found} times{where}: {self.old!r}")
        path.write_text(head + anchor + tail.replace(self.old, self.new, 1))


@dataclass(frozen=True)
class Site:
    """One change of a text, found by a generator: the new text between two places."""

    operator: str
    start: int
    end: int
    new: str


@dataclass(frozen=True)
class Splice:
    """A site in a file of the package."""

    file: str
    site: Site

    def plant(self, package: Path) -> None:
        path = package / self.file
        text = path.read_text()
        path.write_text(text[: self.site.start] + self.site.new + text[self.site.end :])
