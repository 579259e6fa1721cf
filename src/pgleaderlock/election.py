"""`LeaderElection`: any number of roles on one session, with epochs, a gate for each role, and fencing.

What it does not promise, first: a side effect outside the database that was already on its way when the gate closed;
writes on an old primary that still runs after an asynchronous failover; a failover or restore that lost acknowledged
commits (`pgleaderlock epoch advance` is the remedy); a virtual machine whose guest clock stood still.

What it does: at most one gate a role is open at any time, while the database has one primary and the clock rates of two
hosts differ by less than the smallest T/G in use; no fenced write of an older epoch commits after a newer one began;
epochs strictly increase and are never reused.

Imports `_election_setup`, `_engine`, `_roles`, `_listener`, `gate` and what they stand on.
"""

import asyncio
import contextlib
import random
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Any, Self, TypeVar

from pgleaderlock._callbacks import Dispatcher
from pgleaderlock._changes import Changes
from pgleaderlock._clock import BOOT_CLOCK, Clock
from pgleaderlock._conninfo import Dsn
from pgleaderlock._driver import Driver
from pgleaderlock._election_callbacks import ElectionCallbacks
from pgleaderlock._election_settings import Timing, checked_node_id, from_environment, role_keys
from pgleaderlock._election_setup import DEFAULT_CHANNEL, Setup, Takeover
from pgleaderlock._engine import Engine
from pgleaderlock._fsm import Input, Rules
from pgleaderlock._listener import listen
from pgleaderlock._logging import get_logger
from pgleaderlock._roles import LeaderInfo, Role
from pgleaderlock._thread import run_in_thread
from pgleaderlock._watchdog import Watchdog
from pgleaderlock._work import Works
from pgleaderlock.errors import ConfigurationError, LockError, NotLeader, SchemaError, ShutdownError
from pgleaderlock.gate import LeaderGate
from pgleaderlock.keys import DEFAULT_NAMESPACE
from pgleaderlock.models import LeaderStateChanged, LeaderToken, LockState, RetryContext

__all__ = ["LeaderElection"]

T = TypeVar("T")
EXIT_TIMEOUT_S = 10.0
FORCED_END_S = 5.0
STANDALONE_EPOCH = 0
RELEASE_POLL_S = 0.005


class _NoDelay:
    """The election paces all its roles itself, by the tick: a role's own delay is none."""

    def next_delay_s(self, ctx: RetryContext) -> float | None:
        return 0.0


class LeaderElection(ElectionCallbacks):
    """Leads roles, one node each. See the module's first lines for what it does not promise."""

    _clock: Clock = BOOT_CLOCK
    _rng = random.Random()

    def __init__(
        self,
        dsn: Dsn,
        roles: str | Iterable[str] | Mapping[str, int],
        *,
        heartbeat_interval_s: float = 3.0,
        late_threshold_s: float | None = None,
        session_lease_s: float | None = None,
        acquire_delay_s: tuple[float, float] = (0.2, 0.8),
        standby_wait_s: float = 0.0,
        takeover: Takeover = "safe",
        node_id: str | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        listen_channel: str | None = DEFAULT_CHANNEL,
        stale_threshold_s: float | None = None,
        evict_stale: bool = True,
        candidate: bool = True,
        heartbeat_thread: bool = False,
        hard_stop_after_s: float | None = None,
        enabled: bool = True,
        standalone: bool = False,
        allow_pooler: bool = False,
    ) -> None:
        super().__init__()
        self._setup = Setup(
            dsn=dsn,
            keys=role_keys(roles, namespace),
            timing=Timing.checked(
                heartbeat_interval_s, late_threshold_s, session_lease_s, acquire_delay_s, standby_wait_s
            ),
            takeover=takeover,
            node_id=checked_node_id(node_id),
            namespace=namespace,
            listen_channel=listen_channel,
            stale_threshold_s=stale_threshold_s,
            hard_stop_after_s=hard_stop_after_s,
            evict_stale=evict_stale,
            candidate=candidate,
            heartbeat_thread=heartbeat_thread,
            enabled=enabled,
            standalone=standalone,
            allow_pooler=allow_pooler,
        )
        self._log = get_logger("pgleaderlock").bind(node=self._setup.node_id)
        self._gates = {name: LeaderGate(name, clock=self._clock) for name in self._setup.keys}
        self._instance = ""
        self._roles: dict[str, Role] = {}
        self._engine: Engine | None = None
        self._task: asyncio.Task[None] | None = None
        self._dispatcher: Dispatcher | None = None
        self._changes = Changes()
        self._last_error: Exception | None = None
        self._stop_asked = False
        if not enabled:
            for gate in self._gates.values():
                gate.switch_off()

    @classmethod
    def from_env(cls, role: str = "leader", environ: Mapping[str, str] | None = None, **options: Any) -> Self:
        """An election of one role from the environment: PG_CONN_STRING, LEADER_LOCK_KEY, HEARTBEAT_INTERVAL_MS, …

        What is given as a keyword wins over the environment. Without MSP_LEADER_ENABLED the election is enabled.
        """
        found = from_environment(environ)
        key = found.pop("lock_key", None)
        settings = {**found, **options}
        dsn = settings.pop("dsn", None)
        if dsn is None and not settings.get("standalone") and settings.get("enabled", True):
            raise ConfigurationError("PG_CONN_STRING is not set: set it, or pass dsn=…")
        return cls(dsn or "", {role: key} if key is not None else role, **settings)

    # --- Lifecycle

    async def start(self) -> None:
        """Begin to compete. Does nothing if running already.

        Returns after the first attempt to connect: a ledger that is missing, too old, too new or not granted is raised
        here as `SchemaError`. A database that is merely away is not: it is tried again in the background.
        """
        if self._task is not None and not self._task.done():
            return
        self._stop_asked = False
        self._last_error = None
        self._instance = str(uuid.uuid4())  # a new run knows nothing of what an earlier one was waiting for
        self._home = asyncio.get_running_loop()
        self._dispatcher = dispatcher = Dispatcher(self._registry, self._clock, self._log)
        dispatcher.start()
        self._roles = {name: self._make_role(name) for name in self._setup.keys}
        self._task = asyncio.create_task(self._run(), name="pgleaderlock election")
        if not self._setup.enabled or self._setup.standalone:
            return
        self._attempted = asyncio.Event()
        attempted = asyncio.ensure_future(self._attempted.wait())
        either: list[asyncio.Future[Any]] = [attempted, self._task]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # `async with` never reaches its end then: nothing may be left running.
            self._task.cancel()
            await asyncio.wait([self._task])
            raise
        finally:
            attempted.cancel()
        if isinstance(self._last_error, SchemaError):
            refused = self._last_error
            await self.shutdown()
            raise refused

    async def shutdown(self, timeout_s: float | None = None) -> None:
        """Drain and release every role, and stop. Out of time, what is left is released without waiting for its work;
        a successor then waits for us as after a loss, and `ShutdownError` is raised."""
        task = self._task
        if task is None or task.done():
            return
        self._stop_asked = True
        if self._engine is not None:
            self._engine.ask_stop()
        else:
            task.cancel()
        if self._inside():
            return
        await asyncio.wait([task], timeout=timeout_s)
        if task.done():
            return
        if self._engine is not None:
            self._engine.ask_stop(force=True)
        await asyncio.wait([task], timeout=FORCED_END_S)
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=FORCED_END_S)
        raise ShutdownError(f"the election did not stop within {timeout_s:g} s: its work was not waited for any longer")

    async def step_down(self, role: str, timeout_s: float | None = None) -> None:
        """Give up one role: no new work is let in, what is in flight ends, then the lock is released.

        Out of time, it is released all the same, but not as clean. Does nothing when not leading.
        """
        found = self._role(role)
        if self._setup.standalone and found.driver.state is LockState.LEADER:
            await self._step_down_alone(found)
            return
        if self._engine is None or found.driver.state not in (LockState.LEADER, LockState.RELEASING):
            return
        token = found.gate.token
        self._engine.ask_release(role)
        if self._inside():
            return
        over = asyncio.ensure_future(self._term_over(found, token))
        try:
            await asyncio.wait([over], timeout=timeout_s)
            if not over.done():
                self._engine.ask_release(role, force=True)
                await asyncio.wait([over], timeout=FORCED_END_S)
        finally:
            over.cancel()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        await self.shutdown(None if exc_type is None else EXIT_TIMEOUT_S)

    # --- State

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self._setup.keys)

    @property
    def node_id(self) -> str:
        return self._setup.node_id

    @property
    def last_error(self) -> Exception | None:
        """Why the session was last lost or not obtained; None if nothing has gone wrong since `start`."""
        return self._last_error

    def state(self, role: str) -> LockState:
        """Where this node stands with the role's lock."""
        self._gate(role)
        found = self._roles.get(role)
        return found.driver.state if found is not None else LockState.STOPPED

    def gate(self, role: str) -> LeaderGate:
        """May this node act for the role, now? The gate answers, from any thread."""
        return self._gate(role)

    def leader(self, role: str) -> LeaderInfo | None:
        """Who leads the role, as this node last saw it; None if nobody does or nothing was seen yet."""
        gate = self._gate(role)
        found = self._roles.get(role)
        if gate.token is not None:
            return LeaderInfo(role, gate.token.epoch, gate.token.holder_identity, self._setup.node_id, 0.0, stale=False)
        if found is None or found.look is None or found.look.ended or found.look.epoch is None:
            return None
        look, unchanged_s = found.look, found.unchanged_s(self._clock.now())
        threshold_s = self._setup.stale_threshold_s or look.lease_s or self._setup.timing.session_lease_s
        return LeaderInfo(
            role, look.epoch or 0, look.holder_identity, look.node_id, unchanged_s, stale=unchanged_s > threshold_s
        )

    async def changes(self) -> AsyncIterator[LeaderStateChanged]:
        """Every change of who leads, as this node sees it, from now on. `is_leader` follows the gate."""
        if self._task is not None and self._task.done():
            return
        async for change in self._changes.subscribe():
            yield change

    async def lead(self, role: str, work: Callable[[LeaderToken], Coroutine[Any, Any, T]]) -> T | None:
        """Run `work(token)` whenever the role's gate is open; return what it returns.

        It is cancelled when the gate closes, the release waits for its end, and it is started again when the gate
        opens again. What it raises makes this node step down from the role, and is raised here. Returns None if the
        election is stopped first.
        """
        if not callable(work):
            raise ConfigurationError(f"lead takes an async function, not {type(work).__name__}: pass it uncalled")
        gate = self._gate(role)
        if self._task is None or self._task.done():
            raise LockError("the election is not running: use `async with election:` or `await election.start()` first")
        while await self._open_or_over(gate):
            found = self._role(role)
            try:
                token = gate.require_leader()
            except NotLeader:
                continue
            watcher = asyncio.ensure_future(self._interrupt_when_closed(found, token))
            try:
                task = await found.works.run(lambda token=token: work(token))  # type: ignore[misc]
            finally:
                watcher.cancel()
            if task is None:
                continue
            if task.cancelled() or task.exception() is not None:
                await self.step_down(role)
            return task.result()
        return None

    # --- Inside

    async def _run(self) -> None:
        assert self._dispatcher is not None
        hard_stop_after_s = self._setup.hard_stop_after_s
        watchdog = Watchdog(self._gates, hard_stop_after_s, self._clock) if hard_stop_after_s else None
        try:
            if not self._setup.enabled:
                self._log.warning("election_disabled")
                await asyncio.get_running_loop().create_future()
            elif self._setup.standalone:
                self._lead_alone()
                await asyncio.get_running_loop().create_future()
            elif self._setup.heartbeat_thread:
                await run_in_thread(self._run_engine, self._force_stop)
            else:
                await self._run_engine()
        finally:
            self._engine = None
            for role in self._roles.values():
                if role.driver.state is not LockState.STOPPED:
                    self._fold_up(role)
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
        engine = self._make_engine()
        self._engine = engine
        listener = asyncio.ensure_future(self._listen(engine)) if self._setup.listen_channel is not None else None
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
        return Engine(
            self._setup.dsn,
            self._setup.connection(),
            self._setup.engine(),
            self._setup.identity(self._instance),
            self._roles,
            clock=self._clock,
            rng=self._rng,
            log=self._log,
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

    def _first_attempt_made(self) -> None:
        self._home.call_soon_threadsafe(self._attempted.set)

    def _make_role(self, name: str) -> Role:
        emitter = _RoleEmitter(name, self)
        driver = Driver(
            rules=Rules(auto_reacquire=True, grace=False),
            grace_s=None,
            strategy=_NoDelay(),
            clock=self._clock,
            rng=self._rng,
            log=self._log.bind(role=name),
            dispatcher=emitter,
            left_leader=lambda: None,
        )
        return Role(name, self._setup.keys[name], driver, self._gates[name], Works())

    def _lead_alone(self) -> None:
        self._log.warning("standalone", detail="leading every role WITHOUT a database: only for a single instance")
        for role in self._roles.values():
            token = LeaderToken(role.name, STANDALONE_EPOCH, f"{self._setup.node_id}-standalone", self._setup.namespace)
            role.gate.open(token, self._clock.now(), float("inf"))
            role.driver.feed(Input.START)
            role.driver.feed(Input.ACQUIRE_ATTEMPT)
            role.driver.feed(Input.ACQUIRE_SUCCEEDED)
        self._announce()

    async def _step_down_alone(self, role: Role) -> None:
        """There is nobody to hand over to: the role stays down until the next start."""
        role.gate.drain()
        role.driver.feed(Input.RELEASE_REQUESTED)
        if not self._inside():
            await self._quiet(role)
        role.gate.close("released")
        role.driver.feed(Input.RELEASE_SUCCEEDED)
        self._announce()

    def _fold_up(self, role: Role) -> None:
        role.gate.close("released")
        role.driver.request_stop()
        if role.driver.state is not LockState.RELEASING:
            role.driver.feed(Input.STOP_REQUESTED)
        if role.driver.state is LockState.RELEASING:
            role.driver.feed(Input.RELEASE_SUCCEEDED)

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

    async def _open_or_over(self, gate: LeaderGate) -> bool:
        """Wait for the gate; False once the election is over."""
        assert self._task is not None
        opening = asyncio.ensure_future(gate.wait_open())
        either: list[asyncio.Future[Any]] = [opening, self._task]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return opening.done() and not self._task.done()
        finally:
            opening.cancel()

    async def _term_over(self, role: Role, token: LeaderToken | None) -> None:
        if token is not None:
            await role.gate.wait_over(token)
        while role.driver.state is LockState.RELEASING:  # noqa: ASYNC110 - it follows its gate in one round trip
            await asyncio.sleep(RELEASE_POLL_S)

    def _inside(self) -> bool:
        if self._dispatcher is not None and self._dispatcher.inside():
            return True
        return any(role.works.inside() for role in self._roles.values())

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
        """Tell the subscribers what has changed since they were last told."""
        changed = self._changes.news(self._as_seen(name) for name in self._setup.keys)
        if not changed:
            return
        if asyncio.get_running_loop() is self._home:
            self._changes.tell(changed)
        else:
            self._home.call_soon_threadsafe(self._changes.tell, changed)

    def _as_seen(self, role: str) -> LeaderStateChanged:
        info = self.leader(role)
        return LeaderStateChanged(
            role,
            self._gates[role].is_leader,
            info.epoch if info is not None else None,
            info.holder_identity if info is not None else None,
        )

    def _gate(self, role: str) -> LeaderGate:
        try:
            return self._gates[role]
        except (KeyError, TypeError):
            known = ", ".join(repr(name) for name in list(self._setup.keys)[:5])
            raise ConfigurationError(f"role {role!r} is not one of this election's: it has {known}") from None

    def _role(self, role: str) -> Role:
        self._gate(role)
        if role not in self._roles:
            raise LockError("the election is not running: use `async with election:` or `await election.start()` first")
        return self._roles[role]


class _RoleEmitter:
    """What a role's driver emits, with the role's name in front; one error is told once, not once a role."""

    def __init__(self, name: str, election: LeaderElection) -> None:
        self._name = name
        self._election = election

    def emit(self, event: str, *args: object) -> None:
        if event in ("on_error", "on_stopped"):
            return  # the election tells of both itself
        self._election.emit(event, self._name, *args)
