"""The waiting requests of the SQLite store: which lock each waits for, in which order, and when a lock must be checked.

Must never touch the database. Only the thread that holds the writer's turn changes anything here; other threads may
read the counts.
"""

import heapq
import itertools
from collections import OrderedDict

from pgleaderlock.server.store import Acquire, Granted, Reply

__all__ = ["Line", "Share", "Ticket", "WaitingRoom"]

LEASE_ENDS, TURN_ENDS = 0, 1  # sorted: of two entries due at the same moment, the end of the lease comes first
AGENDA_SLACK = 1000


class Share:
    """A lease that was granted to a ticket, with the number of requests that got it (a repeated acquire gets the same
    lease), and the number of those that are tickets and may still be cancelled."""

    __slots__ = ("granted", "receivers", "tickets")

    def __init__(self, granted: Granted) -> None:
        self.granted = granted
        self.receivers = 1
        self.tickets = 1


class Ticket:
    """One acquire that waits. `share` is the lease that it was granted, if any."""

    __slots__ = ("acquire", "gone", "reply", "share", "start_ns", "until_ns")

    def __init__(self, acquire: Acquire, start_ns: int, until_ns: int, reply: Reply) -> None:
        self.acquire = acquire
        self.start_ns = start_ns
        self.until_ns = until_ns
        self.reply = reply
        self.share: Share | None = None
        self.gone = False


class Line:
    """The tickets that wait for one lock, first in, first out."""

    __slots__ = ("_keys", "look_ns", "tickets")

    def __init__(self) -> None:
        self.tickets: OrderedDict[Ticket, None] = OrderedDict()
        self.look_ns: int | None = None
        """When the agenda next has a check of this lock. An entry for a later time is not needed."""
        self._keys: dict[str, dict[Ticket, None]] = {}

    @property
    def first(self) -> Ticket:
        return next(iter(self.tickets))

    def add(self, ticket: Ticket) -> None:
        self.tickets[ticket] = None
        if (key := ticket.acquire.idempotency_key) is not None:
            self._keys.setdefault(key, {})[ticket] = None

    def remove(self, ticket: Ticket) -> None:
        del self.tickets[ticket]
        if (key := ticket.acquire.idempotency_key) is not None:
            del self._keys[key][ticket]
            if not self._keys[key]:
                del self._keys[key]

    def with_key(self, key: str | None) -> Acquire | None:
        """The acquire that the waiting requests with this key repeat; None if there is none."""
        tickets = self._keys.get(key) if key is not None else None
        return next(iter(tickets)).acquire if tickets else None

    def twins(self, ticket: Ticket) -> list[Ticket]:
        """Other tickets that repeat the same request."""
        key = ticket.acquire.idempotency_key
        return [] if key is None else list(self._keys.get(key, ()))


class WaitingRoom:
    """All lines, and the agenda of what is due next: the end of a lease that a request waits for, or of a ticket."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}
        self.waiting = 0
        self._agenda: list[tuple[int, int, int, str, Ticket | None]] = []
        self._number = itertools.count()

    def add(self, ticket: Ticket, lease_ends_ns: int) -> None:
        """Puts the ticket at the end of its line. The lease in the way ends at `lease_ends_ns` unless it is renewed."""
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
        """Schedules a check of this lock at `due_ns`, unless an earlier one is on the agenda."""
        line = self.lines.get(lock_name)
        if line is not None and (line.look_ns is None or due_ns < line.look_ns):
            line.look_ns = due_ns
            heapq.heappush(self._agenda, (due_ns, LEASE_ENDS, next(self._number), lock_name, None))
            self._tidy()  # a lease that is shortened by each renewal adds an entry each time

    def look_at_all(self, due_ns: int) -> None:
        """Schedules a check of all locks, after a failed transaction: the agenda came from rows that were rolled
        back."""
        for name in self.lines:
            self.look_at(name, due_ns)

    def due(self, now_ns: int) -> tuple[str, Ticket | None] | None:
        """The next entry that is due: a lock to check, or a ticket whose wait is over."""
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
        """Removes the entries of tickets that have gone, to bound their number: otherwise they stay until they are
        due."""
        if len(self._agenda) > 2 * (self.waiting + len(self.lines)) + AGENDA_SLACK:
            self._agenda = [entry for entry in self._agenda if self._is_live(entry)]
            heapq.heapify(self._agenda)

    def _is_live(self, entry: tuple[int, int, int, str, Ticket | None]) -> bool:
        due_ns, kind, _, name, ticket = entry
        line = self.lines.get(name)
        if line is None:
            return False
        return ticket in line.tickets if kind == TURN_ENDS else line.look_ns == due_ns
