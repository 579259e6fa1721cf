"""What an election tells those who measure it: one frozen record per kind of event, and one hook for each.

Inside, an election speaks in records only (`Observers.notify`), so mypy sees a wrong kind or field. Outside, an
observer is a class whose hooks are called with a record's fields. The two meet in `_call_hook`, and nowhere else:
`ElectionObserver` has no method beside its hooks, so none can clash with one of a user's own.

Knows nothing of metrics: they are one observer among others.
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
    """Override the hooks that you need, and register with `LeaderElection.observe`. Every hook does nothing here.

    Hooks are called on the thread of the engine's loop, in order. They must be quick: the heartbeat waits for them.
    What a hook raises is logged and dropped.
    """

    def role_added(self, role: str) -> None:
        """The election has this role: from its beginning, or from now on."""

    def role_removed(self, role: str) -> None:
        """The election no longer has this role. No other event of the role follows."""

    def attempted(self, role: str, result: AttemptResult) -> None:
        """One try: `won`, `held` by another node, `busy` (won, but older fenced work has not ended), or `error`."""

    def acquired(self, role: str, epoch: int, latency_s: float, from_other: bool) -> None:
        """A term of this node has begun, `latency_s` after the send of the try that won it.

        `from_other`: the term before was another node's and was lost or evicted, not given up. A failover.
        """

    def failed_over(self, role: str, epoch: int, failover_s: float) -> None:
        """This node could act for the first time in its term, and before that nobody could for so long.

        By the ledger, as the history counts it, and a moment later: from the last moment at which a leader before could
        act, whether it was lost or gave the role up. Not for the first term of a role.
        """

    def lost(self, role: str, epoch: int, reason: LossReason) -> None:
        """A term of this node is over: `released` on purpose, `lost`, or `superseded` by an operator."""

    def work_began(self, role: str, epoch: int) -> None:
        """A work of `lead` has been started in the term of this epoch."""

    def work_ended(self, role: str, epoch: int, error: BaseException | None) -> None:
        """It has ended. `error`: what it raised; None if it returned, or was stopped because its term was over."""

    def work_failed(self, role: str, epoch: int, error: BaseException) -> None:
        """The work of `lead` has raised this in the term of this epoch."""

    def state_changed(self, role: str, old: LockState, new: LockState) -> None:
        """Where this node stands with the role's lock."""

    def beaten(self, took_s: float) -> None:
        """A heartbeat of the session was acknowledged."""

    def session_lost(self, error: Exception) -> None:
        """The session has ended, and every term of it."""

    def drain_began(self, role: str) -> None:
        """The role is being given up on purpose: no new work is let in."""

    def drain_ended(self, role: str, clean: bool) -> None:
        """It was given up. Not clean: work was in flight, the wait for a predecessor was not over, or it was lost."""


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
    """The observers of one election, told in the order of their registration. One that fails disturbs no other."""

    def __init__(self, log: StructuredLogger) -> None:
        self._log = log
        self._all: tuple[ElectionObserver, ...] = ()  # replaced, never changed: another thread may be telling them

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
        except (Exception, CancelledError) as error:  # the latter is its own: nothing is awaited here
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
