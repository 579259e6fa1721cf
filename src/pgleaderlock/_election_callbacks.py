"""How a `LeaderElection`'s callbacks are registered: like a lock's, with the role in front.

Imports `_callbacks`, `models` and the standard library only.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from pgleaderlock._callbacks import CallbackRegistry
from pgleaderlock.models import LockState

__all__ = ["ElectionCallbacks"]

RoleCallback = Callable[[str], Awaitable[None] | None]
RoleStateCallback = Callable[[str, LockState, LockState], Awaitable[None] | None]
FailureCallback = Callable[[Exception], Awaitable[None] | None]
EndCallback = Callable[[], Awaitable[None] | None]
RoleCallbackT = TypeVar("RoleCallbackT", bound=RoleCallback)
RoleStateCallbackT = TypeVar("RoleStateCallbackT", bound=RoleStateCallback)
FailureCallbackT = TypeVar("FailureCallbackT", bound=FailureCallback)
EndCallbackT = TypeVar("EndCallbackT", bound=EndCallback)


class ElectionCallbacks:
    """The registration methods of an election; each returns the function unchanged, so that all serve as decorators."""

    def __init__(self) -> None:
        self._registry = CallbackRegistry()

    def on_acquired(self, fn: RoleCallbackT) -> RoleCallbackT:
        """This node leads the role's lock; its gate may still be waiting."""
        self._registry.add("on_acquired", fn)
        return fn

    def on_released(self, fn: RoleCallbackT) -> RoleCallbackT:
        """The role was given up on purpose."""
        self._registry.add("on_released", fn)
        return fn

    def on_lost(self, fn: RoleCallbackT) -> RoleCallbackT:
        """The role was lost."""
        self._registry.add("on_lost", fn)
        return fn

    def on_state_change(self, fn: RoleStateCallbackT) -> RoleStateCallbackT:
        """`(role, from_state, to_state)`."""
        self._registry.add("on_state_change", fn)
        return fn

    def on_error(self, fn: FailureCallbackT) -> FailureCallbackT:
        """The database failed, or a callback did: once for each error, whatever the number of roles."""
        self._registry.add("on_error", fn)
        return fn

    def on_stopped(self, fn: EndCallbackT) -> EndCallbackT:
        """The election has stopped. The last callback of a run."""
        self._registry.add("on_stopped", fn)
        return fn
