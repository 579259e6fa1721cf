"""Runs the work of a term in the thread that called `lead`; the background loop begins and ends the term.

The loop runs `Handover.work` as the work of a term. It hands the term over to the thread and waits until the thread has
finished. If the term ends first, it sets the `stop` event and goes on waiting: a thread cannot be cancelled, and
leadership is not released while the thread is still at work.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from queue import Empty, SimpleQueue
from typing import Any, Generic, Self, TypeVar

from pgleaderlock._base.aio import settle
from pgleaderlock._base.logging import get_logger
from pgleaderlock.errors import ConfigurationError, LockError, PgLeaderLockError
from pgleaderlock.lock import EXIT_TIMEOUT_S
from pgleaderlock.sync import background

__all__ = ["Driven", "Handover", "Turn", "lead_here"]

T = TypeVar("T")
R = TypeVar("R")
CallbackT = TypeVar("CallbackT", bound=Callable[..., object])


class Driven:
    """What lock and election share: a `with` block, requests from callbacks and works, and a thread for callbacks."""

    def __init__(self, **log_fields: object) -> None:
        self._log = get_logger("pgleaderlock").bind(**log_fields)
        self._callbacks: background.CallbackThread | None = None

    def start(self) -> None:
        raise NotImplementedError

    def shutdown(self, timeout_s: float | None = None) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, _kind: object, leaving: BaseException | None, _trace: object) -> None:
        if leaving is None:
            self.shutdown()
            return
        try:
            self.shutdown(EXIT_TIMEOUT_S)
        except PgLeaderLockError as error:
            self._log.failed_at_exit("shutdown_failed", error, leaving)

    def _end(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Run a coroutine that waits for works and callbacks. Inside of one of these, only start it, without
        waiting."""
        if background.inside(self):
            background.request(main)
            return None
        return background.call(main)

    def _on(self, register: Callable[[Any], object], fn: CallbackT) -> CallbackT:
        _check_plain(getattr(register, "__name__", "a callback"), fn)
        if self._callbacks is None:
            self._callbacks = background.CallbackThread(self)
        register(self._callbacks.wrap(fn))
        return fn


class Turn(Generic[T]):
    """One term that is handed over to the thread."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args
        self.stop = threading.Event()
        """Set when the term ends."""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[T] = self._loop.create_future()

    def returned(self, value: T) -> None:
        self._loop.call_soon_threadsafe(settle, self.ended, value)

    def raised(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._raised, error)

    def abandoned(self) -> None:
        self._loop.call_soon_threadsafe(self.ended.cancel)

    def _raised(self, error: Exception) -> None:
        if isinstance(error, StopIteration):  # a future does not accept it
            error = RuntimeError(f"the work raised {error!r}")
        if not self.ended.done():
            self.ended.set_exception(error)


class Handover(Generic[T]):
    """Hands terms from the loop over to one thread, which does their work."""

    def __init__(self) -> None:
        self._turns: SimpleQueue[Turn[T] | None] = SimpleQueue()
        self._turn: Turn[T] | None = None
        self._closing = threading.Lock()
        self._closed = False

    async def work(self, *args: Any) -> T:
        """The coroutine that the loop runs as the work of a term."""
        turn: Turn[T] = Turn(args)
        with self._closing:
            if self._closed:
                raise asyncio.CancelledError
            self._turns.put(turn)
        while not turn.ended.done():
            try:
                await asyncio.wait([turn.ended])
            except asyncio.CancelledError:
                turn.stop.set()
        return turn.ended.result()

    def next(self, timeout_s: float | None = None) -> Turn[T] | None:
        """Wait for a term; None if there will be no more, or on a timeout."""
        try:
            self._turn = self._turns.get(timeout=timeout_s)
        except Empty:
            self._turn = None
        return self._turn

    def end(self, _: object = None) -> None:
        """There will be no more terms."""
        self._turns.put(None)

    def close(self) -> None:
        """The thread takes no more terms. The current term, and those in the queue, are abandoned."""
        with self._closing:
            self._closed = True
            if self._turn is not None:
                self._turn.abandoned()
            while not self._turns.empty():
                if (turn := self._turns.get()) is not None:
                    turn.abandoned()


def lead_here(
    owner: object,
    begin: Callable[[Callable[..., Coroutine[Any, Any, T]]], Coroutine[Any, Any, R]],
    work: Callable[..., T],
) -> R:
    """Run `begin(handover.work)` on the background loop, and `work(*args, stop)` in this thread for each term."""
    _check_plain("lead", work)
    handover: Handover[T] = Handover()
    leading = background.submit(lambda: begin(handover.work))
    leading.answer.add_done_callback(handover.end)
    try:
        while (turn := handover.next()) is not None:
            _work(owner, turn, work)
            if leading.is_of_parent:
                raise LockError(
                    "the work has returned in a forked child: leave the child with os._exit, the parent leads"
                )
        return leading.result()
    except BaseException:  # Ctrl-C, or the end of the program: leave `lead` at once
        leading.cancel(handover.close)  # cancel first: if the work ended by itself, that would count as a failure
        raise


def _work(owner: object, turn: Turn[T], work: Callable[..., T]) -> None:
    try:
        with background.marked(owner):
            value = work(*turn.args, turn.stop)
    except Exception as error:
        turn.raised(error)
    else:
        turn.returned(value)


def _check_plain(what: str, fn: object) -> None:
    """Raise `ConfigurationError` unless it is a plain function."""
    if not callable(fn):
        raise ConfigurationError(f"{what} takes a function, not {type(fn).__name__}: pass it uncalled")
    if inspect.iscoroutinefunction(fn):
        raise ConfigurationError(
            f"{what} of pgleaderlock.sync takes a plain function, and {getattr(fn, '__qualname__', fn)} is async: "
            "use the class of the same name in pgleaderlock for it"
        )
