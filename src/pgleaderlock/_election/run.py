"""The task of one `LeaderElection`: `Run` owns the engine and implements what the engine calls above itself (`Owner`).

"Home" is the application's loop: callbacks, works and waits run there. With `heartbeat_thread` the engine runs on a
separate loop in a thread.
"""

import asyncio
import contextlib
import os
import random
import threading
import uuid
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from psycopg import AsyncConnection

from pgleaderlock._base.aio import any_done, cancel_and_wait, run_in_thread, within
from pgleaderlock._base.clock import Clock
from pgleaderlock._base.logging import StructuredLogger
from pgleaderlock._election.engine import Engine
from pgleaderlock._election.ledger import Identity, Ledger
from pgleaderlock._election.releasing import CANCELLED_END_S, Ended
from pgleaderlock._election.role import NEVER, Board, Role, make_role
from pgleaderlock._election.roster import News, Roster
from pgleaderlock._election.settings import Setup
from pgleaderlock._lock.callbacks import CallbackRegistry, Dispatcher
from pgleaderlock._lock.fsm import Input
from pgleaderlock._lock.work import Failure, OnFailure, Restarts, error_of
from pgleaderlock._pg.listener import listen
from pgleaderlock.errors import LockError, NotLeader, ShutdownError, StaleEpoch
from pgleaderlock.gate import LeaderGate, Watchdog
from pgleaderlock.models import LeaderToken, LockState
from pgleaderlock.observer import (
    Acquired,
    DrainBegan,
    DrainEnded,
    Event,
    Lost,
    RoleAdded,
    WorkBegan,
    WorkEnded,
    WorkFailed,
)

__all__ = ["Run", "is_loss"]

T = TypeVar("T")
# How long to wait for a forced end.
FORCED_END_S = 5.0
RELEASE_POLL_S = 0.005
STANDALONE_EPOCH = 0

OpenLedger = Callable[[Setup, Identity, int | None], Awaitable[Ledger]]
"""The number is the id of this run's previous session, if there was one."""


class Run:
    """The task of an election, which can be started any number of times, and the requests that an application makes."""

    def __init__(
        self,
        roster: Roster,
        news: News,
        callbacks: CallbackRegistry,
        *,
        clock: Clock,
        rng: random.Random,
        log: StructuredLogger,
        open_ledger: OpenLedger,
    ) -> None:
        self._roster = roster
        self._news = news
        self._callbacks = callbacks
        self._open_ledger = open_ledger
        self._clock, self._rng, self._log = clock, rng, log
        self._instance = ""
        self._begin_anew()
        _runs.add(self)

    def _begin_anew(self) -> None:
        self.engine: Engine | None = None
        self.task: asyncio.Task[None] | None = None
        self._dispatcher: Dispatcher | None = None
        self.last_error: Exception | None = None
        self._giving_up: set[asyncio.Task[bool]] = set()
        self._listening: AsyncConnection[Any] | None = None

    def leave_behind(self) -> None:
        """Abandon the run, because this is a forked child or the loop is closed, and go back to the initial state.

        The old objects are kept alive: their finalizers would close what belongs to the parent process, or wait on a
        closed loop.
        """
        _left_behind.append((vars(self).copy(), vars(self._roster).copy(), self._news.queues))
        self._roster.begin_anew()
        self._news.begin_anew()
        self._begin_anew()

    # --- The task

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done()

    async def start(self) -> bool:
        """Start the task; returns after the first attempt to connect. False if it is running already.

        See `LeaderElection.start`.
        """
        await self._outlive_loop()
        if self.running:
            return False
        self.last_error = None
        self._instance = str(uuid.uuid4())  # a new run does not know how long an earlier one had to wait
        self._log = self._log.bind(node=self._roster.setup.node_id)
        self._news.begin(self._log, self._holder_identity())
        self._home = asyncio.get_running_loop()
        self._first_attempt = asyncio.Event()
        self._dispatcher = Dispatcher(self._callbacks, self._clock, self._log)
        self._dispatcher.start()
        self._roster.start(self._make_role)
        self._engine_over = threading.Event()
        running = self._run(self._dispatcher)
        running.send(None)  # enter its `try`: a task cancelled before its first step would skip the `finally`
        self.task = task = asyncio.create_task(running, name="pgleaderlock election")
        if not self._roster.setup.enabled or self._roster.setup.standalone:
            return True
        attempted = asyncio.ensure_future(self._first_attempt.wait())
        try:
            await any_done(attempted, task)
        except asyncio.CancelledError:
            # An `async with` that is cancelled in `__aenter__` never calls `__aexit__`: leave nothing running.
            await cancel_and_wait(task)
            raise
        finally:
            attempted.cancel()
        return True

    async def stop(self, timeout_s: float | None) -> None:
        """Release everything and end. See `LeaderElection.shutdown`."""
        await self._outlive_loop()
        task = self.task
        if task is None or task.done():
            return
        if self.engine is not None:
            self.engine.ask_stop()
        else:
            task.cancel()
        if self.inside():
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

    async def _outlive_loop(self) -> None:
        """If the loop was closed while the task was running, the run cannot go on: free the locks from this loop."""
        if not self.running or not self._home.is_closed():
            return
        for gate in self._roster.gates.values():
            gate.close("lost")
        if (engine := self.engine) is not None and self._roster.setup.heartbeat_thread:
            engine.ask_stop(force=True)
            await asyncio.to_thread(self._engine_over.wait, FORCED_END_S)
        elif engine is not None:
            await engine.abandon()
            if self._listening is not None:
                self._listening.pgconn.finish()
        self.leave_behind()

    async def _run(self, dispatcher: Dispatcher) -> None:
        setup = self._roster.setup
        hard_stop_after_s = setup.hard_stop_after_s
        watchdog = Watchdog(self._roster.watched_gates, hard_stop_after_s, self._clock) if hard_stop_after_s else None
        try:
            await asyncio.sleep(0)
            if not setup.enabled:
                self._log.warning("election_disabled")
                await asyncio.get_running_loop().create_future()
            elif setup.standalone:
                self._log.warning("standalone", detail="leading every role WITHOUT a database: for a single instance")
                self._lead_alone(list(self._roster.roles.values()))
                await asyncio.get_running_loop().create_future()
            elif setup.heartbeat_thread:
                await run_in_thread(self._run_engine, self._force_stop)
            else:
                await self._run_engine()
        finally:
            self.engine = None
            for role in self._roster.roles.values():
                self._stop_role(role)
            dispatcher.emit("on_stopped")
            await within(FORCED_END_S, dispatcher.drained())
            await dispatcher.close()
            self.announce()
            self._news.tell([None])
            if watchdog is not None:
                watchdog.close()

    def _stop_role(self, role: Role) -> None:
        if role.driver.state is LockState.STOPPED:
            return
        untold = self._roster.setup.standalone and role.in_term  # an engine reports the end of its terms itself
        role.gate.close("released")
        role.stopped()
        if untold:
            self.notify(Lost(role.name, role.epoch, "released"))

    async def _run_engine(self) -> None:
        """Run the engine on the current loop: the application's, or that of the heartbeat thread."""
        setup = self._roster.setup
        # Set before the roles are read: a role added meanwhile is either among them, or handed to the engine.
        self.engine = engine = self._make_engine(setup)
        listener = asyncio.ensure_future(self._listen(engine)) if setup.listens else None
        try:
            await engine.run(self._roster.roles.values())
        finally:
            if listener is not None:
                await cancel_and_wait(listener)
            self._engine_over.set()

    def _make_engine(self, setup: Setup) -> Engine:
        identity = setup.identity(self._instance)
        board = Board(
            settings=setup,
            identity=identity,
            clock=self._clock,
            rng=self._rng,
            log=self._log,
            owner=self,
        )
        return Engine(lambda previous: self._open_ledger(setup, identity, previous), board)

    async def _listen(self, engine: Engine) -> None:
        setup = self._roster.setup
        settings = setup.listener_connection()
        await listen(
            setup.dsn,
            settings,
            setup.channel,
            engine.wake,
            clock=self._clock,
            rng=self._rng,
            log=self._log,
            opened=self._listens_on,
        )

    def _listens_on(self, connection: AsyncConnection[Any]) -> None:
        self._listening = connection

    def _force_stop(self) -> None:
        if self.engine is not None:
            self.engine.ask_stop(force=True)

    def _make_role(self, name: str) -> Role:
        keys, gate = self._roster.setup.keys[name], self._roster.gates[name]
        return make_role(name, keys, gate, self, clock=self._clock, rng=self._rng, log=self._log)

    def _holder_identity(self) -> str:
        setup = self._roster.setup
        if setup.standalone:
            return f"{setup.node_id}-standalone"
        return setup.identity(self._instance).holder_identity

    async def on_engine(self, work: Callable[[Engine | None], T]) -> T:
        """Run a function on the engine's loop, or here if there is no engine. It runs even if the caller is
        cancelled."""
        engine, task = self.engine, self.task
        if engine is None or task is None:
            return work(None)
        asked = engine.call(lambda: work(engine))
        await any_done(asyncio.wrap_future(asked), task)
        return asked.result() if asked.done() else work(None)

    def inside(self) -> bool:
        """Is the caller a callback or a work of this election? Then it must not wait for its own end."""
        if self._dispatcher is not None and self._dispatcher.inside():
            return True
        return any(role.works.inside() for role in self._roster.roles.values())

    # --- Called by the engine, on its loop

    def notify(self, event: Event) -> None:
        self._news.observers.notify(event)

    def emit(self, callback: str, /, *args: object) -> None:
        if self._dispatcher is not None:
            self._at_home(self._dispatcher.emit, callback, *args)

    async def quiet(self, role: Role) -> None:
        if asyncio.get_running_loop() is self._home:
            await self._work_ended(role)
        elif not self._home.is_closed():
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._work_ended(role), self._home))

    def failed(self, error: Exception) -> None:
        self.last_error = error
        self.emit("on_error", error)

    def attempted(self) -> None:
        self._at_home(self._first_attempt.set)

    def announce(self) -> None:
        if self._home.is_closed():
            self._force_stop()  # an engine on its own thread must stop leading: the application's loop has ended
        if changed := self._news.changed():
            self._at_home(self._news.tell, changed)

    def _at_home(self, call: Callable[..., None], *args: object) -> None:
        """Call it on the application's loop, at once if this is that loop. Does nothing if that loop is closed."""
        if asyncio.get_running_loop() is self._home:
            call(*args)
        else:
            with contextlib.suppress(RuntimeError):
                self._home.call_soon_threadsafe(call, *args)

    async def _work_ended(self, role: Role) -> None:
        """Cancel the work of this role; return once it has ended and the callbacks have run."""
        role.works.interrupt()
        await role.works.ended()
        await role.gate.wait_idle()
        if self._dispatcher is not None:
            await self._dispatcher.drained()

    # --- Asked by the application: roles that come and go

    async def add_role(self, name: str, key: int | None) -> None:
        role = self._roster.add(name, key, self._make_role if self.running else None)
        await self.on_engine(lambda engine: self._take_in(name, role, engine))

    def _take_in(self, name: str, role: Role | None, engine: Engine | None) -> None:
        with self._roster.changing:
            self._roster.told.add(name)
            self.notify(RoleAdded(name))
        setup = self._roster.setup
        if role is not None and engine is not None:
            engine.add(role)
        elif role is not None and setup.standalone and setup.enabled:
            self._lead_alone([role])

    async def remove_role(self, name: str, timeout_s: float | None) -> None:
        gate = self._roster.gate(name)
        if self.inside():
            raise LockError("remove_role waits for the work of the role: call it outside of callbacks and works")
        await self.drain(name, timeout_s)
        if not await self.on_engine(lambda engine: self._drop(name, gate, engine)):
            raise LockError(f"role {name!r} has not been given up yet, and stays: remove it again")

    def _drop(self, name: str, gate: LeaderGate, engine: Engine | None) -> bool:
        """Forget a role; False if it is still held."""
        with self._roster.changing:
            if self._roster.gates.get(name) is not gate:
                return True  # removed meanwhile by another caller
            role = self._roster.roles.get(name)
            if role is not None and engine is not None and not engine.forget(role):
                return False
            if role is not None and engine is None:
                gate.close("released")
                role.stopped()
            self._news.forget(name)
            self._roster.remove(name)
        return True

    # --- Asked by the application: giving up

    async def step_down(self, name: str, timeout_s: float | None) -> None:
        role = self._running_role(name)
        if self._roster.setup.standalone and role.driver.state is LockState.LEADER:
            giving_up = self._give_up_alone([role], timeout_s)
            if not self.inside():
                await asyncio.shield(giving_up)
            return
        token = role.gate.token
        # Check the token too: with a heartbeat thread, the gate opens a moment before the state changes.
        if self.engine is None or (token is None and not role.in_term):
            return
        epoch = role.epoch if token is None else token.epoch
        self.engine.ask_release(name, epoch)
        if self.inside():
            return
        over = asyncio.ensure_future(_term_over(role, token))
        try:
            await asyncio.wait([over], timeout=timeout_s)
            if not over.done() and self.engine is not None:
                self.engine.ask_release(name, epoch, force=True)
                await asyncio.wait([over], timeout=FORCED_END_S)
        finally:
            over.cancel()

    async def drain(self, name: str | None, timeout_s: float | None) -> bool:
        roles = self._roster.named(name)
        for role in roles:
            role.drain(with_node=name is None)
        if not self.running:
            return True
        if self._roster.setup.standalone:
            giving_up = self._give_up_alone(roles, timeout_s)
            return False if self.inside() else await asyncio.shield(giving_up)
        for role in roles:
            if role.gate.token is not None:
                role.gate.drain()  # now, and not at the engine's next tick
        return await self._drained(roles, timeout_s, everything=name is None)

    async def _drained(self, roles: list[Role], timeout_s: float | None, *, everything: bool) -> bool:
        """Ask the engine to drain, and wait until the work has ended. After the timeout, cancel the work and wait
        briefly for its end; then release the roles anyway."""

        def ask(engine: Engine | None) -> Ended | None:
            return engine.drain(roles, everything=everything) if engine is not None else None

        engine, task = self.engine, self.task
        if self.inside():  # a work that drains its own role is cancelled at its next await
            if engine is not None:
                engine.call(lambda: ask(engine))
            return False
        told = await self.on_engine(ask)
        if told is None or task is None:
            return True
        drained = asyncio.wrap_future(told)
        try:
            over = await any_done(drained, task, timeout_s=timeout_s)
            if not over:
                for role in roles:
                    role.gate.cancel_acting(but=asyncio.current_task())
                over = await any_done(drained, task, timeout_s=CANCELLED_END_S)
            if not over and (engine := self.engine) is not None:
                for role in roles:
                    engine.ask_release(role.name, role.epoch, force=True)
                await any_done(drained, task, timeout_s=FORCED_END_S)
            return told.done() and told.result()
        finally:
            drained.cancel()

    async def resume(self, name: str | None) -> None:
        roles, everything = self._roster.named(name), name is None
        if self.running and self._roster.setup.standalone:
            drained = [role for role in roles if role.drained]
            for role in drained:
                role.resume()
            self._lead_alone(drained)
        elif self.running:
            await self.on_engine(
                lambda engine: engine.resume(roles, everything=everything) if engine is not None else None
            )

    def _running_role(self, name: str) -> Role:
        if (role := self._roster.role(name)) is None:
            raise _not_running()
        return role

    # --- Asked by the application: work

    async def lead(
        self, name: str, work: Callable[[LeaderToken], Coroutine[Any, Any, T]], on_failure: OnFailure
    ) -> T | None:
        gate, restarts = self._roster.gate(name), Restarts(on_failure, self._clock)
        if not self.running:
            raise _not_running()
        role = self._running_role(name)
        self._recover(role)
        with role.works.caller(lambda: self._left(role)):
            return await self._lead(name, gate, work, restarts)

    async def _lead(
        self, name: str, gate: LeaderGate, work: Callable[[LeaderToken], Coroutine[Any, Any, T]], restarts: Restarts
    ) -> T | None:
        while await self._unless_over(name, gate, gate.wait_open):
            role = self._running_role(name)
            try:
                token = gate.require_leader()
            except NotLeader:
                continue
            restarts.begin()
            if (task := await self._run_work(role, token, work)) is None:
                continue
            if (error := error_of(task)) is None:
                return task.result()
            failure = restarts.after(error)
            await self._after(failure, role, token)
            if failure.delay_s is None:
                return task.result()
        return None

    async def _run_work(
        self, role: Role, token: LeaderToken, work: Callable[[LeaderToken], Coroutine[Any, Any, T]]
    ) -> "asyncio.Task[T] | None":
        """Run the work in this term; None if it ended because the term ended."""
        watcher = asyncio.ensure_future(_interrupt_when_closed(role, token))
        error: BaseException | None = None
        self._tell(WorkBegan(role.name, token.epoch))
        try:
            task = await role.works.run(lambda: work(token))
            error = None if task is None else error_of(task)
            if error is not None and is_loss(error, role.gate, token):
                task = error = None
            return task
        finally:
            watcher.cancel()
            self._tell(WorkEnded(role.name, token.epoch, error))

    def _tell(self, event: Event) -> None:
        """Notify the observers from the application's loop: they are called on the engine's loop."""
        if (engine := self.engine) is None:
            self.notify(event)
        else:
            engine.call(lambda: self.notify(event))

    async def _after(self, failure: Failure, role: Role, token: LeaderToken) -> None:
        """A work has failed: report it, give the role up if `on_failure` says so, and wait until the restart."""
        error, delay_s = failure.error, failure.delay_s
        self._log.error("work_failed", exc_info=error, role=role.name, epoch=token.epoch, error=repr(error))
        role.works.failed(failure)
        self._tell(WorkFailed(role.name, token.epoch, error))
        try:
            if failure.gives_up and self._roster.roles.get(role.name) is role:
                await self.step_down(role.name, None)
            if delay_s is not None:
                await self._unless_over(role.name, role.gate, lambda: self._clock.sleep(delay_s))
        finally:
            if delay_s is not None:
                self._recover(role, failure)

    def _left(self, role: Role) -> None:
        """The last caller of `lead` was cancelled."""
        self._log.info("lead_cancelled", role=role.name, detail="it is given up until lead is entered again")
        if self.engine is not None:
            self.engine.wake()
        elif self._roster.setup.standalone and role.driver.state is LockState.LEADER:
            self._give_up_alone([role], None)

    def _recover(self, role: Role, failure: Failure | None = None) -> None:
        """A failed work is about to be restarted: compete again if the role was given up."""
        if not role.works.recover(failure):
            return
        if self.engine is not None:
            self.engine.wake()
        elif self.running and self._roster.setup.standalone:
            self._lead_alone([role])

    async def _unless_over(self, name: str, gate: LeaderGate, wait: Callable[[], Coroutine[Any, Any, object]]) -> bool:
        """Await `wait()`; False if the election ends or the role is removed first."""
        gone = self._roster.gone(name)
        if self.task is None or self._roster.gates.get(name) is not gate:  # checked last: another thread may remove it
            return False
        waiting = asyncio.ensure_future(wait())
        try:
            await any_done(waiting, self.task, gone)
            return waiting.done() and not self.task.done() and not gone.done()
        finally:
            waiting.cancel()

    # --- Without a database

    def _lead_alone(self, roles: list[Role]) -> None:
        now, namespace = self._clock.now(), self._roster.setup.namespace
        led = [role for role in roles if not (role.given_up or role.in_term or role.driver.stopping)]
        for role in led:
            token = LeaderToken(role.name, STANDALONE_EPOCH, self._holder_identity(), namespace)
            role.driver.feed(Input.START)
            role.won(token, at=now, settled_at=now, opens_at=now, deadline=NEVER)
        for role in led:
            self.notify(Acquired(role.name, role.epoch, 0.0, from_other=False))
        self.announce()

    def _give_up_alone(self, roles: list[Role], timeout_s: float | None) -> "asyncio.Task[bool]":
        """Give the roles up, then lead those again that are not drained. True if no work was left.

        It runs in a separate task: a caller that is cancelled meanwhile must not leave a role neither led nor free.
        """
        led = [role for role in roles if role.driver.state is LockState.LEADER]
        for role in led:
            role.gate.drain()
            self.notify(DrainBegan(role.name))
            role.releasing(stopping=False)
        giving_up = asyncio.create_task(self._given_up_alone(led, timeout_s, waits=not self.inside()))
        self._giving_up.add(giving_up)
        giving_up.add_done_callback(self._giving_up.discard)
        return giving_up

    async def _given_up_alone(self, led: list[Role], timeout_s: float | None, *, waits: bool) -> bool:
        if led and waits:
            await within(timeout_s, asyncio.gather(*(self._work_ended(role) for role in led)))
        clean = {role.name: not role.gate.in_flight for role in led}
        for role in led:
            if role.driver.state is LockState.RELEASING:  # otherwise the run, and with it the term, has ended meanwhile
                role.gate.close("released")
                role.released(clean=clean[role.name])
                self.notify(Lost(role.name, role.epoch, "released"))
            self.notify(DrainEnded(role.name, clean[role.name]))
        self.announce()
        self._lead_alone(led)
        return all(clean.values())


def _not_running() -> LockError:
    return LockError("the election is not running: call start() first, or use it as a context manager")


async def _term_over(role: Role, token: LeaderToken | None) -> None:
    if token is not None:
        await role.gate.wait_over(token)
    while role.driver.state is LockState.RELEASING:  # noqa: ASYNC110 - it follows its gate in one round trip
        await asyncio.sleep(RELEASE_POLL_S)


def is_loss(error: BaseException, gate: LeaderGate, token: LeaderToken) -> bool:
    """Did the work fail because its gate or fence refused to act in this term, before the election noticed the loss?

    False if it was refused for another reason while its gate was open: `lead` would restart such a work in a busy loop.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(is_loss(each, gate, token) for each in error.exceptions)
    match error:
        case NotLeader(role=token.role):
            return error.epoch == token.epoch or gate.token is not token
        case StaleEpoch():
            return gate.token is not token or not gate.is_leader
        case _:
            return False


async def _interrupt_when_closed(role: Role, token: LeaderToken) -> None:
    await role.gate.wait_closed(token)
    role.works.interrupt()


_runs: "weakref.WeakSet[Run]" = weakref.WeakSet()
_left_behind: list[object] = []


def _let_runs_begin_anew() -> None:
    for run in list(_runs):
        run.leave_behind()


os.register_at_fork(after_in_child=_let_runs_begin_anew)
