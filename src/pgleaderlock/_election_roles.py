"""How an election makes its roles, and leads them without a database where it is told to.

Imports `_roles`, `_driver`, `_fsm`, `_work`, `gate`, `models` and what they stand on.
"""

import random
from collections.abc import Callable, Iterable
from typing import Protocol

from pgleaderlock._clock import Clock
from pgleaderlock._driver import Driver
from pgleaderlock._fsm import Input, Rules
from pgleaderlock._logging import StructuredLogger
from pgleaderlock._roles import Role
from pgleaderlock._work import Works
from pgleaderlock.gate import LeaderGate
from pgleaderlock.keys import KeyPair
from pgleaderlock.models import LeaderToken, LockState, RetryContext

__all__ = ["give_up_alone", "lead_alone", "make_role"]

STANDALONE_EPOCH = 0


class Emit(Protocol):
    """Who passes an event of a role on."""

    def __call__(self, event: str, /, *args: object) -> None: ...


class _NoDelay:
    """The election paces all its roles itself, by the tick: a role's own delay is none."""

    def next_delay_s(self, ctx: RetryContext) -> float | None:
        return 0.0


class _RoleEmitter:
    """What a role's driver emits, with the role's name in front; one error is told once, not once a role."""

    def __init__(self, name: str, emit: Emit, observed: Emit) -> None:
        self._name = name
        self._emit = emit
        self._observed = observed

    def emit(self, event: str, *args: object) -> None:
        if event in ("on_error", "on_stopped"):
            return  # the election tells of both itself
        if event == "on_state_change":
            self._observed("state_changed", self._name, *args)
        self._emit(event, self._name, *args)


def make_role(
    name: str,
    keys: KeyPair,
    gate: LeaderGate,
    *,
    clock: Clock,
    rng: random.Random,
    log: StructuredLogger,
    emit: Emit,
    observed: Emit,
) -> Role:
    driver = Driver(
        rules=Rules(auto_reacquire=True, grace=False),
        grace_s=None,
        strategy=_NoDelay(),
        clock=clock,
        rng=rng,
        log=log.bind(role=name),
        dispatcher=_RoleEmitter(name, emit, observed),
        left_leader=lambda: None,
    )
    return Role(name, keys, driver, gate, Works())


# --- Without a database


def lead_alone(roles: Iterable[Role], holder_identity: str, namespace: str, now: float) -> None:
    for role in roles:
        if role.drained:
            continue
        token = LeaderToken(role.name, STANDALONE_EPOCH, holder_identity, namespace)
        role.began_at = now
        role.gate.open(token, now, float("inf"))
        role.driver.feed(Input.START)
        role.driver.feed(Input.ACQUIRE_ATTEMPT)
        role.driver.feed(Input.ACQUIRE_SUCCEEDED)


def give_up_alone(role: Role) -> Callable[[], None]:
    """Let nothing new in. What is answered ends the term, to be called once the work has stopped."""
    role.gate.drain()
    role.driver.feed(Input.RELEASE_REQUESTED)

    def finish() -> None:
        if role.driver.state is LockState.RELEASING:  # and not folded up meanwhile
            role.gate.close("released")
            role.driver.feed(Input.RELEASE_SUCCEEDED)

    return finish
