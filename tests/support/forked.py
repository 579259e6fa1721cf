"""A forked child of the test process: one that answers once, or one that lives and speaks with the test.

The second speaks in JSON lines, and ends when the test closes its end.

Imports the standard library.
"""

import asyncio
import contextlib
import json
import os
import select
import signal
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

__all__ = ["Child", "at_once", "forked", "in_child"]

T = TypeVar("T")

WAIT_S = 20.0
ANSWER_BYTES_MAX = 4000


def in_child(ask: Callable[[], str]) -> str:
    """What a forked child answers: the text of its exception if it raises, an empty one if it says nothing in time."""
    receive, send = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # test processes have threads; the child only answers
        child = os.fork()
    if child == 0:
        try:
            os.write(send, ask().encode()[:ANSWER_BYTES_MAX])
        except BaseException as error:
            os.write(send, repr(error).encode()[:ANSWER_BYTES_MAX])
        finally:
            os._exit(0)  # without cleaning up: that is the parent's
    os.close(send)
    try:
        ready, _, _ = select.select([receive], [], [], WAIT_S)
        return os.read(receive, ANSWER_BYTES_MAX).decode() if ready else ""
    finally:
        os.close(receive)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing: a forked child has no event loop to wait with."""
    try:
        coroutine.send(None)
    except StopIteration as returned:
        result: T = returned.value
        return result
    raise AssertionError("it waits for something")


class Child:
    """The test's end of a forked process; and, in that process, its own."""

    def __init__(self, said: int, told: int) -> None:
        self._said, self._told = said, told

    def hears(self) -> Any:
        """The next line of the child."""
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._said], [], [], WAIT_S)
            assert ready, "the child has said nothing"
            chunk = os.read(self._said, 1)
            assert chunk, f"the child has ended: {line!r}"
            line += chunk
        return json.loads(line)

    def say(self, what: object) -> None:
        os.write(self._said, json.dumps(what).encode() + b"\n")

    async def released(self) -> None:
        """Until the test has left its block."""
        await asyncio.to_thread(os.read, self._told, 1)


def run_child(work: Callable[[Child], Coroutine[Any, Any, None]], child: Child) -> None:
    try:
        asyncio.run(work(child))
    except BaseException as error:
        child.say(repr(error))
    finally:
        os._exit(0)  # without cleaning up: that is the parent's


@contextlib.contextmanager
def forked(work: Callable[[Child], Coroutine[Any, Any, None]]) -> Iterator[Child]:
    """A child that does this work on an event loop of its own."""
    said, say = os.pipe()
    told, tell = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(tell)
        run_child(work, Child(say, told))
    os.close(say)
    os.close(told)
    killer = threading.Timer(3 * WAIT_S, os.kill, (pid, signal.SIGKILL))
    killer.start()
    try:
        yield Child(said, tell)
    finally:
        os.close(tell)
        os.waitpid(pid, 0)
        killer.cancel()
        os.close(said)
