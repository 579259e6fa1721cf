"""Code that is written once for async and for blocking callers: a generator yields each call, a runner waits for it.

    def one_row(connection, query) -> Steps[tuple]:
        cursor = yield connection.execute(query)
        return (yield cursor.fetchone())

    await run(one_row(async_connection, "…"))
    run_blocking(one_row(connection, "…"))

A call on an async connection gives an awaitable, which `run` awaits; on a blocking connection it gives the answer
itself. Either way the generator gets the answer where it has yielded, or the error is raised there.
"""

from collections.abc import Generator
from typing import Any, TypeVar

__all__ = ["Steps", "run", "run_blocking"]

T = TypeVar("T")
Steps = Generator[Any, Any, T]


async def run(steps: Steps[T]) -> T:
    """Await what is yielded. A cancellation is raised inside the generator, which decides what becomes of the call."""
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
    """The same where each call has ended when it is yielded."""
    answer: Any = None
    while True:
        try:
            answer = steps.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
