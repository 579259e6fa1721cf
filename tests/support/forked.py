"""What a forked child of the test process answers.

Imports the standard library.
"""

import os
import select
import signal
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["at_once", "in_child"]

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
