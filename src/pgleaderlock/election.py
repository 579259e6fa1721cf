"""`LeaderElection`: any number of roles on one session, with epochs, a gate for each role, and fencing.

What it does not promise, first: a side effect outside the database that was already on its way when the gate closed;
writes on an old primary that still runs after an asynchronous failover; a failover or restore that lost acknowledged
commits (`pgleaderlock epoch advance` is the remedy); a virtual machine whose guest clock stood still.

What it does: at most one gate a role is open at any time, while the database has one primary and the clock rates of two
hosts differ by less than the smallest T/G in use; no fenced write of an older epoch commits after a newer one began;
epochs strictly increase and are never reused.

Imports `_election_run`, `_election_setup`, `config`, `gate` and what they stand on.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from pgleaderlock._conninfo import Dsn, libpq_knows_where
from pgleaderlock._election_run import FORCED_END_S, ElectionRun
from pgleaderlock._election_settings import Timing, checked_node_id, from_environment, role_keys, role_of_environment
from pgleaderlock._election_setup import DEFAULT_CHANNEL, Setup, Takeover
from pgleaderlock._engine import Engine
from pgleaderlock._releases import Ended
from pgleaderlock._roles import LeaderInfo, Role
from pgleaderlock.config import Config
from pgleaderlock.errors import ConfigurationError, LockError, NotLeader, SchemaError, ShutdownError
from pgleaderlock.gate import LeaderGate
from pgleaderlock.keys import DEFAULT_NAMESPACE
from pgleaderlock.models import LeaderStateChanged, LeaderToken, LockState
from pgleaderlock.observer import ElectionObserver

__all__ = ["LeaderElection"]

T = TypeVar("T")
EXIT_TIMEOUT_S = 10.0
CANCELLED_END_S = 1.0
RELEASE_POLL_S = 0.005


class LeaderElection(ElectionRun):
    """Leads roles, one node each. See the module's first lines for what it does not promise."""

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
    ) -> None:
        setup = Setup(
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
            retention_s=retention_s,
            balance=balance,
        )
        super().__init__(setup)

    @classmethod
    def from_env(cls, role: str | None = None, environ: Mapping[str, str] | None = None, **options: Any) -> Self:
        """An election of one role from the environment: PG_CONN_STRING, LEADER_LOCK_KEY, HEARTBEAT_INTERVAL_MS, …

        What is given as a keyword wins over the environment. Without MSP_LEADER_ENABLED the election is enabled. The
        role is `leader` if none is named, and `leader-KEY` where LEADER_LOCK_KEY gives it a key.
        """
        found = from_environment(environ)
        key: Any = found.pop("lock_key", None)
        name = role_of_environment(key) if role is None else role
        settings = {**found, **options}
        dsn = settings.pop("dsn", None)
        if dsn is None and not settings.get("standalone") and settings.get("enabled", True):
            raise ConfigurationError("PG_CONN_STRING is not set: set it, or pass dsn=…")
        return cls(dsn or "", {name: key} if key is not None else name, **settings)

    @classmethod
    def from_config(cls, config: Config | str | Path | None = None, **options: Any) -> Self:
        """An election of every role of a configuration: one that was loaded, a file, or the one that `Config` finds.

        What is given as a keyword wins, `dsn` and `roles` too. Raises `ConfigFileError` with every mistake of the file.
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
        """Begin to compete. Does nothing if running already.

        Returns after the first attempt to connect: a ledger that is missing, too old, too new or not granted is raised
        here as `SchemaError`. A database that is merely away is not: it is tried again in the background.
        """
        if self._running:
            return
        task = self._launch()
        if not self._setup.enabled or self._setup.standalone:
            return
        attempted = asyncio.ensure_future(self._attempted.wait())
        either: list[asyncio.Future[Any]] = [attempted, task]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # `async with` never reaches its end then: nothing may be left running.
            task.cancel()
            await asyncio.wait([task])
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
        if self._engine is not None:
            self._engine.ask_stop()
        else:
            task.cancel()
        if self._inside():
            return
        await asyncio.wait([task], timeout=timeout_s)
        if task.done():
            return
        self._force_stop()
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
            await self._give_up_alone([found], timeout_s)
            return
        token = found.gate.token
        # By the token too: with a heartbeat thread, the gate is open a moment before the state says so.
        if self._engine is None or (token is None and not found.in_term):
            return
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

    # --- Giving up without stopping

    async def drain(self, role: str | None = None, timeout_s: float | None = None) -> bool:
        """Give up one role, or all of them, and do not compete again until `resume`.

        No new work is let in; what `lead` runs is cancelled, what is `acting()` may end until the time is over, and its
        tasks are cancelled then; when nothing is in flight any more, term and lock end and the others are woken. True
        if the release was clean, or nothing was led. Work that is left when the time is over makes it not clean:
        a successor then waits for us as after a loss. Whoever is cancelled while waiting here has drained all the same.
        """
        names = self.roles if role is None else (role,)
        for name in names:
            self._gate(name)
        roles = [found for name in names if (found := self._roles.get(name)) is not None]
        for found in roles:
            found.drained_here |= role is not None
            found.node_drained |= role is None
        if not self._running:
            return True
        if self._setup.standalone:
            return await self._give_up_alone(roles, timeout_s)
        for found in roles:
            if found.gate.token is not None:
                found.gate.drain()  # at once, and not at the engine's next turn
        return await self._drained(roles, timeout_s, everything=role is None)

    async def resume(self, role: str | None = None) -> None:
        """Compete again for what was drained: one role, or all of them."""
        names = self.roles if role is None else (role,)
        for name in names:
            self._gate(name)
        roles = [found for name in names if (found := self._roles.get(name)) is not None]
        if self._running and self._setup.standalone:
            drained = [found for found in roles if found.drained]
            for found in drained:
                found.drained_here = found.node_drained = False
            self._lead_alone([found for found in drained if not found.in_term])
        elif self._running:
            everything = role is None
            await self._on_engine(lambda engine: _resume(engine, roles, everything=everything))

    async def add_role(self, name: str, key: int | None = None) -> None:
        """Compete for one more role from now on; `key` is a 64-bit key of your own, instead of one from its name."""
        role = self._register(name, key)
        await self._on_engine(lambda engine: self._take_in(name, role, engine))

    async def remove_role(self, name: str, timeout_s: float | None = None) -> None:
        """Drain one role, and forget it: `gate(name)` knows it no longer, and a running `lead` of it returns None.

        Whoever is cancelled while the drain goes on has a role that is drained and still there.
        """
        gate = self._gate(name)
        if self._inside():
            raise LockError("remove_role waits for the work of the role: call it outside of callbacks and works")
        await self.drain(name, timeout_s)
        if not await self._on_engine(lambda engine: self._drop(name, gate, engine)):
            raise LockError(f"role {name!r} has not been given up yet, and stays: remove it again")

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
        return self._leader_of(role, self._gate(role))

    def tenure_s(self, role: str) -> float | None:
        """How long this node's term has lasted; None outside a term."""
        gate, found = self._gate(role), self._roles.get(role)
        return None if found is None or gate.token is None else self._clock.now() - found.began_at

    def heartbeat_age_s(self) -> float | None:
        """How long ago the last acknowledged heartbeat was sent; None without a session."""
        engine = self._engine
        acked_at = engine.acked_at if engine is not None else None
        return None if acked_at is None else self._clock.now() - acked_at

    def draining(self, role: str) -> bool:
        """Is the role being given up now: no new work is let in, and what is in flight is waited for?"""
        return self.state(role) is LockState.RELEASING

    def drained(self, role: str) -> bool:
        """Was it drained, and not resumed? This node does not compete for it then."""
        self._gate(role)
        found = self._roles.get(role)
        return found is not None and found.drained

    def observe(self, observer: ElectionObserver) -> None:
        """Tell this observer too, from now on; the roles that are there are told at once."""
        with self._changing:
            self._observers.add(observer)
            for name in self.roles:
                if name in self._known_roles:
                    self._observers.tell_one(observer, "role_added", name)

    async def changes(self) -> AsyncIterator[LeaderStateChanged]:
        """Every change of who leads, as this node sees it, from now on. `is_leader` follows the gate."""
        if self._task is not None and self._task.done():
            return
        async for change in self._changes.subscribe():
            yield change

    # --- Work

    async def lead(self, role: str, work: Callable[[LeaderToken], Coroutine[Any, Any, T]]) -> T | None:
        """Run `work(token)` whenever the role's gate is open; return what it returns.

        It is cancelled when the gate closes, the release waits for its end, and it is started again when the gate
        opens again. What it raises makes this node step down from the role, and is raised here. Returns None if the
        election is stopped first, or the role removed.
        """
        if not callable(work):
            raise ConfigurationError(f"lead takes an async function, not {type(work).__name__}: pass it uncalled")
        gate = self._gate(role)
        if not self._running:
            raise LockError("the election is not running: use `async with election:` or `await election.start()` first")
        while await self._open_or_over(role, gate):
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
            if (task.cancelled() or task.exception() is not None) and self._gates.get(role) is gate:
                await self.step_down(role)
            return task.result()
        return None

    # --- Inside

    async def _drained(self, roles: list[Role], timeout_s: float | None, *, everything: bool) -> bool:
        """Ask the engine, and wait: for the work, then for the work that was cancelled, then for nobody."""
        engine, task = self._engine, self._task
        if self._inside():  # whoever drains its own work is cancelled at its next wait
            if engine is not None:
                engine.call(lambda: _drain(engine, roles, everything=everything))
            return False
        told = await self._on_engine(lambda engine: _drain(engine, roles, everything=everything))
        if told is None or task is None:
            return True
        drained = asyncio.wrap_future(told)
        either: list[asyncio.Future[Any]] = [drained, task]
        try:
            done, _ = await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                for found in roles:
                    found.gate.cancel_acting(but=asyncio.current_task())
                done, _ = await asyncio.wait(either, timeout=CANCELLED_END_S, return_when=asyncio.FIRST_COMPLETED)
            if not done and (engine := self._engine) is not None:
                for found in roles:
                    engine.ask_release(found.name, force=True)
                await asyncio.wait(either, timeout=FORCED_END_S, return_when=asyncio.FIRST_COMPLETED)
            return told.done() and told.result()
        finally:
            drained.cancel()

    async def _term_over(self, role: Role, token: LeaderToken | None) -> None:
        if token is not None:
            await role.gate.wait_over(token)
        while role.driver.state is LockState.RELEASING:  # noqa: ASYNC110 - it follows its gate in one round trip
            await asyncio.sleep(RELEASE_POLL_S)


# Both on the engine's loop; without an engine there is nothing to give up or to compete for.


def _drain(engine: Engine | None, roles: list[Role], *, everything: bool) -> Ended | None:
    return engine.drain(roles, everything=everything) if engine is not None else None


def _resume(engine: Engine | None, roles: list[Role], *, everything: bool) -> None:
    if engine is not None:
        engine.resume(roles, everything=everything)
