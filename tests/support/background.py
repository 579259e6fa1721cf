"""An event loop in a thread of its own, for tests that are not asynchronous themselves. Standard library only."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

__all__ = ["Background", "background"]

# A bound against hanging, never a measure.
WAIT_S = 60.0
_T = TypeVar("_T")


class Background:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def do(self, work: Coroutine[Any, Any, _T], wait_s: float = WAIT_S) -> _T:
        """Runs it there, and waits for what it gives."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(wait_s)

    @contextlib.contextmanager
    def within(self, context: AbstractAsyncContextManager[_T]) -> Iterator[_T]:
        """An asynchronous context, entered and left there."""
        entered = self.do(_coroutine(context.__aenter__()))
        try:
            yield entered
        finally:
            self.do(_coroutine(context.__aexit__(None, None, None)))

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _coroutine(work: Any) -> Any:
    return await work


@contextlib.contextmanager
def background() -> Iterator[Background]:
    running = Background()
    try:
        yield running
    finally:
        running.close()
