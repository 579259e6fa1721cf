"""Threads and event loops: a coroutine on a loop in a thread of its own, and a future that is settled from elsewhere.

The first is for a heartbeat that must not depend on a free loop.

Imports the standard library only.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["run_in_thread", "settle"]

JOIN_S = 5.0


async def run_in_thread(main: Callable[[], Coroutine[Any, Any, None]], stop: Callable[[], None]) -> None:
    """Wait for `main` to end in its thread; raises what it raised. If we are cancelled, `stop` asks it to end."""
    home = asyncio.get_running_loop()
    ended: asyncio.Future[None] = home.create_future()
    failure: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:  # carried over to whoever waits
            failure.append(error)
        finally:
            with contextlib.suppress(RuntimeError):  # the application's loop is gone, and nobody waits
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
    """Tell whoever waits for it, once; on the future's own loop."""
    if not future.done():
        future.set_result(value)
