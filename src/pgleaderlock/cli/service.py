"""A command as a service: it ends on a signal, and reports to systemd and, over HTTP, to probes and Prometheus.

- `Stopper` and `Reloader` catch signals: the first SIGINT or SIGTERM asks for a clean end, the second one ends the
  process at once. They use plain handlers instead of the event loop's, because those also work before and after the
  loop runs, and while it is blocked by something that does not end, such as a frozen server. Enter them in the main
  thread.
- `Notifier` sends `sd_notify(3)` datagrams to systemd; a library would be longer than the code.
- `Watched` answers probes and metrics while a lock or an election runs, and keeps systemd informed.

Once a command runs, a failed report must not end or delay it: a supervisor that does not listen is no reason to stop
leading.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click

from pgleaderlock._base.aio import first_of
from pgleaderlock._base.logging import get_logger
from pgleaderlock.cli.options import given
from pgleaderlock.cli.output import exit_code_for_signal
from pgleaderlock.election import LeaderElection
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.lock import LeaderLock
from pgleaderlock.probes import ProbeServer

if TYPE_CHECKING:
    from pgleaderlock.embedded import EmbeddedPostgres
    from pgleaderlock.metrics import ElectionMetrics

__all__ = [
    "VARIABLES",
    "Notifier",
    "Reloader",
    "Stopper",
    "Watched",
    "check_probes",
    "private_server",
    "probe_options",
    "ttou_blocked",
]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# systemd's variables for this process only: a command that we run must not report in our name.
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
# How soon `systemctl status` shows a change.
STATUS_S = 1.0

_Command = TypeVar("_Command", bound=Callable[..., Any])
_Waiting = tuple[asyncio.AbstractEventLoop, asyncio.Event]

_log = get_logger("pgleaderlock.systemd")


# --- Signals


class Stopper:
    """While entered, catches the signals that ask for the end. A handler only sets a flag and wakes the loop."""

    def __init__(self) -> None:
        self.signum: int | None = None
        """The signal that asked, or None."""
        self._previous: dict[int, Any] = {}
        self._waiting: _Waiting | None = None

    def __enter__(self) -> Self:
        self._previous = {signum: signal.signal(signum, self._on_signal) for signum in SIGNALS}
        return self

    def __exit__(self, *_exception: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    async def asked(self) -> int:
        """Return the signal once one has asked for the end."""
        event = asyncio.Event()
        # In this order, a signal between the two lines is noticed by one of them.
        self._waiting = (asyncio.get_running_loop(), event)
        if self.signum is None:
            await event.wait()
        assert self.signum is not None
        return self.signum

    async def unless_asked(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work`, and cancel it when a signal asks for the end. True if the work has ended by itself."""
        working, _ = await first_of(work, self.asked())
        return not working.cancelled()

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self.signum is not None:
            if signum == signal.SIGHUP:
                return  # both the shell and the kernel send one when a terminal closes
            # No clean-up, because something may hang. The server frees the lock by itself.
            os._exit(exit_code_for_signal(signum))
        self.signum = signum
        _wake(self._waiting)


class Reloader(Stopper):
    """A `Stopper` that also catches SIGHUP, which asks to read files again.

    In a terminal SIGHUP means that the terminal has closed, and asks for the end, unless it is ignored (nohup).
    """

    def __init__(self) -> None:
        super().__init__()
        self._again = False
        self._waiting_again: _Waiting | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        ends = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _in_terminal()
        handler = self._on_signal if ends else self._on_hangup
        self._previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, handler)
        return self

    def __exit__(self, *exception: object) -> None:
        if self.signum is not None:
            # Both the shell and the kernel send a SIGHUP when a terminal closes: the second one may come as late as
            # this.
            self._previous[signal.SIGHUP] = signal.SIG_IGN
        super().__exit__(*exception)

    async def asked_again(self) -> None:
        """Return at the next request to read files again, counted from the last return."""
        event = asyncio.Event()
        self._waiting_again = (asyncio.get_running_loop(), event)
        if not self._again:
            await event.wait()
        self._again = False

    def _on_hangup(self, _signum: int, _frame: FrameType | None) -> None:
        self._again = True
        _wake(self._waiting_again)


@contextlib.contextmanager
def ttou_blocked() -> Iterator[None]:
    """Block SIGTTOU, which would stop a background process that changes a terminal's modes or foreground group."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wake(waiting: _Waiting | None) -> None:
    if waiting is not None:
        loop, event = waiting
        if not loop.is_closed():
            loop.call_soon_threadsafe(event.set)


def _in_terminal() -> bool:
    try:
        return os.isatty(0)
    except OSError:
        return False


def private_server(ctx: click.Context) -> "EmbeddedPostgres":
    """The server of `--embedded`: this user's own on this machine, not started yet."""
    if given(ctx, "dsn"):
        raise click.UsageError("--embedded and --dsn exclude each other: give one or the other")
    from pgleaderlock.embedded import EmbeddedPostgres  # noqa: PLC0415 - only this option needs it.

    return EmbeddedPostgres()


# --- systemd


class Notifier:
    """The datagram socket to systemd. It never raises or waits; `close` it at the end."""

    def __init__(self, address: str, watchdog_s: float | None = None) -> None:
        # A name that begins with @ is an abstract socket, whose address begins with a zero byte on Linux.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._failed = False
        self.watchdog_s = watchdog_s
        """How long systemd waits for a keep-alive before it kills this process; None: no watchdog."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Self | None:
        """The socket that systemd has named for this process; None if there is none."""
        address = environ.get("NOTIFY_SOCKET", "")
        if not address.startswith(("/", "@")) or len(address) < 2:
            return None
        return cls(address, _watchdog_s(environ))

    def ready(self, status: str) -> None:
        """Report that the start is complete. May be repeated."""
        self._send("READY=1", f"STATUS={_one_line(status)}")

    def status(self, status: str) -> None:
        """Report one line for `systemctl status`."""
        self._send(f"STATUS={_one_line(status)}")

    def alive(self) -> None:
        """Send a keep-alive for `WatchdogSec=`."""
        self._send("WATCHDOG=1")

    def stopping(self, status: str = "ending") -> None:
        self._send("STOPPING=1", f"STATUS={_one_line(status)}")

    def close(self) -> None:
        self._socket.close()

    def _send(self, *assignments: str) -> None:
        try:
            self._socket.sendto("\n".join(assignments).encode(), self._address)
        except OSError as error:
            if not self._failed:  # log only the first of several failures
                _log.warning("notify_failed", error=error)
            self._failed = True
        else:
            self._failed = False


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not usec.isascii() or not usec.isdigit() or int(usec) == 0:
        return None
    # With another pid, the variable was inherited from a parent that systemd watches.
    return int(usec) / 1e6 if pid in ("", str(os.getpid())) else None


def _one_line(text: str) -> str:
    return " ".join(text.split())


# --- Probes and metrics


def probe_options(command: _Command) -> _Command:
    """`--metrics-port` and `--metrics-host`."""
    options = (
        click.option(
            "--metrics-port",
            type=click.IntRange(0, 65535),
            help="With --fenced: answer /metrics, /healthz, /readyz and /leader here; 0 is any port.  [default: off]",
        ),
        click.option("--metrics-host", default="127.0.0.1", show_default=True, help="The address to answer on."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def check_probes(ctx: click.Context, *, fenced: bool, port: int | None) -> None:
    """Refuse options that would be ignored."""
    if port is not None and not fenced:
        raise click.UsageError("--metrics-port belongs to --fenced: add that, or drop it")
    if port is None and given(ctx, "metrics_host"):
        raise click.UsageError("--metrics-host belongs to --metrics-port: add that, or drop it")


class Watched:
    """While entered, the probes answer. Call `ready` once the contender competes, and `stopping` when it ends."""

    def __init__(self, contender: LeaderLock | LeaderElection, *, host: str = "", port: int | None = None) -> None:
        self._status = _status_of(contender)
        self._notifier = Notifier.from_environ()
        self._telling: asyncio.Task[None] | None = None
        self._server: ProbeServer | None = None
        self._metrics: ElectionMetrics | None = None
        if port is not None:
            assert isinstance(contender, LeaderElection), "check_probes has refused that"
            self._metrics = _metrics_of(contender)
            self._server = ProbeServer(contender, host=host, port=port, metrics=self._metrics.exposition)

    async def __aenter__(self) -> Self:
        if self._server is not None:
            try:
                await self._server.start()
            except ConfigurationError:
                await self._close()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stopping()
        await self._close()

    async def _close(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait([self._telling])
        if self._server is not None:
            await self._server.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._notifier is not None:
            self._notifier.close()

    def ready(self) -> None:
        """Report that the contender competes."""
        if self._notifier is not None and self._telling is None:
            self._notifier.ready(self._status())
            self._telling = asyncio.ensure_future(self._tell(self._notifier))

    def stopping(self) -> None:
        """Report that the contender no longer competes."""
        if self._notifier is not None:
            self._notifier.stopping()

    async def _tell(self, notifier: Notifier) -> None:
        """Send keep-alives from the loop, so that systemd watches the loop, and the status when it has changed."""
        said = ""
        every_s = min(STATUS_S, notifier.watchdog_s / 2) if notifier.watchdog_s else STATUS_S
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                if notifier.watchdog_s:
                    notifier.alive()
                if (status := self._status()) != said:
                    notifier.status(status)
                    said = status
                await asyncio.sleep(every_s)


def _metrics_of(election: LeaderElection) -> "ElectionMetrics":
    try:
        from pgleaderlock.metrics import ElectionMetrics  # noqa: PLC0415 - its extra may not be there.
    except ImportError as error:
        raise ConfigurationError(
            "--metrics-port needs prometheus-client: pip install 'pgleaderlock[cli,metrics]'"
        ) from error
    return ElectionMetrics(election)


def _status_of(contender: LeaderLock | LeaderElection) -> Callable[[], str]:
    """A function that returns one line for people: what this node does now."""
    if not isinstance(contender, LeaderElection):
        return lambda: "leading" if contender.is_leader else "standing by"

    def status() -> str:
        if contender.heartbeat_age_s() is None:
            return "no session with the database"
        led = [role for role in contender.roles if contender.gate(role).is_leader]
        if len(contender.roles) > 1:
            return f"leading {len(led)} of {len(contender.roles)} roles"
        return f"leading, epoch {contender.gate(led[0]).current_epoch}" if led else "standing by"

    return status
