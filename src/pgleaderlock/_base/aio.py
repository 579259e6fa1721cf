"""Event-loop helpers: waiting for the first of several futures, cancelling tasks, running a loop in a thread.

Must never leave a task running that it started.
"""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

__all__ = [
    "any_done",
    "being_cancelled",
    "cancel_and_wait",
    "cancel_once",
    "first_of",
    "run_in_thread",
    "settle",
    "within",
]

JOIN_S = 5.0


async def first_of(*awaitables: Awaitable[Any]) -> "list[asyncio.Future[Any]]":
    """Wait until the first awaitable has ended, cancel the others, and wait for those too.

    Returns all of them as futures that are done, in the order given. Usually all but one are cancelled. But two may end
    in the same iteration of the loop, and a cancelled one may still return a result: check each. An exception of one of
    them is raised here; several are raised as an `ExceptionGroup`.

    If the caller is cancelled, all of them are cancelled and waited for. To keep a result that arrives at that moment,
    pass a future and check it afterwards. Shield a future that other tasks wait for.
    """
    futures: list[asyncio.Future[Any]] = [asyncio.ensure_future(each) for each in awaitables]
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(*futures)
    errors = [error for future in futures if not future.cancelled() and (error := future.exception()) is not None]
    if len(errors) > 1:
        raise BaseExceptionGroup("several of the things waited for have failed", errors)
    if errors:
        raise errors[0]
    return futures


async def cancel_and_wait(*futures: "asyncio.Future[Any]") -> None:
    """Cancel the futures that are not done and wait for all of them. Their exceptions are not raised here.

    If the caller is cancelled meanwhile, this cancels them once more and waits on, then raises the cancellation.
    """
    cancelled: asyncio.CancelledError | None = None
    while pending := [future for future in futures if not future.done()]:
        for future in pending:
            future.cancel()
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def being_cancelled() -> bool:
    """In an `except CancelledError`: was this task cancelled? False if something that it awaited was."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def any_done(*futures: "asyncio.Future[Any]", timeout_s: float | None = None) -> bool:
    """Wait until one future is done; False on a timeout. Cancels none of them: they belong to the caller."""
    done, _ = await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


async def within(timeout_s: float | None, awaitable: Awaitable[Any]) -> bool:
    """Await it; False if the timeout comes first, which cancels it. An exception of it is raised here."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            await awaitable
    except TimeoutError:
        if not limit.expired():
            raise
        return False
    return True


async def run_in_thread(main: Callable[[], Coroutine[Any, Any, None]], stop: Callable[[], None]) -> None:
    """Run `main` on an event loop in a thread, for a heartbeat that must not depend on the application's loop.

    Waits for its end and raises what it raised. If the caller is cancelled, `stop` asks it to end.
    """
    home = asyncio.get_running_loop()
    ended: asyncio.Future[None] = home.create_future()
    failure: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:  # raised in the caller's task
            failure.append(error)
        finally:
            with contextlib.suppress(RuntimeError):  # the application's loop is closed, so nothing waits
                home.call_soon_threadsafe(settle, ended)

    thread = threading.Thread(target=run, name="pgleaderlock heartbeat", daemon=True)
    thread.start()
    try:
        await ended
    except asyncio.CancelledError:
        stop()
        await asyncio.to_thread(thread.join, JOIN_S)
        raise
    if failure:
        raise failure[0]


def settle(future: "asyncio.Future[Any]", value: Any = None) -> None:
    """Set the result unless the future is done already. Must be called on the future's own loop."""
    if not future.done():
        future.set_result(value)


def cancel_once(task: "asyncio.Task[Any]") -> None:
    """Cancel unless that was done before: a second cancellation would interrupt the task's clean-up."""
    if not task.cancelling():
        task.cancel()
