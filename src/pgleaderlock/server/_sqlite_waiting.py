"""Who waits for which lock of the SQLite store, in which order, and when somebody has to look again.

Imports the store's protocol and the standard library. Must never touch the database: it keeps order, no locks. Only the
writer's thread changes anything here; the counts may be read by others.
"""

import heapq
import itertools
from collections import OrderedDict
from typing import TYPE_CHECKING

from pgleaderlock.server.store import Acquire, Granted, Held, StoreFull

if TYPE_CHECKING:
    import asyncio

__all__ = ["Line", "Share", "Ticket", "WaitingRoom"]

LEASE_ENDS, TURN_ENDS = 0, 1  # of two things that are due at the same moment, the lease's end comes first
AGENDA_SLACK = 1000

WaitOutcome = Granted | Held | StoreFull


class Share:
    """A lease that was granted to a ticket, how many have been given it (a repeated acquire may be the second), and how
    many of those are tickets whose owners may still go."""

    __slots__ = ("granted", "receivers", "tickets")

    def __init__(self, granted: Granted) -> None:
        self.granted = granted
        self.receivers = 1
        self.tickets = 1


class Ticket:
    """One who waits. `share` is what came of it, if it was a lease."""

    __slots__ = ("acquire", "future", "gone", "share", "start_ns", "until_ns")

    def __init__(self, acquire: Acquire, start_ns: int, until_ns: int, future: "asyncio.Future[WaitOutcome]") -> None:
        self.acquire = acquire
        self.start_ns = start_ns
        self.until_ns = until_ns
        self.future = future
        self.share: Share | None = None
        self.gone = False

    @property
    def twin_key(self) -> tuple[str, str] | None:
        key = self.acquire.idempotency_key
        return None if key is None else (self.acquire.owner_id, key)


class Line:
    """Those who wait for one lock, first in, first out."""

    __slots__ = ("_keys", "look_ns", "tickets")

    def __init__(self) -> None:
        self.tickets: OrderedDict[Ticket, None] = OrderedDict()
        self.look_ns: int | None = None
        """When the agenda says to look at this lock: a later entry is not needed."""
        self._keys: dict[tuple[str, str], int] = {}

    @property
    def first(self) -> Ticket:
        return next(iter(self.tickets))

    def add(self, ticket: Ticket) -> None:
        self.tickets[ticket] = None
        if (key := ticket.twin_key) is not None:
            self._keys[key] = self._keys.get(key, 0) + 1

    def remove(self, ticket: Ticket) -> None:
        del self.tickets[ticket]
        if (key := ticket.twin_key) is not None:
            self._keys[key] -= 1
            if not self._keys[key]:
                del self._keys[key]

    def twins(self, ticket: Ticket) -> list[Ticket]:
        """Others who ask for the very same grant, because their first asking seemed lost."""
        key = ticket.twin_key
        if key is None or key not in self._keys:
            return []
        return [other for other in self.tickets if other.twin_key == key]


class WaitingRoom:
    """All lines, and the agenda: what is due next, be it the end of a lease that somebody waits for or of a ticket."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}
        self.waiting = 0
        self._agenda: list[tuple[int, int, int, str, Ticket | None]] = []
        self._number = itertools.count()

    def add(self, ticket: Ticket, lease_ends_ns: int) -> None:
        """Stands at the end of the line. The lease that stands in the way ends at `lease_ends_ns`, as things are."""
        name = ticket.acquire.lock_name
        self.lines.setdefault(name, Line()).add(ticket)
        self.waiting += 1
        heapq.heappush(self._agenda, (ticket.until_ns, TURN_ENDS, next(self._number), name, ticket))
        self.look_at(name, lease_ends_ns)
        self._tidy()

    def remove(self, ticket: Ticket) -> bool:
        """Takes a ticket out of its line; False if it is no longer there."""
        name = ticket.acquire.lock_name
        line = self.lines.get(name)
        if line is None or ticket not in line.tickets:
            return False
        line.remove(ticket)
        self.waiting -= 1
        if not line.tickets:
            del self.lines[name]
        return True

    def look_at(self, lock_name: str, due_ns: int) -> None:
        """Has this lock looked at when its lease ends, or earlier if that is on the agenda already."""
        line = self.lines.get(lock_name)
        if line is not None and (line.look_ns is None or due_ns < line.look_ns):
            line.look_ns = due_ns
            heapq.heappush(self._agenda, (due_ns, LEASE_ENDS, next(self._number), lock_name, None))
            self._tidy()  # a lease that is renewed for less each time has a new entry each time

    def look_at_all(self, due_ns: int) -> None:
        """After a transaction that failed nobody knows any more what the agenda was made from."""
        for name in self.lines:
            self.look_at(name, due_ns)

    def due(self, now_ns: int) -> tuple[str, Ticket | None] | None:
        """The next thing that is due: a lock to look at, or a ticket whose time is up."""
        while self._agenda and self._agenda[0][0] <= now_ns:
            due_ns, kind, _, name, ticket = heapq.heappop(self._agenda)
            line = self.lines.get(name)
            if line is None:
                continue
            if kind == TURN_ENDS and ticket in line.tickets:
                return name, ticket
            if kind == LEASE_ENDS and line.look_ns == due_ns:
                line.look_ns = None
                return name, None
        return None

    @property
    def next_due_ns(self) -> int | None:
        return self._agenda[0][0] if self._agenda else None

    def _tidy(self) -> None:
        """Entries of tickets that have gone stay until they are due; they must not become many."""
        if len(self._agenda) > 2 * (self.waiting + len(self.lines)) + AGENDA_SLACK:
            self._agenda = [entry for entry in self._agenda if self._is_live(entry)]
            heapq.heapify(self._agenda)

    def _is_live(self, entry: tuple[int, int, int, str, Ticket | None]) -> bool:
        due_ns, kind, _, name, ticket = entry
        line = self.lines.get(name)
        if line is None:
            return False
        return ticket in line.tickets if kind == TURN_ENDS else line.look_ns == due_ns
