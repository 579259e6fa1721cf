"""The acting gate: may this node act for this role, now?

The gate compares the clock with its deadline at each call, and never relies on "no error yet": a process that wakes
from a long pause is refused before its event loop has run. The election opens a gate; the gate shuts by itself at its
deadline, and opens again when heartbeats resume in the same term. Any thread may ask; a forked child is refused until
it starts the election itself.

What it does not promise: a side effect that was already under way when the gate shut. For writes into the same database
use the fence, which needs no clock. `Watchdog` ends a process that goes on working behind a shut gate.

It is independent of sessions.
"""

import asyncio
import contextlib
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from pgleaderlock._base.aio import cancel_once, first_of, settle
from pgleaderlock._base.clock import BOOT_CLOCK, Clock
from pgleaderlock._base.logging import get_logger
from pgleaderlock.errors import NotLeader
from pgleaderlock.fence import fenced
from pgleaderlock.models import LeaderToken

__all__ = ["EXIT_CODE", "LeaderGate", "Watchdog"]

NEVER = float("inf")
EXIT_CODE = 70  # EX_SOFTWARE
# The watchdog checks this many times within its limit, and at least once per LOOK_S_MAX.
LOOKS = 4
LOOK_S_MAX = 1.0
# The most gaps of one term that are kept until the ledger has recorded them.
GAPS_MAX = 100

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
REASONS = (*_EXPLAINED, "epoch_changed")
"""Every `NotLeader.reason` that a gate gives."""


class _Opening(NamedTuple):
    """When the gate is open, and in which term. One immutable value that is read at once, so its parts always match."""

    opens_at: float
    deadline: float
    token: LeaderToken | None


_SHUT = _Opening(NEVER, -NEVER, None)


class Gap(NamedTuple):
    """A period within a term in which the gate was shut, and why; on the gate's clock."""

    from_at: float
    to_at: float
    why: str


class GateRecord(NamedTuple):
    """When the leader of the current term could act, on the gate's clock."""

    opened_at: float | None
    """When the gate first opened; None if it has not."""
    shut_at: float | None
    """The last moment at which the gate was open, if it is shut now."""
    gaps: tuple[Gap, ...]
    """The periods in between in which the gate was shut and that the ledger has not recorded yet."""


class LeaderGate:
    """One role's gate, got from `LeaderElection.gate(role)`; it may be asked from any thread.

    Call `require_leader()` before each act, and use `acting()` around work that a drain should wait for.
    """

    def __init__(self, role: str, *, clock: Clock = BOOT_CLOCK) -> None:
        """The gate is shut until its election opens it. `clock` must count through a suspend."""
        self.role = role
        self._clock = clock
        self._now = clock.now
        self._visible = _SHUT
        self._visible_since = NEVER
        self._term = _SHUT
        self._closed_because = "never_led"
        self._held_shut: set[str] = set()
        self.lapses = 0
        """How often the gate has shut at its deadline and was opened again by a later heartbeat."""
        self._opened_at: float | None = None
        self._acted_until: float | None = None
        self._gaps: list[Gap] = []
        self._lock = threading.Lock()
        self._acting: dict[object, asyncio.Task[Any] | None] = {}  # None: in a thread without a loop
        self._blocked: Counter[str] = Counter()
        self._counting = threading.Lock()  # separate from `_lock`, which `acting` holds while it asks
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        _gates.add(self)

    # --- Asked by the application

    @property
    def is_leader(self) -> bool:
        """May this node act now?"""
        opens_at, deadline, _ = self._visible
        return opens_at <= self._now() < deadline

    @property
    def shut_because(self) -> str | None:
        """Why this node must not act now, in the words of `NotLeader.reason`; None while the gate is open."""
        return None if self.is_leader else self._refusal().reason

    @property
    def current_epoch(self) -> int | None:
        """The epoch of this node's term, whether the gate is open or not; None outside a term."""
        token = self._term.token
        return None if token is None else token.epoch

    @property
    def holder_identity(self) -> str | None:
        """This node's identity in the ledger; None outside a term."""
        token = self._term.token
        return None if token is None else token.holder_identity

    def require_leader(self) -> LeaderToken:
        """The token of the current term, or `NotLeader` with the reason. Takes less than a microsecond."""
        opens_at, deadline, token = self._visible
        if opens_at <= self._now() < deadline:
            return token  # type: ignore[return-value]  # an opening always has its token
        raise self._counted(self._refusal())

    def ensure_epoch(self, epoch: int) -> None:
        """Raise `NotLeader` unless the gate is open for the term of this epoch: the check just before the act."""
        token = self.require_leader()
        if token.epoch != epoch:
            raise self._counted(
                NotLeader(
                    self.role,
                    "epoch_changed",
                    f"epoch {epoch} of {self.role!r} is over: this node now leads epoch {token.epoch}; "
                    "begin the work anew",
                    epoch=epoch,
                )
            )

    @property
    def blocked(self) -> Mapping[str, int]:
        """How often `require_leader` and `ensure_epoch` have refused, by reason, since the gate was created."""
        with self._counting:
            return dict(self._blocked)

    @contextlib.contextmanager
    def acting(self) -> Iterator[LeaderToken]:
        """Count the block as work in flight, which a drain waits for. Raises `NotLeader` if the gate is shut."""
        mark, task = object(), _current_task()
        with self._lock:  # between the check and the count, no drain may begin
            token = self.require_leader()
            self._acting[mark] = task
        try:
            yield token
        finally:
            with self._lock:
                self._acting.pop(mark, None)  # missing in a child that was forked inside the block
                self._wake()

    def fenced(self, conn: Any, **options: Any) -> Any:
        """`pgleaderlock.fenced(conn, token, **options)` with the token of the open gate; `NotLeader` if it is shut."""
        return fenced(conn, self.require_leader(), **options)

    async def wait_open(self, timeout_s: float | None = None) -> bool:
        """True as soon as the gate is open; False after `timeout_s` seconds. None waits without a limit."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: self.is_leader, self._next_opening)
        except TimeoutError:
            return False
        return True

    def disable(self) -> None:
        """Veto: the gate is shut until `enable`. Leadership itself goes on."""
        self._hold_shut("vetoed", shut=True)

    def enable(self, token: LeaderToken) -> None:
        """Lift the veto, for the term of this token. Never opens a gate that is shut for another reason."""
        if token != self._term.token:
            raise NotLeader(
                self.role,
                "epoch_changed",
                f"epoch {token.epoch} of {self.role!r} is not the current one: nothing to lift",
                epoch=token.epoch,
            )
        self._hold_shut("vetoed", shut=False)

    @property
    def in_flight(self) -> int:
        """How many `acting()` blocks have begun and not ended."""
        return len(self._acting)

    # --- Called by the election

    def open(self, token: LeaderToken, opens_at: float, deadline: float, *, draining: bool = False) -> None:
        """A new term. It may act from `opens_at` until `deadline` on the gate's clock, unless it is being drained."""
        with self._lock:
            (self._held_shut.add if draining else self._held_shut.discard)("draining")
            self._term = _Opening(opens_at, deadline, token)
            self._opened_at = self._acted_until = None
            self._gaps = []
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
        """Refuse new work; work in flight goes on."""
        self._hold_shut("draining", shut=True)

    def cancel_acting(self, *, but: "asyncio.Task[Any] | None" = None) -> None:
        """The timeout of a drain has passed: cancel the tasks inside `acting()`, but not the task that waits for the
        drain.

        Work in a thread cannot be cancelled.
        """
        with self._lock:
            acting = [task for task in self._acting.values() if task is not None and task is not but]
        for task in acting:
            with contextlib.suppress(RuntimeError):  # that loop is closed, so its tasks have ended
                task.get_loop().call_soon_threadsafe(cancel_once, task)

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

    def record(self) -> GateRecord:
        """When the current term could act, up to now."""
        with self._lock:
            now, visible = self._now(), self._visible
            self._note(now)
            shut = not visible.opens_at <= now < visible.deadline
            return GateRecord(self._opened_at, self._acted_until if shut else None, tuple(self._gaps))

    @property
    def untold(self) -> bool:
        """Are there gaps that the ledger has not recorded yet?"""
        return bool(self._gaps)

    def told(self, gaps: Collection[Gap]) -> None:
        """The ledger has recorded these gaps."""
        with self._lock:
            self._gaps = [gap for gap in self._gaps if gap not in gaps]

    async def wait_idle(self) -> None:
        """Return once no work is in flight."""
        await self._until(lambda: not self._acting, lambda: NEVER)

    async def wait_closed(self, token: LeaderToken) -> None:
        """Return once the gate is not open for this term any more."""
        await self._until(lambda: not (self.is_leader and self._visible.token is token), lambda: self._visible.deadline)

    async def wait_over(self, token: LeaderToken) -> None:
        """Return once this term is over, whether its gate was open or not."""
        await self._until(lambda: self._term.token is not token, lambda: NEVER)

    def shut_in_child(self) -> None:
        """In a forked child: the term, its work and its waits are the parent's."""
        # Another thread may have held the parent's locks at the fork.
        self._lock, self._counting = threading.Lock(), threading.Lock()
        self._held_shut = self._held_shut & {"disabled", "vetoed"} | {"forked"}
        self._visible = _SHUT
        self._waiting = []
        self._acting = {}

    def begin_anew(self) -> None:
        """The election is started in this process: after a fork, forget the parent's term."""
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
        was, now = self._visible, self._now()
        if was.token is self._term.token:
            self._note(now)
        self._visible, self._visible_since = _SHUT if self._held_shut else self._term, now
        opens_at, deadline, _ = self._visible
        if opens_at <= now < deadline and self._acted_until is not None and self._acted_until < now:
            self._gaps.append(Gap(self._acted_until, now, "vetoed" if was.token is None else "late_heartbeat"))
            self._gaps = self._gaps[-GAPS_MAX:]
        self._wake()

    def _note(self, now: float) -> None:
        """Update from and until when the term could act, by the opening that is visible."""
        opens_at, deadline, _ = self._visible
        from_at = max(opens_at, self._visible_since)  # a veto may have been lifted after the deadline
        if from_at <= now and from_at < deadline:
            self._opened_at = from_at if self._opened_at is None else self._opened_at
            self._acted_until = min(now, deadline)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            with contextlib.suppress(RuntimeError):  # that loop is closed, so no task waits there
                loop.call_soon_threadsafe(settle, future)

    def _next_opening(self) -> float:
        opens_at, deadline, _ = self._visible
        return opens_at if opens_at < deadline else NEVER

    async def _until(self, condition: Callable[[], bool], moment: Callable[[], float]) -> None:
        """Return once the condition holds. Checks it at every change of the gate, and at `moment()` on the clock.

        It registers for changes before each check, because another thread may change the gate in between.
        """
        loop = asyncio.get_running_loop()
        while True:
            changed: asyncio.Future[None] = loop.create_future()
            with self._lock:
                self._waiting.append((loop, changed))
            try:
                if condition():
                    return
                left_s = moment() - self._now()
                timers = [self._clock.sleep(max(0.0, left_s))] if left_s < NEVER else []
                await first_of(changed, *timers)
            finally:
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
        return self._refused("waiting" if now < opens_at and now < deadline else "late_heartbeat")

    def _counted(self, refusal: NotLeader) -> NotLeader:
        with self._counting:
            self._blocked[refusal.reason] += 1
        return refusal

    def _refused(self, why: str) -> NotLeader:
        text = f"must not act as leader of {self.role!r}: {_EXPLAINED.get(why, why)}"
        return NotLeader(self.role, why, text, epoch=self.current_epoch)


def _current_task() -> "asyncio.Task[Any] | None":
    """None in a thread without a loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


_gates: "weakref.WeakSet[LeaderGate]" = weakref.WeakSet()


def _shut_in_child() -> None:
    """The parent may go on acting; the child may not act at all."""
    for gate in list(_gates):
        gate.shut_in_child()


os.register_at_fork(after_in_child=_shut_in_child)


class Watchdog:
    """Ends the process once a gate has been shut for `after_s` seconds while work behind it goes on.

    It is the last resort against a node that does not notice that it no longer leads. It runs in a separate thread,
    because the event loop itself may be stuck.
    """

    def __init__(self, gates: Callable[[], Collection[LeaderGate]], after_s: float, clock: Clock) -> None:
        self._gates = gates
        self._after_s = after_s
        self._clock = clock
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="pgleaderlock watchdog", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        shut_since: dict[LeaderGate, float] = {}
        while not self._closed.wait(min(self._after_s / LOOKS, LOOK_S_MAX)):
            now = self._clock.now()
            for gate in self._gates():
                if gate.is_leader or not gate.in_flight:
                    shut_since.pop(gate, None)
                elif now - shut_since.setdefault(gate, now) >= self._after_s:
                    get_logger("pgleaderlock").error("hard_stop", role=gate.role, in_flight=gate.in_flight)
                    os._exit(EXIT_CODE)
