"""What the writer of the SQLite store is given to do.

Imports the store's protocol and its neighbours. Must never do anything itself.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pgleaderlock.server._sqlite_locks import Locks
from pgleaderlock.server._sqlite_waiting import Ticket
from pgleaderlock.server.store import Operation, Reply

if TYPE_CHECKING:
    import asyncio

__all__ = ["Answers", "Apply", "Call", "Cancel", "Item", "Stop", "Tick"]

Apply = tuple[Reply, Sequence[Operation]]
"""A request of operations: the commonest item, and so the cheapest to make."""


class Call:
    """Anything else that is to be done inside a transaction, all or nothing."""

    __slots__ = ("do", "future")

    def __init__(self, future: "asyncio.Future[Any]", do: Callable[[Locks], object]) -> None:
        self.future = future
        self.do = do


class Cancel:
    """A ticket whose owner has gone. It is owed until a transaction with it has been committed."""

    __slots__ = ("ticket",)

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket


class Tick:
    """Something on the agenda is due."""


class Stop:
    __slots__ = ("future",)

    def __init__(self, future: "asyncio.Future[Any]") -> None:
        self.future = future


Item = Apply | Ticket | Call | Cancel | Tick | Stop
Answers = list[tuple[Reply, Any]]
