"""Notices that the other side of a socket has hung up, without reading a byte of it.

A guard lives on a connection that its caller uses. Reading from it, even peeking, would disturb the caller or be
fooled by bytes that the caller has not read yet: a server that ends a session sends its reason first, and the end of
the stream hides behind it. The kernel knows better: EPOLLRDHUP tells of the hang-up alone, and an epoll descriptor can
itself be waited for.

Linux; elsewhere the hang-up is looked for every `POLL_S` by the caller of `available()`. Imports the standard library.
"""

import os
import select
import threading
import weakref

__all__ = ["Hangup", "available"]


def available() -> bool:
    return hasattr(select, "EPOLLRDHUP")


class Hangup:
    """Readable (`fileno`) once the peer of this descriptor has hung up. Holds a duplicate of it until closed."""

    def __init__(self, descriptor: int) -> None:
        with _making:
            self._duplicate = os.dup(descriptor)
            self._epoll = select.epoll()
            # EPOLLHUP and EPOLLERR are always reported; EPOLLIN is not asked for.
            self._epoll.register(self._duplicate, select.EPOLLRDHUP)
            _watched.add(self)

    @property
    def closed(self) -> bool:
        return self._epoll.closed

    def fileno(self) -> int:
        return self._epoll.fileno()

    def wait(self, timeout_s: float | None) -> bool:
        """Block until the hang-up; False when the time is over first."""
        return bool(self._epoll.poll(timeout_s, 1))

    def close(self) -> None:
        if not self._epoll.closed:
            self._epoll.close()
            os.close(self._duplicate)


_watched: weakref.WeakSet[Hangup] = weakref.WeakSet()
# Held while one is made, and by a thread that forks: a child must not get a duplicate that it does not know of.
_making = threading.Lock()


def _let_go_in_child() -> None:
    """In a forked child: its duplicate would keep the parent's connection open after the parent has ended."""
    _making.release()
    for hangup in list(_watched):
        hangup.close()


os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_let_go_in_child)
