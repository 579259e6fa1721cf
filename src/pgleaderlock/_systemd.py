"""What a service tells systemd: that it is ready, what it does, that it lives, that it ends (`sd_notify(3)`).

A datagram to the socket that `NOTIFY_SOCKET` names; without that variable there is nobody to tell, and `from_environ`
gives None. Ten lines, so no library.

Imports the standard library and `_logging` only. It must never raise or wait: a supervisor that does not listen is no
reason to stop leading.
"""

import os
import socket
from collections.abc import Mapping
from typing import Self

from pgleaderlock._logging import get_logger

__all__ = ["VARIABLES", "Notifier"]

# Ours alone: a command that we run must not speak in our name.
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")

_log = get_logger("pgleaderlock.systemd")


class Notifier:
    """The line to the supervisor. `close` it in the end."""

    def __init__(self, address: str, watchdog_s: float | None = None) -> None:
        # A name that begins with @ is no file: Linux writes it with a zero byte.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._failed = False
        self.watchdog_s = watchdog_s
        """How long systemd waits for a sign of life before it kills us; None if it does not watch."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Self | None:
        """The line that systemd has opened for this process; None if it has not."""
        address = environ.get("NOTIFY_SOCKET", "")
        if not address.startswith(("/", "@")) or len(address) < 2:
            return None
        return cls(address, _watchdog_s(environ))

    def ready(self, status: str) -> None:
        """The start is over. Once is enough; every further one does no harm."""
        self._send("READY=1", f"STATUS={_one_line(status)}")

    def status(self, status: str) -> None:
        """One line for `systemctl status`."""
        self._send(f"STATUS={_one_line(status)}")

    def alive(self) -> None:
        """A sign of life for `WatchdogSec=`."""
        self._send("WATCHDOG=1")

    def stopping(self, status: str = "ending") -> None:
        self._send("STOPPING=1", f"STATUS={_one_line(status)}")

    def close(self) -> None:
        self._socket.close()

    def _send(self, *assignments: str) -> None:
        try:
            self._socket.sendto("\n".join(assignments).encode(), self._address)
        except OSError as error:
            if not self._failed:  # once is enough for the log
                _log.warning("notify_failed", error=error)
            self._failed = True
        else:
            self._failed = False


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not usec.isascii() or not usec.isdigit() or int(usec) == 0:
        return None
    # Inherited from a parent that is watched itself: not meant for us.
    return int(usec) / 1e6 if pid in ("", str(os.getpid())) else None


def _one_line(text: str) -> str:
    return " ".join(text.split())
