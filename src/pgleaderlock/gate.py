"""The acting gate: may this node act for this role, now?

Decided by the clock at the moment it is asked, never by "no error yet": a process that wakes from a long pause is
refused before its event loop has run. A gate opens when its election says so, closes by itself at its deadline, and
opens again when heartbeats resume in the same term. Any thread may ask; a forked child is refused until it starts the
election itself.

What it does not promise: a side effect that was already on its way when the gate closed. For writes into the same
database use the fence, which needs no clock at all.

Imports `fence`, `models`, `errors`, `_clock`, `_thread` and the standard library only. Knows nothing of sessions.
"""

import asyncio
import contextlib
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from pgleaderlock._clock import BOOT_CLOCK, Clock
from pgleaderlock._thread import settle
from pgleaderlock.errors import NotLeader
from pgleaderlock.fence import fenced
from pgleaderlock.models import LeaderToken

__all__ = ["LeaderGate"]

NEVER = float("inf")

_EXPLAINED = {
    "disabled": "leader election is switched off on this node",
    "vetoed": "the gate was disabled by this node itself: enable(token) lifts that",
    "draining": "leadership is being given up: no new work is let in",
    "never_led": "this node has not led the role yet",
    "lost": "this node has lost leadership of the role",
    "released": "this node has given leadership of the role up",
    "waiting": "this node leads, and waits until its predecessor can no longer act",
    "late_heartbeat": "no heartbeat was acknowledged in time, so another node may lead by now",
    "forked": "this process was forked from the one that made the gate, and has not started the election itself",
}


class _Opening(NamedTuple):
    """When the gate is open, and for whom. One immutable value, read once: no half of it can be stale."""

    opens_at: float
    deadline: float
    token: LeaderToken | None


_SHUT = _Opening(NEVER, -NEVER, None)


class LeaderGate:
    """One role's gate. `require_leader()` before each act; `acting()` around work that a drain should wait for."""

    def __init__(self, role: str, *, clock: Clock = BOOT_CLOCK) -> None:
        self.role = role
        self._clock = clock
        self._now = clock.now
        self._visible = _SHUT
        self._term = _SHUT
        self._closed_because = "never_led"
        self._held_shut: set[str] = set()
        self.lapses = 0
        """How often a heartbeat came after the deadline: the gate had shut by itself, and was opened again."""
        self._lock = threading.Lock()
        self._acting: dict[object, asyncio.Task[Any] | None] = {}  # None: in a thread without a loop
        self._blocked: Counter[str] = Counter()
        self._counting = threading.Lock()  # not the gate's own: `acting` asks while it holds that
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        _gates.add(self)

    # --- Asked by whoever acts

    @property
    def is_leader(self) -> bool:
        """May this node act now?"""
        opens_at, deadline, _ = self._visible
        return opens_at <= self._now() < deadline

    @property
    def shut_because(self) -> str | None:
        """Why this node must not act now, as `NotLeader.reason` says it; None while the gate is open."""
        return None if self.is_leader else self._refusal().reason

    @property
    def current_epoch(self) -> int | None:
        """The epoch of the term that this node is in, whether the gate is open or not; None when it leads nothing."""
        token = self._term.token
        return None if token is None else token.epoch

    @property
    def holder_identity(self) -> str | None:
        token = self._term.token
        return None if token is None else token.holder_identity

    def require_leader(self) -> LeaderToken:
        """The token of the current term, or `NotLeader` with the reason."""
        opens_at, deadline, token = self._visible
        if opens_at <= self._now() < deadline:
            return token  # type: ignore[return-value]  # an opening always has its token
        raise self._counted(self._refusal())

    def ensure_epoch(self, epoch: int) -> None:
        """Raise `NotLeader` unless the gate is open for this very term: the check just before the act."""
        token = self.require_leader()
        if token.epoch != epoch:
            raise self._counted(
                NotLeader(
                    self.role,
                    "epoch_changed",
                    f"epoch {epoch} of {self.role!r} is over: this node now leads epoch {token.epoch}; "
                    "begin the work anew",
                )
            )

    @property
    def blocked(self) -> Mapping[str, int]:
        """How often `require_leader` and `ensure_epoch` have refused, by reason, since the gate was made."""
        with self._counting:
            return dict(self._blocked)

    @contextlib.contextmanager
    def acting(self) -> Iterator[LeaderToken]:
        """Count a piece of work as in flight: a drain waits for it. Raises `NotLeader` instead of beginning."""
        mark, task = object(), _current_task()
        with self._lock:  # between the question and the count, no drain may begin
            token = self.require_leader()
            self._acting[mark] = task
        try:
            yield token
        finally:
            with self._lock:
                self._acting.pop(mark, None)  # a fork inside the block has emptied the child's
                self._wake()

    def fenced(self, conn: Any, **options: Any) -> Any:
        """`fenced(conn, token)` with the token of the open gate; `NotLeader` before anything is sent if it is shut."""
        return fenced(conn, self.require_leader(), **options)

    async def wait_open(self, timeout_s: float | None = None) -> bool:
        """True as soon as the gate is open; False when `timeout_s` is over first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: self.is_leader, self._next_opening)
        except TimeoutError:
            return False
        return True

    def disable(self) -> None:
        """Veto: nothing passes until `enable`. Leadership itself goes on."""
        self._hold_shut("vetoed", shut=True)

    def enable(self, token: LeaderToken) -> None:
        """Lift the veto, for the term of this token. Never opens a gate that is shut for another reason."""
        if token != self._term.token:
            raise NotLeader(
                self.role,
                "epoch_changed",
                f"epoch {token.epoch} of {self.role!r} is not the current one: nothing to lift",
            )
        self._hold_shut("vetoed", shut=False)

    @property
    def in_flight(self) -> int:
        """How many pieces of work are between the beginning and the end of `acting()`."""
        return len(self._acting)

    # --- Told by the election

    def open(self, token: LeaderToken, opens_at: float, deadline: float, *, draining: bool = False) -> None:
        """A new term. It may act from `opens_at` until `deadline`, unless it is to be given up before it has begun."""
        with self._lock:
            (self._held_shut.add if draining else self._held_shut.discard)("draining")
            self._term = _Opening(opens_at, deadline, token)
            self._publish()

    def renew(self, deadline: float) -> None:
        """A heartbeat was acknowledged. Never moves a deadline back, and never revives a term that is over."""
        with self._lock:
            opens_at, before, token = self._term
            if token is not None and deadline > before:
                self.lapses += opens_at < before <= self._now()
                self._term = _Opening(opens_at, deadline, token)
                self._publish()

    def close(self, reason: str = "lost") -> None:
        """The term is over."""
        with self._lock:
            self._term = _SHUT
            self._closed_because = reason
            self._held_shut.discard("draining")
            self._publish()

    def drain(self) -> None:
        """Let nothing new in; what is in flight goes on."""
        self._hold_shut("draining", shut=True)

    def cancel_acting(self, *, but: "asyncio.Task[Any] | None" = None) -> None:
        """The time of a drain is over: cancel the tasks inside `acting()`, but not the one that waits for the drain.

        What acts in a thread cannot be cancelled.
        """
        with self._lock:
            acting = [task for task in self._acting.values() if task is not None and task is not but]
        for task in acting:
            with contextlib.suppress(RuntimeError):  # that loop has been closed, and its tasks with it
                task.get_loop().call_soon_threadsafe(_cancel_once, task)

    def switch_off(self) -> None:
        """This node never acts for the role."""
        self._hold_shut("disabled", shut=True)

    @property
    def opens_at(self) -> float:
        return self._term.opens_at

    @property
    def deadline(self) -> float:
        return self._term.deadline

    @property
    def token(self) -> LeaderToken | None:
        """The token of the current term, open or not."""
        return self._term.token

    async def wait_idle(self) -> None:
        """Return once nothing is in flight."""
        await self._until(lambda: not self._acting, lambda: NEVER)

    async def wait_closed(self, token: LeaderToken) -> None:
        """Return once the gate is not open for this term any more."""
        await self._until(lambda: not (self.is_leader and self._visible.token is token), lambda: self._visible.deadline)

    async def wait_over(self, token: LeaderToken) -> None:
        """Return once this term is over, whether its gate was open or not."""
        await self._until(lambda: self._term.token is not token, lambda: NEVER)

    def shut_in_child(self) -> None:
        """In a forked child: the term, its work and its waits are the parent's."""
        # The parent's may have been held by another thread at the fork.
        self._lock, self._counting = threading.Lock(), threading.Lock()
        self._held_shut = self._held_shut & {"disabled", "vetoed"} | {"forked"}
        self._visible = _SHUT
        self._waiting = []
        self._acting = {}

    def begin_anew(self) -> None:
        """The election is started in this process: after a fork, what the gate knows of the parent's term is void."""
        with self._lock:
            if "forked" in self._held_shut:
                self._held_shut.discard("forked")
                self._term, self._closed_because = _SHUT, "never_led"
                self._publish()

    # --- Inside

    def _hold_shut(self, why: str, *, shut: bool) -> None:
        with self._lock:
            (self._held_shut.add if shut else self._held_shut.discard)(why)
            self._publish()

    def _publish(self) -> None:
        self._visible = _SHUT if self._held_shut else self._term
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            with contextlib.suppress(RuntimeError):  # that loop has been closed: nobody waits there any more
                loop.call_soon_threadsafe(settle, future)

    def _next_opening(self) -> float:
        opens_at, deadline, _ = self._visible
        return opens_at if opens_at < deadline else NEVER

    async def _until(self, condition: Callable[[], bool], moment: Callable[[], float]) -> None:
        """Return once the condition holds. Looks again at every change, and when the moment has come on the clock.

        Registered before it looks: another thread may change the gate in between.
        """
        loop = asyncio.get_running_loop()
        while True:
            changed: asyncio.Future[None] = loop.create_future()
            with self._lock:
                self._waiting.append((loop, changed))
            timer: asyncio.Future[None] | None = None
            try:
                if condition():
                    return
                left_s = moment() - self._now()
                if left_s < NEVER:
                    timer = asyncio.ensure_future(self._clock.sleep(max(0.0, left_s)))
                waited = [changed] if timer is None else [changed, timer]
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if timer is not None:
                    timer.cancel()
                changed.cancel()
                with self._lock:
                    self._waiting = [entry for entry in self._waiting if entry[1] is not changed]

    def _refusal(self) -> NotLeader:
        now = self._now()
        opens_at, deadline, token = self._term
        for why in ("forked", "disabled", "vetoed", "draining"):
            if why in self._held_shut:
                return self._refused(why)
        if token is None:
            return self._refused(self._closed_because)
        return self._refused("late_heartbeat" if now >= deadline else "waiting" if now < opens_at else "late_heartbeat")

    def _counted(self, refusal: NotLeader) -> NotLeader:
        with self._counting:
            self._blocked[refusal.reason] += 1
        return refusal

    def _refused(self, why: str) -> NotLeader:
        return NotLeader(self.role, why, f"must not act as leader of {self.role!r}: {_EXPLAINED.get(why, why)}")


def _current_task() -> "asyncio.Task[Any] | None":
    """None in a thread without a loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _cancel_once(task: "asyncio.Task[Any]") -> None:
    """A second cancellation would strike the clean-up that the first one has begun."""
    if not task.cancelling():
        task.cancel()


_gates: "weakref.WeakSet[LeaderGate]" = weakref.WeakSet()


def _shut_in_child() -> None:
    """In a forked child: whatever the parent may do, the child may not."""
    for gate in list(_gates):
        gate.shut_in_child()


os.register_at_fork(after_in_child=_shut_in_child)
