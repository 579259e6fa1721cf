"""Dramatiq: periodic messages from one of many workers, and one run of an actor at a time.

Needs the extra `dramatiq`. What it does not promise: a tick between the end of a leader and the start of its successor
is not sent.
"""

import contextlib
import heapq
import queue
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from pgleaderlock._config.durations import positive_s
from pgleaderlock.contrib._jobs import one_at_a_time
from pgleaderlock.errors import LockError, ShutdownError
from pgleaderlock.sync import LeaderLock

try:
    from dramatiq import Actor, Broker, Middleware, Worker
except ImportError as error:
    raise ImportError(
        "pgleaderlock.contrib.dramatiq needs dramatiq: pip install 'pgleaderlock[dramatiq]'", name=error.name
    ) from error

__all__ = ["Periodic", "one_at_a_time"]

ActorT = TypeVar("ActorT", bound="Actor[..., Any]")
CLOSE_S = 5.0


class Periodic(Middleware):
    """Sends messages to actors at fixed intervals, from the one worker process that leads.

    periodic = Periodic(LeaderLock.for_name(dsn, "periodic"))
    broker.add_middleware(periodic)

    @periodic.every(60)
    @dramatiq.actor
    def poll() -> None: ...

    The ticks are multiples of the interval since 1970, the same in every process. A takeover does not shift them.
    """

    def __init__(self, leader_lock: LeaderLock) -> None:
        """The lock is started and shut down with each worker."""
        self.leader_lock = leader_lock
        self._actors: list[tuple[float, Actor[..., Any]]] = []
        self._threads: list[threading.Thread] = []
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()

    def every(self, seconds: float) -> Callable[[ActorT], ActorT]:
        """Send the actor a message without arguments at each tick, above `@dramatiq.actor`."""
        positive_s("every", seconds)

        def add(actor: ActorT) -> ActorT:
            self._actors.append((seconds, actor))
            return actor

        return add

    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        """Start the lock in each worker process, after the fork."""
        if not self._threads and self._actors:
            self.leader_lock.start()
            self._over = queue.SimpleQueue()
            self._threads = [
                threading.Thread(target=target, name="pgleaderlock periodic", daemon=True)
                for target in (self._lead, self._release)
            ]
            for thread in self._threads:
                thread.start()
            self._hear_sigterm()

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """Release the lock, so that another worker takes over at once."""
        self._over.put(None)
        for thread in self._threads:
            thread.join(CLOSE_S)
        self._threads = []

    def _hear_sigterm(self) -> None:
        """Release the lock at SIGTERM, because Dramatiq's worker only checks once per second whether it should end."""
        tell_worker = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread() or not callable(tell_worker):
            return  # not a worker of Dramatiq's command line

        def told(number: int, frame: FrameType | None) -> None:
            self._over.put(None)
            tell_worker(number, frame)

        signal.signal(signal.SIGTERM, told)

    def _release(self) -> None:
        self._over.get()
        with contextlib.suppress(ShutdownError):  # the broker hangs, but the lock is free
            self.leader_lock.shutdown(CLOSE_S)

    def _lead(self) -> None:
        with contextlib.suppress(LockError):  # the lock was shut down before this thread started
            self.leader_lock.lead(self._send, on_failure="restart")

    def _send(self, stop: threading.Event) -> None:
        due = [(_next_tick(seconds), number) for number, (seconds, _) in enumerate(self._actors)]
        heapq.heapify(due)
        while not stop.wait(max(0.0, due[0][0] - time.time())):
            if time.time() < due[0][0]:
                continue  # the wall clock was set back in the meantime
            seconds, actor = self._actors[due[0][1]]
            heapq.heapreplace(due, (_next_tick(seconds), due[0][1]))
            if self.leader_lock.is_leader:
                actor.send()


def _next_tick(seconds: float) -> float:
    return (time.time() // seconds + 1) * seconds
