"""Brings the write-ahead log of the SQLite store back into its file, beside the writer and not in its way.

With a million locks nearly every grant changes a page of its own, and to copy thousands of them takes as long as
thousands of grants. SQLite can do that from another connection while the writer goes on. Only the last bit is the
writer's: the log starts again at its beginning when all of it has been copied and nobody has written meanwhile.

Imports apsw and the standard library. Must never keep the writer waiting, unless the log is in doubt, and never write
but what the log has.
"""

import contextlib
import queue
import threading

import apsw

__all__ = ["Log"]

COPY_S_MAX = 30.0
"""How long a writer that has to copy everything waits for the copier to end: two cannot copy at once."""
COPY_FACTOR = 4
"""The writer finishes the copying itself when the log is so many times longer than it should be."""


class Log:
    """`due()` after each commit, by whoever made it. `copier` is a connection for the thread of this log alone."""

    def __init__(self, writer: apsw.Connection, copier: apsw.Connection, pages_max: int) -> None:
        self._writer = writer
        self._copier = copier
        self._pages_max = pages_max
        self._pages = 0
        self.doubtful = False
        """A sync has failed, whoever asked for it: what it had not on disk may be lost, and the system not know."""
        self._idle = threading.Event()
        self._idle.set()
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="pgleaderlock lock log", daemon=True)
        writer.set_wal_hook(self._committed)
        self._thread.start()

    def _committed(self, connection: apsw.Connection, database: str, pages: int) -> int:
        self._pages = pages
        return apsw.SQLITE_OK

    @property
    def overdue(self) -> bool:
        """The writer itself has to copy, which takes a while."""
        return self._pages >= COPY_FACTOR * self._pages_max

    def due(self) -> None:
        if self._pages < self._pages_max or not self._idle.is_set():
            return
        if not self.overdue:
            self._idle.clear()
            self._asked.put(True)
        else:
            # Nearly all of it has been copied by now. The next transaction begins at the beginning.
            self._copy(self._writer)
            self._pages = 0

    def start_again(self) -> None:
        """All of the log into the file, now, in the writer's thread and outside a transaction; raises if it cannot."""
        self._idle.wait(COPY_S_MAX)
        self.doubtful = False  # before: the other thread may find out meanwhile that it is so again
        try:
            self._writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_RESTART)
        except BaseException:
            self.doubtful = True
            raise

    def close(self) -> None:
        """Ends the thread and its connection; the writer's own is the last, and copies what is left."""
        self._asked.put(False)
        self._thread.join()

    def _work(self) -> None:
        while self._asked.get():
            self._copy(self._copier)
            self._idle.set()
        with contextlib.suppress(apsw.Error):
            self._copier.close(True)

    def _copy(self, connection: apsw.Connection) -> None:
        try:
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        except apsw.IOError:
            self.doubtful = True
        except apsw.Error:
            pass  # the log holds what was committed all the same, and it is tried again after the next
