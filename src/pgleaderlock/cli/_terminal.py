"""Lends the terminal to the command, and takes it back.

Only the foreground process group of a terminal may read from it, and only that group gets Ctrl-C. The command runs
in a group of its own, so it must be made the foreground group, or an interactive command would be stopped at its
first read.

Imports the standard library only. It must never take the terminal away from somebody else: each change first looks
at who has it.
"""

import contextlib
import os
import signal
import stat
import termios
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["LentTerminal"]

_STDIN, _STDOUT = 0, 1


class LentTerminal:
    """The terminal at our standard input, if there is one, on behalf of one process group."""

    def __init__(self, pgid: int) -> None:
        self._pgid = pgid
        self._lent = False
        self._modes: list[Any] | None = None
        self._ttou_before: Any = None

    @property
    def lent(self) -> bool:
        return self._lent

    def lend_at_start(self) -> None:
        """Lends before the command runs, unless our output is a pipe.

        In `pgleaderlock exec … | less` the reader of the pipe is in our group and needs the keyboard. There the
        command gets the terminal only when it asks for it (see `lend`).
        """
        with contextlib.suppress(OSError):
            if not stat.S_ISFIFO(os.fstat(_STDOUT).st_mode):
                self.lend()

    def lend(self) -> bool:
        """Makes the command's group the foreground group, if that is ours to give. True if the command has it now."""
        try:
            if not os.isatty(_STDIN):
                return False
            foreground = os.tcgetpgrp(_STDIN)
            if foreground == self._pgid:
                return True
            if foreground != os.getpgrp():
                return False  # We run in the background: the terminal is somebody else's.
            if self._modes is None:
                self._modes = termios.tcgetattr(_STDIN)
            with _ttou_blocked():
                os.tcsetpgrp(_STDIN, self._pgid)
        except (OSError, termios.error):
            return False  # No controlling terminal, or it has hung up: there is nothing to lend.
        if not self._lent:
            self._ignore_ttou()
        self._lent = True
        return True

    def take_back(self, *, restore_modes: bool) -> None:
        """Makes our group the foreground group again, if the command's group still is or no longer exists.

        `restore_modes` is for a command that was killed and could not leave raw mode by itself.
        """
        if not self._lent:
            return
        self._lent = False
        with contextlib.suppress(OSError, termios.error), _ttou_blocked():
            foreground = os.tcgetpgrp(_STDIN)
            # Somebody else may have it by now: the shell, after we were stopped and put into the background.
            if foreground == self._pgid or not _group_exists(foreground):
                os.tcsetpgrp(_STDIN, os.getpgrp())
                if restore_modes and self._modes is not None:
                    # NOW, not DRAIN: output held back by Ctrl-S would block us for ever.
                    termios.tcsetattr(_STDIN, termios.TCSANOW, self._modes)
        self._restore_ttou()

    def _ignore_ttou(self) -> None:
        # While the command has the terminal we are in the background. With `stty tostop` our own log lines would
        # then stop us, and a stopped supervisor loses the lock. Python sets handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            self._ttou_before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)

    def _restore_ttou(self) -> None:
        if self._ttou_before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTTOU, self._ttou_before)
            self._ttou_before = None


@contextlib.contextmanager
def _ttou_blocked() -> Iterator[None]:
    """Changing the foreground group from the background stops the caller, unless it blocks this signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _group_exists(pgid: int) -> bool:
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
