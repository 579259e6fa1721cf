"""`LeaderElection`: any number of roles on one session, with epochs, a gate for each role, and fencing.

What it does not promise, first. It cannot stop a side effect outside the database that was already under way when the
gate shut, or writes on an old primary that still runs after an asynchronous failover. It does not cover a failover or
restore that lost acknowledged commits (`pgleaderlock epoch advance` is the remedy), or a virtual machine whose guest
clock stood still.

What it does: at most one gate per role is open at any time, while the database has one primary and the clock rates of
two hosts differ by less than the smallest T/G in use; no fenced write of an older epoch commits after a newer one
began; epochs strictly increase and are never reused.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, TypedDict, TypeVar

from pgleaderlock._base.clock import BOOT_CLOCK, Clock
from pgleaderlock._base.logging import get_logger
from pgleaderlock._config.load import from_environment, role_of_environment
from pgleaderlock._config.timing import Timing, checked_node_id, role_keys
from pgleaderlock._election.lease import connected
from pgleaderlock._election.ledger import Identity, Ledger
from pgleaderlock._election.role import LeaderInfo
from pgleaderlock._election.roster import News, Roster
from pgleaderlock._election.run import Run
from pgleaderlock._election.settings import DEFAULT_CHANNEL, Hold, Setup, Takeover
from pgleaderlock._lock.callbacks import CallbackRegistry
from pgleaderlock._lock.work import OnFailure
from pgleaderlock._pg.conninfo import Dsn, libpq_knows_where
from pgleaderlock.config import Config
from pgleaderlock.errors import ConfigurationError, SchemaError, ShutdownError
from pgleaderlock.gate import LeaderGate
from pgleaderlock.keys import DEFAULT_NAMESPACE
from pgleaderlock.models import LeaderStateChanged, LeaderToken, LockState
from pgleaderlock.observer import ElectionObserver
from pgleaderlock.retry import JITTER

__all__ = ["ElectionOptions", "LeaderElection", "LeaderInfo"]

T = TypeVar("T")
RoleCallback = Callable[[str], Awaitable[None] | None]
RoleStateCallback = Callable[[str, LockState, LockState], Awaitable[None] | None]
FailureCallback = Callable[[Exception], Awaitable[None] | None]
EndCallback = Callable[[], Awaitable[None] | None]
RoleCallbackT = TypeVar("RoleCallbackT", bound=RoleCallback)
RoleStateCallbackT = TypeVar("RoleStateCallbackT", bound=RoleStateCallback)
FailureCallbackT = TypeVar("FailureCallbackT", bound=FailureCallback)
EndCallbackT = TypeVar("EndCallbackT", bound=EndCallback)
EXIT_TIMEOUT_S = 10.0


class ElectionOptions(TypedDict, total=False):
    """The constructor's keyword options, for code that passes them on."""

    heartbeat_interval_s: float
    late_threshold_s: float | None
    session_lease_s: float | None
    acquire_delay_s: tuple[float, float]
    standby_wait_s: float
    takeover: Takeover
    node_id: str | None
    namespace: str
    listen_channel: str | None
    stale_threshold_s: float | None
    evict_stale: bool
    candidate: bool
    heartbeat_thread: bool
    hard_stop_after_s: float | None
    enabled: bool
    standalone: bool
    allow_pooler: bool
    retention_s: float | None
    balance: bool
    hold: Hold


class LeaderElection:
    """Competes for any number of roles over one PostgreSQL session; each role is led by at most one node.

    Use it as `async with LeaderElection(…) as election:`, then `await election.lead(role, work)`. The module's
    docstring says what it does not promise.
    """

    _clock: Clock = BOOT_CLOCK
    _rng = JITTER

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
        retention_s: float | None = 30 * 86400.0,
        balance: bool = False,
        hold: Hold = "session",
    ) -> None:
        """Check every setting; nothing is connected before `start`. `ConfigurationError` names setting and remedy.

        dsn: a conninfo string or URL, or a function that is called at each connect and returns one.
        roles: one name, several, or a mapping from names to 64-bit keys of your own.
        heartbeat_interval_s: seconds between heartbeats of the session.
        late_threshold_s: G, the seconds after the last acknowledged heartbeat at which gates shut. None: from the
            interval.
        session_lease_s: T, the seconds of silence after which the server ends the session. More than G; None: from G.
        acquire_delay_s: shortest and longest pause between two tries, in seconds.
        standby_wait_s: how long a try waits at the server, in seconds; 0 does not wait. For one role only.
        takeover: "safe" waits until the predecessor can no longer act; "instant" does not, for fully fenced work.
        node_id: a stable name of this node. None: the host name, with a number if other processes of this host have
            taken it.
        namespace: elections of different namespaces do not see each other.
        listen_channel: the NOTIFY channel that wakes this node early; with None it does not listen.
        stale_threshold_s: seconds without a new heartbeat after which `leader()` says stale. None: the leader's T.
        evict_stale: end a leader's session that has been silent for 2 T.
        candidate: with False this node only observes, and never leads.
        heartbeat_thread: run the heartbeat on a separate thread, so that a blocked event loop does not shut gates.
        hard_stop_after_s: end the process if work goes on this many seconds behind a shut gate. None: never.
        enabled: with False the election never connects, and keeps every gate shut.
        standalone: lead every role without a database, for a single instance.
        allow_pooler: connect through a pooler in session mode.
        retention_s: delete the ledger's history after this many seconds; None keeps it.
        balance: share the roles evenly with the other nodes that balance.
        hold: "session" holds roles by locks of a dedicated session; "lease" by a row that the node renews, through any
            pooler, without holding locks. A killed leader is then replaced after T, and not at once.
        """
        timing = (heartbeat_interval_s, late_threshold_s, session_lease_s, acquire_delay_s, standby_wait_s)
        setup = Setup(
            dsn=dsn,
            keys=role_keys(roles, namespace),
            **asdict(Timing.checked(*timing)),
            takeover=takeover,
            given_node_id=None if node_id is None else checked_node_id(node_id),
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
            retention_s=retention_s,
            balance=balance,
            hold=hold,
        )
        self._log = log = get_logger("pgleaderlock")
        self._callbacks = CallbackRegistry()
        self._roster = Roster(setup, self._clock)
        self._news = News(log, self._roster)
        self._run = Run(
            self._roster,
            self._news,
            self._callbacks,
            clock=self._clock,
            rng=self._rng,
            log=log,
            open_ledger=self._open_ledger,
        )

    @classmethod
    def from_env(cls, role: str | None = None, environ: Mapping[str, str] | None = None, **options: Any) -> Self:
        """An election of one role from the environment: PG_CONN_STRING or PG_DSN, LEADER_LOCK_KEY, …

        Keywords override the environment. Without MSP_LEADER_ENABLED the election is enabled. If no role is named, its
        name is `leader`, or `leader-KEY` with a key from LEADER_LOCK_KEY.
        """
        found = from_environment(environ)
        key: Any = found.pop("lock_key", None)
        name = role_of_environment(key) if role is None else role
        settings = {**found, **options}
        dsn = settings.pop("dsn", None)
        if dsn is None and not settings.get("standalone") and settings.get("enabled", True):
            raise ConfigurationError("neither PG_CONN_STRING nor PG_DSN is set: set one, or pass dsn=…")
        return cls(dsn or "", {name: key} if key is not None else name, **settings)

    @classmethod
    def from_config(cls, config: Config | str | Path | None = None, **options: Any) -> Self:
        """An election of every role of a configuration: a loaded `Config`, a file, or the file that `Config` finds.

        Keywords override the configuration, including `dsn` and `roles`. Raises `ConfigFileError` with every mistake of
        the file.
        """
        roles = options.get("roles")
        if isinstance(roles, Iterable) and not isinstance(roles, Mapping):
            options["roles"] = roles = [roles] if isinstance(roles, str) else list(roles)
        found = config if isinstance(config, Config) else Config.load(config, roles=None if roles is None else [*roles])
        settings = found.arguments(**options)
        dsn, roles = settings.pop("dsn"), settings.pop("roles")
        if not roles:
            raise ConfigurationError("the configuration has no role: add a section [roles.NAME], or pass roles=…")
        needed = settings.get("enabled", True) and not settings.get("standalone", False)
        if needed and not (options.get("dsn") or found["dsn"] or libpq_knows_where()):
            raise ConfigurationError(
                "the configuration does not say which database: add dsn to [cluster.leader_election], set "
                "PG_CONN_STRING, or pass dsn=…"
            )
        return cls(dsn, roles, **settings)

    # --- Lifecycle

    async def start(self) -> None:
        """Start to compete. Does nothing if running already.

        Returns after the first attempt to connect. Raises `SchemaError` if the ledger is missing, too old or too new,
        or if the role has no privileges on it. If the database cannot be reached, it does not raise: the election tries
        again in the background.
        """
        if await self._run.start() and isinstance(refused := self._run.last_error, SchemaError):
            await self.shutdown()
            raise refused

    async def shutdown(self, timeout_s: float | None = None) -> None:
        """Drain and release every role, and stop. Does nothing if not running.

        timeout_s: how long to wait for the work in flight, in seconds; None waits until it has ended. After the
        timeout, the remaining roles are released anyway, a successor waits for this node as after a loss, and
        `ShutdownError` is raised.
        """
        await self._run.stop(timeout_s)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, _kind: object, leaving: BaseException | None, _trace: object) -> None:
        if leaving is None:
            await self.shutdown()
            return
        try:
            await self.shutdown(EXIT_TIMEOUT_S)
        except ShutdownError as error:
            self._log.failed_at_exit("shutdown_failed", error, leaving, node=self.node_id)

    # --- Work

    async def lead(
        self, role: str, work: Callable[[LeaderToken], Coroutine[Any, Any, T]], *, on_failure: OnFailure = "raise"
    ) -> T | None:
        """Run `work(token)` whenever the role's gate is open; return what it returns.

        The work is cancelled when the gate shuts, and the release waits until it has ended; it is started again when
        the gate opens again. The work may use its gate: if it raises `NotLeader` of its own role and term, that counts
        as a loss of leadership, not as a failure. Returns None if the election is stopped or the role removed first.

        on_failure: what to do when `work` raises; the failure is logged as an error in any case. "raise" gives the role
        up, does not compete for it until `lead` is called again, and raises the exception here. "restart" starts the
        work again after a delay of 0.2 s that doubles up to 30 s; while the delay is longer than 1 s, the role is given
        up. "step_down" gives the role up for the same delay, each time.

        Cancelling the caller cancels the work, and waits until it has ended. If no other `lead` of the role is running,
        this node then gives the role up and does not compete for it until `lead` is called again.
        """
        if not callable(work):
            raise ConfigurationError(f"lead takes an async function, not {type(work).__name__}: pass it uncalled")
        return await self._run.lead(role, work, on_failure)

    # --- Giving up

    async def step_down(self, role: str, timeout_s: float | None = None) -> None:
        """Give up one role, let another node go first, and compete again. Does nothing when not leading.

        The gate refuses new work, the work in flight ends, then the lock is released.
        timeout_s: how long to wait for the work in flight, in seconds; None waits until it has ended. After the
        timeout, the role is released anyway, but not cleanly.
        """
        await self._run.step_down(role, timeout_s)

    async def drain(self, role: str | None = None, timeout_s: float | None = None) -> bool:
        """Give up one role, or all of them with None, and do not compete again until `resume`.

        The gate refuses new work, the work of `lead` is cancelled, and `acting()` blocks are waited for; then term and
        lock end, and the other nodes are woken. True if the release was clean, or nothing was led.
        timeout_s: how long to wait for `acting()` blocks, in seconds; None waits until they have ended. After the
        timeout, their tasks are cancelled; if work is left even then, the release is not clean, and a successor waits
        for this node as after a loss. The drain goes on if the caller is cancelled while it waits.
        """
        return await self._run.drain(role, timeout_s)

    async def resume(self, role: str | None = None) -> None:
        """Compete again for drained roles: one, or all of them with None."""
        await self._run.resume(role)

    # --- Roles

    async def add_role(self, name: str, key: int | None = None) -> None:
        """Start to compete for one more role.

        key: a 64-bit key of your own; None derives it from namespace and name.
        """
        await self._run.add_role(name, key)

    async def remove_role(self, name: str, timeout_s: float | None = None) -> None:
        """Drain one role as `drain` does, and forget it: `gate(name)` then raises, and a running `lead` returns None.

        If the caller is cancelled during the drain, the role stays, drained.
        """
        await self._run.remove_role(name, timeout_s)

    # --- State

    async def _open_ledger(self, setup: Setup, identity: Identity, previous: int | None) -> Ledger:
        """Open the ledger. `pgleaderlock.testing` overrides this with a ledger in memory."""
        return await connected(setup, identity, clock=self._clock, rng=self._rng, previous=previous)

    @property
    def _setup(self) -> Setup:
        return self._roster.setup

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self._setup.keys)

    @property
    def node_id(self) -> str:
        return self._setup.node_id

    @property
    def namespace(self) -> str:
        return self._setup.namespace

    @property
    def hold(self) -> Hold:
        return self._setup.hold

    @property
    def last_error(self) -> Exception | None:
        """Why the session was last lost or not obtained; None if nothing has gone wrong since `start`."""
        return self._run.last_error

    def state(self, role: str) -> LockState:
        """The state of this node for the role."""
        found = self._roster.role(role)
        return found.driver.state if found is not None else LockState.STOPPED

    def gate(self, role: str) -> LeaderGate:
        """The role's gate, which any thread may ask whether this node may act now."""
        return self._roster.gate(role)

    def leader(self, role: str) -> LeaderInfo | None:
        """The role's leader, as this node last saw it; None if no node leads or nothing was seen yet."""
        return self._roster.leader(role)

    def tenure_s(self, role: str) -> float | None:
        """For how many seconds this node's term has lasted; None outside a term."""
        gate, found = self._roster.gate(role), self._roster.role(role)
        return None if found is None or gate.token is None else self._clock.now() - found.began_at

    def heartbeat_age_s(self) -> float | None:
        """How many seconds ago the last acknowledged heartbeat was sent; None without a session."""
        engine = self._run.engine
        acked_at = engine.acked_at if engine is not None else None
        return None if acked_at is None else self._clock.now() - acked_at

    def draining(self, role: str) -> bool:
        """Is this node giving the role up now, and still waiting for work in flight?"""
        return self.state(role) is LockState.RELEASING

    def drained(self, role: str) -> bool:
        """Was the role drained and not resumed? Then this node does not compete for it."""
        found = self._roster.role(role)
        return found is not None and found.drained

    def competes(self, role: str) -> bool:
        """Does this node lead the role, or compete for it? False while the election is stopped, the role is drained or
        given up because its work has failed, or there is no session."""
        found, setup = self._roster.role(role), self._setup
        if found is None or found.given_up or not setup.candidate or found.driver.state is LockState.STOPPED:
            return False
        return setup.standalone or self.heartbeat_age_s() is not None

    def work_error(self, role: str) -> BaseException | None:
        """The exception of the role's work in `lead`, until the work is started again; None if it has not failed."""
        found = self._roster.role(role)
        failure = found.works.failure if found is not None else None
        return None if failure is None else failure.error

    # --- Observers and callbacks

    def observe(self, observer: ElectionObserver) -> None:
        """Call this observer's hooks from now on. For the roles that exist already, `role_added` is called at once."""
        self._news.observe(observer)

    async def changes(self) -> AsyncIterator[LeaderStateChanged]:
        """Every change of who leads, as this node sees it, from now on. `is_leader` follows the gate."""
        if self._run.task is not None and self._run.task.done():
            return
        async for change in self._news.subscribe():
            yield change

    # Each returns the function unchanged, so that all serve as decorators.

    def on_acquired(self, fn: RoleCallbackT) -> RoleCallbackT:
        """Call `fn(role)` when a term of this node has begun. Its gate may not be open yet."""
        self._callbacks.add("on_acquired", fn)
        return fn

    def on_released(self, fn: RoleCallbackT) -> RoleCallbackT:
        """Call `fn(role)` when the role was given up on purpose."""
        self._callbacks.add("on_released", fn)
        return fn

    def on_lost(self, fn: RoleCallbackT) -> RoleCallbackT:
        """Call `fn(role)` when the role was lost."""
        self._callbacks.add("on_lost", fn)
        return fn

    def on_state_change(self, fn: RoleStateCallbackT) -> RoleStateCallbackT:
        """Call `fn(role, from_state, to_state)`, before the callbacks above."""
        self._callbacks.add("on_state_change", fn)
        return fn

    def on_error(self, fn: FailureCallbackT) -> FailureCallbackT:
        """Call `fn(error)` when the database or a callback failed: once per error, whatever the number of roles."""
        self._callbacks.add("on_error", fn)
        return fn

    def on_stopped(self, fn: EndCallbackT) -> EndCallbackT:
        """Call `fn()` when the election has stopped. The last callback of a run."""
        self._callbacks.add("on_stopped", fn)
        return fn
