"""`LeaderElection` and its gates for threads: those of `pgleaderlock.election`, driven on the background loop."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from pgleaderlock import election as aio
from pgleaderlock._election.settings import Hold
from pgleaderlock._pg.conninfo import Dsn
from pgleaderlock.config import Config
from pgleaderlock.election import ElectionOptions
from pgleaderlock.errors import LockError
from pgleaderlock.gate import LeaderGate as AioGate
from pgleaderlock.models import LeaderStateChanged, LeaderToken, LockState
from pgleaderlock.observer import ElectionObserver
from pgleaderlock.sync import background
from pgleaderlock.sync.leading import Driven, lead_here

__all__ = ["LeaderElection", "LeaderGate"]

T = TypeVar("T")
CallbackT = TypeVar("CallbackT", bound=Callable[..., object])


class LeaderGate:
    """One role's gate, got from `LeaderElection.gate(role)`. Any thread may ask it; the clock decides the answer."""

    def __init__(self, gate: AioGate) -> None:
        self.aio = gate
        """The same gate for code on an event loop, whose `wait_open` is awaited."""
        self.role = gate.role
        self.require_leader = gate.require_leader
        self.ensure_epoch = gate.ensure_epoch
        self.acting = gate.acting
        self.fenced = gate.fenced
        self.disable = gate.disable
        self.enable = gate.enable

    @property
    def is_leader(self) -> bool:
        """May this process act now?"""
        return self.aio.is_leader

    @property
    def shut_because(self) -> str | None:
        """Why this process must not act now, in the words of `NotLeader.reason`; None while the gate is open."""
        return self.aio.shut_because

    @property
    def current_epoch(self) -> int | None:
        """The epoch of the term that this process is in, whether the gate is open or not."""
        return self.aio.current_epoch

    @property
    def holder_identity(self) -> str | None:
        """This process's identity in the ledger; None outside a term."""
        return self.aio.holder_identity

    @property
    def blocked(self) -> Mapping[str, int]:
        """How often `require_leader` and `ensure_epoch` have refused, by reason."""
        return self.aio.blocked

    @property
    def in_flight(self) -> int:
        """How many `acting()` blocks have begun and not ended."""
        return self.aio.in_flight

    def wait_open(self, timeout_s: float | None = None) -> bool:
        """True as soon as the gate is open; False after `timeout_s` seconds. None waits without a limit."""
        return background.call(lambda: self.aio.wait_open(timeout_s))


class LeaderElection(Driven):
    """Competes for any number of roles; each is led by at most one process. Any thread may use it.

    The names, errors and settings are those of `pgleaderlock.LeaderElection`, whose docstrings say what they promise.
    """

    _aio = aio.LeaderElection

    def __init__(
        self, dsn: Dsn, roles: str | Iterable[str] | Mapping[str, int], **options: Unpack[ElectionOptions]
    ) -> None:
        """Check the settings. Nothing is connected before `start`. Options: those of `pgleaderlock.LeaderElection`."""
        self._use(self._aio(dsn, roles, **options))

    def _use(self, election: aio.LeaderElection) -> None:
        super().__init__(node=election.node_id)
        self._election = election

    @classmethod
    def _around(cls, election: aio.LeaderElection) -> Self:
        made = cls.__new__(cls)
        made._use(election)  # noqa: SLF001 - our own class
        return made

    @classmethod
    def from_env(cls, role: str | None = None, environ: Mapping[str, str] | None = None, **options: Any) -> Self:
        """An election of one role from the environment. Keywords override it."""
        return cls._around(cls._aio.from_env(role, environ, **options))

    @classmethod
    def from_config(cls, config: Config | str | Path | None = None, **options: Any) -> Self:
        """An election of every role of a configuration. Keywords override it."""
        return cls._around(cls._aio.from_config(config, **options))

    # --- Lifecycle

    def start(self) -> None:
        """Start to compete, in the background. Does nothing if running already. May raise `SchemaError`."""
        background.close_at_exit(self._election)
        background.call(self._election.start)

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Drain and release every role, and stop. Called from a callback or a work, it only makes the request."""
        self._end(lambda: self._shutdown(timeout_s))

    async def _shutdown(self, timeout_s: float | None) -> None:
        try:
            await self._election.shutdown(timeout_s)
        finally:
            if self._callbacks is not None:
                self._callbacks.stop()

    # --- Work

    def lead(self, role: str, work: Callable[[LeaderToken, threading.Event], T], **options: Any) -> T | None:
        """Run `work(token, stop)` in this thread whenever the role's gate is open; return what it returns.

        `stop` is set as soon as the gate shuts; the release waits until `work` has returned. `work` is called again
        when the gate opens again. The options are those of `pgleaderlock.LeaderElection.lead`.
        """
        return lead_here(self, lambda relay: self._election.lead(role, relay, **options), work)

    # --- Giving up

    def step_down(self, role: str, timeout_s: float | None = None) -> None:
        """Give up one role, let another node go first, and compete again. Does not wait in a callback or a work."""
        self._end(lambda: self._election.step_down(role, timeout_s))

    def drain(self, role: str | None = None, timeout_s: float | None = None) -> bool:
        """Give up one role, or all of them with None, and do not compete again until `resume`.

        True if the release was clean. In a callback or a work it only makes the request, and returns False.
        """
        return bool(self._end(lambda: self._election.drain(role, timeout_s)))

    def resume(self, role: str | None = None) -> None:
        """Compete again for drained roles: one, or all of them with None."""
        self._end(lambda: self._election.resume(role))

    # --- Roles

    def add_role(self, name: str, key: int | None = None) -> None:
        """Start to compete for one more role."""
        background.call(lambda: self._election.add_role(name, key))

    def remove_role(self, name: str, timeout_s: float | None = None) -> None:
        """Drain one role as `drain` does, and forget it."""
        if background.inside(self):
            raise LockError("remove_role waits for the work of the role: call it outside of callbacks and works")
        background.call(lambda: self._election.remove_role(name, timeout_s))

    # --- State

    @property
    def roles(self) -> tuple[str, ...]:
        return self._election.roles

    @property
    def node_id(self) -> str:
        return self._election.node_id

    @property
    def namespace(self) -> str:
        return self._election.namespace

    @property
    def hold(self) -> Hold:
        return self._election.hold

    @property
    def last_error(self) -> Exception | None:
        """Why the session was last lost or not obtained; None if nothing has gone wrong since `start`."""
        return self._election.last_error

    def state(self, role: str) -> LockState:
        """The state of this process for the role."""
        return self._election.state(role)

    def gate(self, role: str) -> LeaderGate:
        """The role's gate, which any thread may ask whether this process may act now."""
        return LeaderGate(self._election.gate(role))

    def leader(self, role: str) -> aio.LeaderInfo | None:
        """The role's leader, as this process last saw it; None if no node leads or nothing was seen yet."""
        return self._election.leader(role)

    def tenure_s(self, role: str) -> float | None:
        """For how many seconds this process's term has lasted; None outside a term."""
        return self._election.tenure_s(role)

    def heartbeat_age_s(self) -> float | None:
        """How many seconds ago the last acknowledged heartbeat was sent; None without a session."""
        return self._election.heartbeat_age_s()

    def draining(self, role: str) -> bool:
        """Is this process giving the role up now?"""
        return self._election.draining(role)

    def drained(self, role: str) -> bool:
        """Was the role drained and not resumed?"""
        return self._election.drained(role)

    def competes(self, role: str) -> bool:
        """Does this node lead the role, or compete for it?"""
        return self._election.competes(role)

    def work_error(self, role: str) -> BaseException | None:
        """The exception of the role's work in `lead`, until the work is started again; None if it has not failed."""
        return self._election.work_error(role)

    # --- Observers and callbacks

    def observe(self, observer: ElectionObserver) -> None:
        """Call this observer's hooks from now on, on the background thread: they must not block."""
        self._election.observe(observer)

    def changes(self) -> Iterator[LeaderStateChanged]:
        """Every change of who leads, as this process sees it, from now on, until the election stops."""
        changes = self._election.changes()
        try:
            while (change := background.call(lambda: anext(changes, None))) is not None:
                yield change
        finally:
            background.call(changes.aclose)  # type: ignore[attr-defined]

    def on_acquired(self, fn: CallbackT) -> CallbackT:
        """Call `fn(role)` when a term of this process has begun. Its gate may not be open yet."""
        return self._on(self._election.on_acquired, fn)

    def on_released(self, fn: CallbackT) -> CallbackT:
        """Call `fn(role)` when the role was given up on purpose."""
        return self._on(self._election.on_released, fn)

    def on_lost(self, fn: CallbackT) -> CallbackT:
        """Call `fn(role)` when the role was lost."""
        return self._on(self._election.on_lost, fn)

    def on_state_change(self, fn: CallbackT) -> CallbackT:
        """Call `fn(role, from_state, to_state)`, before the callbacks above."""
        return self._on(self._election.on_state_change, fn)

    def on_error(self, fn: CallbackT) -> CallbackT:
        """Call `fn(error)` when the database or a callback failed."""
        return self._on(self._election.on_error, fn)

    def on_stopped(self, fn: CallbackT) -> CallbackT:
        """Call `fn()` when the election has stopped. The last callback of a run."""
        return self._on(self._election.on_stopped, fn)
