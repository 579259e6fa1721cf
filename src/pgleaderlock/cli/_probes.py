"""What `run` and `exec` tell the world around them: probes and metrics over HTTP, readiness and life signs to systemd.

Imports click, `probes`, `election`, `_systemd`, `errors`, and inside, for `--metrics-port` alone, `metrics`. Once it
runs, nothing here may end a command: whoever does not listen does not hear.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click

from pgleaderlock._systemd import Notifier
from pgleaderlock.cli._fenced import given
from pgleaderlock.election import LeaderElection
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.probes import ProbeServer

if TYPE_CHECKING:
    from pgleaderlock.lock import LeaderLock
    from pgleaderlock.metrics import ElectionMetrics

__all__ = ["Watched", "check_probes", "probe_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])
# How soon `systemctl status` shows a change.
STATUS_S = 1.0


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
    """While entered, the probes answer. Say `ready` once it competes, and `stopping` when it ends."""

    def __init__(self, contender: "LeaderLock | LeaderElection", *, host: str = "", port: int | None = None) -> None:
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
        """It competes."""
        if self._notifier is not None and self._telling is None:
            self._notifier.ready(self._status())
            self._telling = asyncio.ensure_future(self._tell(self._notifier))

    def stopping(self) -> None:
        """It does not, any more."""
        if self._notifier is not None:
            self._notifier.stopping()

    async def _tell(self, notifier: Notifier) -> None:
        """Signs of life, from the very loop whose life is meant; and what it does, when that has changed."""
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


def _status_of(contender: "LeaderLock | LeaderElection") -> Callable[[], str]:
    """One line for people: what this node does now."""
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
