"""The events of an election for observers: one frozen record per kind of event, and one hook for each.

Inside, an election uses records only (`Observers.notify`), so mypy finds a wrong kind or field. Outside, an observer is
a class whose hooks are called with the fields of a record. Only `_call_hook` maps one to the other: `ElectionObserver`
has no method besides its hooks, so none can clash with a user's method.

It is independent of the metrics, which are one observer among others.
"""

import re
from asyncio import CancelledError
from dataclasses import dataclass
from typing import Literal, assert_never

from pgleaderlock._base.logging import StructuredLogger
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.models import LockState

__all__ = ["AttemptResult", "ElectionObserver", "Event", "LossReason", "Observers"]

AttemptResult = Literal["won", "held", "busy", "error"]
LossReason = Literal["released", "lost", "superseded"]


class ElectionObserver:
    """Override the hooks that you need, and register with `LeaderElection.observe`. Here, every hook does nothing.

    Hooks are called on the thread of the engine's loop, in order. They must be quick, because the heartbeat waits for
    them. An exception of a hook is logged and dropped.
    """

    def role_added(self, role: str) -> None:
        """The election has this role, from its beginning or from now on."""

    def role_removed(self, role: str) -> None:
        """The election no longer has this role. No other event of the role follows."""

    def attempted(self, role: str, result: AttemptResult) -> None:
        """One try: `won`, `held` by another node, `busy` (won, but older fenced work has not ended), or `error`."""

    def acquired(self, role: str, epoch: int, latency_s: float, from_other: bool) -> None:
        """A term of this node has begun, `latency_s` after the send of the try that won it.

        `from_other`: the previous term was another node's and was lost or evicted, not released: a failover.
        """

    def failed_over(self, role: str, epoch: int, failover_s: float) -> None:
        """This node may act for the first time in its term; before that, no node could act for `failover_s`.

        The ledger measures it, as in the history: from the last moment at which a previous leader could act, whether
        that one was lost or released the role. So the hook is called a moment after the gate has opened, and not for
        the first term of a role.
        """

    def lost(self, role: str, epoch: int, reason: LossReason) -> None:
        """A term of this node is over: `released` on purpose, `lost`, or `superseded` by an operator."""

    def work_began(self, role: str, epoch: int) -> None:
        """A work of `lead` has been started in the term of this epoch."""

    def work_ended(self, role: str, epoch: int, error: BaseException | None) -> None:
        """The work has ended. `error`: its exception; None if it returned, or was stopped because its term was over."""

    def work_failed(self, role: str, epoch: int, error: BaseException) -> None:
        """The work of `lead` has failed with this exception in the term of this epoch."""

    def state_changed(self, role: str, old: LockState, new: LockState) -> None:
        """The state of this node for the role has changed."""

    def beaten(self, took_s: float) -> None:
        """A heartbeat of the session was acknowledged."""

    def session_lost(self, error: Exception) -> None:
        """The session has ended, and every term of it."""

    def drain_began(self, role: str) -> None:
        """This node gives the role up on purpose: it refuses new work."""

    def drain_ended(self, role: str, clean: bool) -> None:
        """The role was given up. Not clean: work was still in flight, this node was still waiting for its predecessor,
        or the role was lost."""


@dataclass(frozen=True, slots=True)
class RoleAdded:
    role: str


@dataclass(frozen=True, slots=True)
class RoleRemoved:
    role: str


@dataclass(frozen=True, slots=True)
class Attempted:
    role: str
    result: AttemptResult


@dataclass(frozen=True, slots=True)
class Acquired:
    role: str
    epoch: int
    latency_s: float
    from_other: bool


@dataclass(frozen=True, slots=True)
class FailedOver:
    role: str
    epoch: int
    failover_s: float


@dataclass(frozen=True, slots=True)
class Lost:
    role: str
    epoch: int
    reason: LossReason


@dataclass(frozen=True, slots=True)
class WorkBegan:
    role: str
    epoch: int


@dataclass(frozen=True, slots=True)
class WorkEnded:
    role: str
    epoch: int
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class WorkFailed:
    role: str
    epoch: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class StateChanged:
    role: str
    old: LockState
    new: LockState


@dataclass(frozen=True, slots=True)
class Beaten:
    took_s: float


@dataclass(frozen=True, slots=True)
class SessionLost:
    error: Exception


@dataclass(frozen=True, slots=True)
class DrainBegan:
    role: str


@dataclass(frozen=True, slots=True)
class DrainEnded:
    role: str
    clean: bool


Event = (
    Attempted
    | Beaten
    | StateChanged
    | Acquired
    | FailedOver
    | Lost
    | WorkBegan
    | WorkEnded
    | WorkFailed
    | SessionLost
    | DrainBegan
    | DrainEnded
    | RoleAdded
    | RoleRemoved
)


class Observers:
    """The observers of one election, called in the order of their registration. A failing one does not affect the
    others."""

    def __init__(self, log: StructuredLogger) -> None:
        self._log = log
        self._all: tuple[ElectionObserver, ...] = ()  # replaced, never changed: another thread may be iterating

    def log_to(self, log: StructuredLogger) -> None:
        self._log = log

    def add(self, observer: ElectionObserver) -> None:
        if not isinstance(observer, ElectionObserver):
            raise ConfigurationError(
                f"observe takes an ElectionObserver, not {type(observer).__name__}: derive yours from it"
            )
        self._all = (*self._all, observer)

    def notify(self, event: Event) -> None:
        for observer in self._all:
            self.notify_one(observer, event)

    def notify_one(self, observer: ElectionObserver, event: Event) -> None:
        try:
            _call_hook(observer, event)
        except (Exception, CancelledError) as error:  # nothing is awaited here, so the hook itself has raised it
            hook = re.sub(r"\B(?=[A-Z])", "_", type(event).__name__).lower()
            self._log.error("observer_failed", exc_info=error, hook=hook, observer=type(observer).__name__, error=error)


def _call_hook(observer: ElectionObserver, event: Event) -> None:  # noqa: C901, PLR0912 - one case per hook
    match event:
        case Attempted(role, result):
            observer.attempted(role, result)
        case Beaten(took_s):
            observer.beaten(took_s)
        case StateChanged(role, old, new):
            observer.state_changed(role, old, new)
        case Acquired(role, epoch, latency_s, from_other):
            observer.acquired(role, epoch, latency_s, from_other)
        case FailedOver(role, epoch, failover_s):
            observer.failed_over(role, epoch, failover_s)
        case Lost(role, epoch, reason):
            observer.lost(role, epoch, reason)
        case WorkBegan(role, epoch):
            observer.work_began(role, epoch)
        case WorkEnded(role, epoch, outcome):
            observer.work_ended(role, epoch, outcome)
        case WorkFailed(role, epoch, failure):
            observer.work_failed(role, epoch, failure)
        case SessionLost(error):
            observer.session_lost(error)
        case DrainBegan(role):
            observer.drain_began(role)
        case DrainEnded(role, clean):
            observer.drain_ended(role, clean)
        case RoleAdded(role):
            observer.role_added(role)
        case RoleRemoved(role):
            observer.role_removed(role)
        case _:
            assert_never(event)
