"""One `LeaderElection` from the inside: its roles, its task, its engine on whichever loop, and who hears what.

The application's loop is home: callbacks, works and waits are there. With `heartbeat_thread` the engine has a loop of
its own, so roles and gates are replaced as a whole and never changed in place. Imports `_engine`, `_election_setup`,
`_election_roles`, `_listener`, `_watchdog`, `_changes`, `_observers`, `_transitions`, `gate` and what they stand on.
"""

import asyncio
import contextlib
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from pgleaderlock._board import Board
from pgleaderlock._callbacks import Dispatcher
from pgleaderlock._changes import Changes, Seen
from pgleaderlock._clock import BOOT_CLOCK, Clock
from pgleaderlock._election_callbacks import ElectionCallbacks
from pgleaderlock._election_roles import give_up_alone, lead_alone, make_role
from pgleaderlock._election_setup import Setup
from pgleaderlock._engine import Engine
from pgleaderlock._jitter import JITTER
from pgleaderlock._listener import listen
from pgleaderlock._logging import get_logger
from pgleaderlock._observers import Observers
from pgleaderlock._roles import LeaderInfo, Role
from pgleaderlock._thread import run_in_thread, settle
from pgleaderlock._transitions import TransitionLog
from pgleaderlock._watchdog import Watchdog
from pgleaderlock.errors import ConfigurationError, LockError
from pgleaderlock.gate import LeaderGate
from pgleaderlock.models import LeaderToken, LockState

if TYPE_CHECKING:
    from pgleaderlock.ledger import Look

__all__ = ["FORCED_END_S", "ElectionRun"]

T = TypeVar("T")
FORCED_END_S = 5.0


class ElectionRun(ElectionCallbacks):
    """What `LeaderElection` is made of."""

    _clock: Clock = BOOT_CLOCK
    _rng = JITTER

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self._setup = setup
        self._log = get_logger("pgleaderlock").bind(node=setup.node_id)
        self._gates = {name: self._make_gate(name) for name in setup.keys}
        self._known_roles = set(setup.keys)
        self._instance = ""
        self._observers = Observers(self._log)
        self._transitions = TransitionLog(self._log, lambda: self._setup.keys)
        self._observers.add(self._transitions)
        self._begin_anew()
        _elections.add(self)

    def _begin_anew(self) -> None:
        """What a run is made of, before the first run of a process: of the election itself, and of a forked child."""
        self._left_over: tuple[LeaderGate, ...] = ()
        self._roles: dict[str, Role] = {}
        self._changing = threading.RLock()  # roles come and go at home or on the engine's loop
        self._gone: dict[str, asyncio.Future[None]] = {}
        self._engine: Engine | None = None
        self._task: asyncio.Task[None] | None = None
        self._dispatcher: Dispatcher | None = None
        self._changes = Changes()
        self._told_looks: dict[str, Look | None] = {}
        self._last_error: Exception | None = None

    def begin_anew_in_child(self) -> None:
        """In a forked child: the parent's run goes on in the parent alone, and this process may begin one of its own.

        The copies are kept: their finalizers would run clean-up of the parent's in the child.
        """
        _of_parents.append((self._task, self._engine, self._dispatcher, self._roles, self._changes, self._gone))
        self._begin_anew()

    # --- The task

    def _launch(self) -> "asyncio.Task[None]":
        self._last_error = None
        self._instance = str(uuid.uuid4())  # a new run knows nothing of what an earlier one was waiting for
        self._transitions.begin(self._holder_identity())
        self._home = asyncio.get_running_loop()
        self._attempted = asyncio.Event()
        self._dispatcher = dispatcher = Dispatcher(self._registry, self._clock, self._log)
        dispatcher.start()
        self._gone = {}
        with self._changing:
            for gate in self._gates.values():
                gate.begin_anew()
            self._roles = {name: self._make_role(name) for name in self._setup.keys}
        self._task = asyncio.create_task(self._run(), name="pgleaderlock election")
        return self._task

    def _holder_identity(self) -> str:
        if self._setup.standalone:
            return f"{self._setup.node_id}-standalone"
        return self._setup.identity(self._instance).holder_identity

    @property
    def _running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def _run(self) -> None:
        assert self._dispatcher is not None
        hard_stop_after_s = self._setup.hard_stop_after_s
        watchdog = Watchdog(self._watched_gates, hard_stop_after_s, self._clock) if hard_stop_after_s else None
        try:
            if not self._setup.enabled:
                self._log.warning("election_disabled")
                await asyncio.get_running_loop().create_future()
            elif self._setup.standalone:
                self._log.warning("standalone", detail="leading every role WITHOUT a database: for a single instance")
                self._lead_alone(list(self._roles.values()))
                await asyncio.get_running_loop().create_future()
            elif self._setup.heartbeat_thread:
                await run_in_thread(self._run_engine, self._force_stop)
            else:
                await self._run_engine()
        finally:
            self._engine = None
            for role in self._roles.values():
                if role.driver.state is not LockState.STOPPED:
                    epoch = role.epoch if self._setup.standalone else None  # an engine has told of its terms itself
                    role.gate.close("released")
                    role.walk_to_stopped()
                    if epoch is not None:
                        self._observers.tell("lost", role.name, epoch, "released")
            self._dispatcher.emit("on_stopped")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FORCED_END_S):
                    await self._dispatcher.drained()
            await self._dispatcher.close()
            self._announce()
            self._changes.end()
            if watchdog is not None:
                watchdog.close()

    async def _run_engine(self) -> None:
        """On whichever loop this is called: the application's, or that of a thread of its own."""
        setup = self._setup
        # Made known before it looks at the roles: one that is added meanwhile is in what it sees, or handed to it.
        self._engine = engine = self._make_engine()
        listener = asyncio.ensure_future(self._listen(engine)) if setup.listen_channel is not None else None
        try:
            await engine.run()
        finally:
            if listener is not None:
                listener.cancel()
                await asyncio.wait([listener])

    def _force_stop(self) -> None:
        if self._engine is not None:
            self._engine.ask_stop(force=True)

    def _make_engine(self) -> Engine:
        setup = self._setup
        board = Board(
            settings=setup.engine(),
            identity=setup.identity(self._instance),
            clock=self._clock,
            rng=self._rng,
            log=self._log,
            observers=self._observers,
        )
        return Engine(
            setup.dsn,
            setup.connection(),
            board,
            lambda: self._roles,
            quiet=lambda role: self._at_home(lambda: self._quiet(role)),
            attempted=self._first_attempt_made,
            announce=self._announce,
            failed=self._note_failure,
        )

    async def _listen(self, engine: Engine) -> None:
        setup = self._setup
        settings = setup.listener_connection()
        await listen(setup.dsn, settings, setup.channel, engine.wake, clock=self._clock, rng=self._rng, log=self._log)

    async def _at_home(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine function on the application's loop, from whichever side of the thread boundary."""
        if asyncio.get_running_loop() is self._home:
            return await work()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self._home))

    async def _on_engine(self, work: Callable[[Engine | None], T]) -> T:
        """Run a function on the engine's loop; here, if there is none. Cancelled meanwhile, it runs all the same."""
        engine, task = self._engine, self._task
        if engine is None or task is None:
            return work(None)
        asked = engine.call(lambda: work(engine))
        either: list[asyncio.Future[Any]] = [asyncio.wrap_future(asked), task]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return asked.result() if asked.done() else work(None)

    def _first_attempt_made(self) -> None:
        self._home.call_soon_threadsafe(self._attempted.set)

    # --- The roles

    def _make_gate(self, name: str) -> LeaderGate:
        gate = LeaderGate(name, clock=self._clock)
        if not self._setup.enabled:
            gate.switch_off()
        return gate

    def _make_role(self, name: str) -> Role:
        return make_role(
            name,
            self._setup.keys[name],
            self._gates[name],
            clock=self._clock,
            rng=self._rng,
            log=self._log,
            emit=self.emit,
            observed=self._observers.tell,
        )

    def _register(self, name: str, key: int | None) -> Role | None:
        """Know one more role; what is returned is to be handed to the engine."""
        with self._changing:
            self._setup = self._setup.with_role(name, key)
            self._gates = {**self._gates, name: self._make_gate(name)}
            if not self._running:
                return None
            role = self._make_role(name)
            self._roles = {**self._roles, name: role}
            return role

    def _take_in(self, name: str, role: Role | None, engine: Engine | None) -> None:
        with self._changing:
            self._known_roles.add(name)
            self._observers.tell("role_added", name)
        if role is not None and engine is not None:
            engine.add(role)
        elif role is not None and self._setup.standalone and self._setup.enabled:
            self._lead_alone([role])

    def _drop(self, name: str, gate: LeaderGate, engine: Engine | None) -> bool:
        """Forget a role; False if it is still held."""
        with self._changing:
            if self._gates.get(name) is not gate:
                return True  # somebody else has been at it
            role = self._roles.get(name)
            if role is not None and engine is not None and not engine.forget(role):
                return False
            if role is not None and engine is None:
                gate.close("released")
                role.walk_to_stopped()
            self._left_over = tuple(old for old in (*self._left_over, gate) if old.in_flight)
            self._roles = {known: role for known, role in self._roles.items() if known != name}
            self._gates = {known: gate for known, gate in self._gates.items() if known != name}
            self._changes.forget(name)
            self._known_roles.discard(name)
            self._observers.tell("role_removed", name)
            self._setup = self._setup.without_role(name)
        if (gone := self._gone.pop(name, None)) is not None:
            with contextlib.suppress(RuntimeError):  # its loop is gone, and whoever waited there
                gone.get_loop().call_soon_threadsafe(settle, gone)
        return True

    def _watched_gates(self) -> list[LeaderGate]:
        """Those of roles that are gone too, while work of theirs is not."""
        return [*self._gates.values(), *self._left_over]

    def _gate(self, role: str) -> LeaderGate:
        try:
            return self._gates[role]
        except (KeyError, TypeError):
            known = ", ".join(repr(name) for name in list(self._setup.keys)[:5]) or "none"
            raise ConfigurationError(f"role {role!r} is not one of this election's: it has {known}") from None

    def _role(self, role: str) -> Role:
        self._gate(role)
        if role not in self._roles:
            raise LockError("the election is not running: use `async with election:` or `await election.start()` first")
        return self._roles[role]

    # --- Without a database

    def _lead_alone(self, roles: list[Role]) -> None:
        lead_alone(roles, self._holder_identity(), self._setup.namespace, self._clock.now())
        for role in roles:
            self._observers.tell("acquired", role.name, role.epoch, 0.0, False)
        self._announce()

    async def _give_up_alone(self, roles: list[Role], timeout_s: float | None) -> bool:
        """Stays down until the next start, or until it is resumed. True if no work is left."""
        led = [role for role in roles if role.driver.state is LockState.LEADER]
        finish = []
        for role in led:
            self._observers.tell("drain_began", role.name)
            finish.append(give_up_alone(role))
        if led and not self._inside():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await asyncio.gather(*(self._quiet(role) for role in led))
        for role, end in zip(led, finish, strict=True):
            role.released_clean, epoch = not role.gate.in_flight, role.epoch
            end()
            self._observers.tell("lost", role.name, epoch, "released")
            self._observers.tell("drain_ended", role.name, role.released_clean)
        self._announce()
        return all(role.released_clean for role in led)

    # --- Works

    async def _quiet(self, role: Role) -> None:
        """Nothing of this role is at work any more, and the callbacks have heard that it ends."""
        role.works.interrupt()
        await role.works.ended()
        await role.gate.wait_idle()
        if self._dispatcher is not None:
            await self._dispatcher.drained()

    async def _interrupt_when_closed(self, role: Role, token: LeaderToken) -> None:
        await role.gate.wait_closed(token)
        role.works.interrupt()

    async def _open_or_over(self, role: str, gate: LeaderGate) -> bool:
        """Wait for the gate; False once the election is over, or the role gone."""
        gone = self._gone.setdefault(role, asyncio.get_running_loop().create_future())
        if self._task is None or self._gates.get(role) is not gate:  # asked last: it may go on another thread
            return False
        opening = asyncio.ensure_future(gate.wait_open())
        either: list[asyncio.Future[Any]] = [opening, self._task, gone]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return opening.done() and not self._task.done() and not gone.done()
        finally:
            opening.cancel()

    def _inside(self) -> bool:
        if self._dispatcher is not None and self._dispatcher.inside():
            return True
        return any(role.works.inside() for role in self._roles.values())

    # --- Who hears what

    def _note_failure(self, error: Exception) -> None:
        self._last_error = error
        self.emit("on_error", error)

    def emit(self, event: str, *args: object) -> None:
        """To the dispatcher, on its own loop."""
        if self._dispatcher is None:
            return
        if asyncio.get_running_loop() is self._home:
            self._dispatcher.emit(event, *args)
        else:
            self._home.call_soon_threadsafe(self._dispatcher.emit, event, *args)

    def _announce(self) -> None:
        """Tell the log and the subscribers what has changed since they were last told."""
        suspects = self._suspects()
        for _, gate in suspects:
            self._transitions.look_at(gate)
        changed = self._changes.news([self._as_seen(name, gate) for name, gate in suspects])
        if not changed:
            return
        if asyncio.get_running_loop() is self._home:
            self._changes.tell(changed)
        else:
            self._home.call_soon_threadsafe(self._changes.tell, changed)

    def _suspects(self) -> "list[tuple[str, LeaderGate]]":
        """All but what others lead as they did when we last told it: of a thousand roles at each tick, most of them.

        What this node leads itself, or nobody has looked at, has no look; and its gate may turn with the time alone.
        """
        looks = {name: role.look for name, role in self._roles.items()}
        told, self._told_looks = self._told_looks, looks
        return [
            (name, gate)
            for name, gate in self._gates.items()
            if (look := looks.get(name)) is None or told.get(name) is not look
        ]

    def _as_seen(self, name: str, gate: LeaderGate) -> Seen:
        token = gate.token
        if token is not None:
            return name, gate.is_leader, token.epoch, token.holder_identity
        found = self._roles.get(name)
        look = found.look if found is not None else None
        if look is None or look.ended:
            return name, False, None, None
        return name, False, look.epoch, look.holder_identity

    def _leader_of(self, name: str, gate: LeaderGate) -> LeaderInfo | None:
        token, found = gate.token, self._roles.get(name)
        if token is not None:
            return LeaderInfo(name, token.epoch, token.holder_identity, self._setup.node_id, 0.0, stale=False)
        look = found.look if found is not None else None
        if found is None or look is None or look.ended or look.epoch is None:
            return None
        unchanged_s = found.unchanged_s(self._clock.now())
        threshold_s = self._setup.stale_threshold_s or look.lease_s or self._setup.timing.session_lease_s
        return LeaderInfo(
            name, look.epoch, look.holder_identity, look.node_id, unchanged_s, stale=unchanged_s > threshold_s
        )


_elections: "weakref.WeakSet[ElectionRun]" = weakref.WeakSet()
_of_parents: list[object] = []


def _begin_anew_in_child() -> None:
    for election in list(_elections):
        election.begin_anew_in_child()


os.register_at_fork(after_in_child=_begin_anew_in_child)
