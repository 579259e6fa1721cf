"""Code written once for async and blocking callers: a generator yields each call, and a runner waits for its result.

    def one_row(connection, query) -> Steps[tuple]:
        cursor = yield connection.execute(query)
        return (yield cursor.fetchone())

    await run(one_row(async_connection, "…"))
    run_blocking(one_row(connection, "…"))

A call on an async connection returns an awaitable, which `run` awaits; on a blocking connection it returns the result
itself. In both cases `yield` evaluates to the result, or raises the error.
"""

from collections.abc import Generator
from typing import Any, TypeVar

__all__ = ["Steps", "run", "run_blocking"]

T = TypeVar("T")
Steps = Generator[Any, Any, T]


async def run(steps: Steps[T]) -> T:
    """Await each yielded awaitable. A cancellation is raised inside the generator, at its `yield`."""
    answer: Any = None
    error: BaseException | None = None
    while True:
        try:
            call = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # what the generator returns is a T
        finally:
            answer = error = None  # an error that refers to this frame by its traceback would be a cycle
        try:
            answer = await call
        except BaseException as raised:
            error = raised


def run_blocking(steps: Steps[T]) -> T:
    """The same for blocking calls: what is yielded is the result already."""
    answer: Any = None
    while True:
        try:
            answer = steps.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
