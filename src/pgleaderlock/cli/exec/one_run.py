"""Runs one command once, while this node leads: the procedure of `exec` and `lock exec`, and the four ways to lead.

`run_once` is the procedure. `WithLock`, `WithElection`, `WithSlot` and `WithLease` lead with a plain lock, behind the
gate of an election, for one tick of the clock, or with a lease of a lock server. Each competes, runs the command
through `OneRun`, and releases leadership.

What it does not promise. When the server ends our session (a restart, `pg_terminate_backend`), the lock is free
at once, and a successor may start its command while ours is still ending within its grace. A frozen supervisor cannot
stop its command, and what the command has already sent will arrive. A command that must never act twice needs a fence
where it acts: it gets the epoch of its term, or the fencing token of its lease.

What it promises: the command is started after leadership was won, and at most once. When leadership ends, it gets
SIGTERM in the same iteration of the event loop; with a lease, also one grace before the lease's deadline if no renewal
succeeds. In an election, a successor's gate opens only after our command has had its grace.

It must never start the command twice, never release leadership while a process of the command's group lives, and never
print a DSN.
"""

import abc
import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypedDict

import click

from pgleaderlock._base.aio import any_done, cancel_and_wait, settle, within
from pgleaderlock._base.clock import LOOK_S
from pgleaderlock._pg.explain import explained, hopeless
from pgleaderlock.cli.exec.supervise import FORWARDED_SIGNALS, Supervised
from pgleaderlock.cli.logging import configure
from pgleaderlock.cli.options import ServerOptions, in_option_words, make_lock, warn
from pgleaderlock.cli.output import EXIT_LOST, EXIT_NOT_WON, LockKey, exit_code_for_signal
from pgleaderlock.cli.service import Watched
from pgleaderlock.cli.status import who_holds
from pgleaderlock.client import AsyncLease, AsyncLockClient, LeaseLost, LockHeld
from pgleaderlock.election import ElectionOptions, LeaderElection
from pgleaderlock.errors import (
    LockError,
    LockServerError,
    NotLeader,
    PgLeaderLockError,
    ShutdownError,
    UnsafeSessionError,
)
from pgleaderlock.keys import key_pair
from pgleaderlock.lock import LeaderLock, LockOptions
from pgleaderlock.models import LeaderToken, LockState, RetryContext
from pgleaderlock.retry import ExponentialBackoff
from pgleaderlock.slots import OnSlotFailure, once

__all__ = [
    "CommandFailed",
    "CommandStopped",
    "Job",
    "NotWon",
    "OneRun",
    "SlotOptions",
    "WithElection",
    "WithLease",
    "WithLock",
    "WithSlot",
    "run_once",
]

# After the command has ended, a server that does not answer must not delay the exit code for longer than this.
SHUTDOWN_TIMEOUT_S = 5.0
HOLDER_TIMEOUT_S = 2.0
# The delay between two tries that do not wait at the server. It is short, because the user waits for the command.
RETRY_BASE_S, RETRY_MAX_S = 0.2, 2.0
# These signals end the wait for leadership; the others are only for the command.
ENDING_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})


class NotWon(PgLeaderLockError):
    """Another node leads, or holds the lock. The command was not run."""

    exit_code = EXIT_NOT_WON


class CommandStopped(PgLeaderLockError):
    """Leadership, or the lease, was lost, so the command was stopped."""

    exit_code = EXIT_LOST


class CommandFailed(PgLeaderLockError):
    """The command has ended with another exit code than 0."""


class SlotOptions(TypedDict, total=False):
    """The slot, as keywords of `once`."""

    every: str | float | None
    slot: str | None
    time_zone: str
    on_failure: OnSlotFailure


# --- The procedure


@dataclass(frozen=True)
class Job:
    """The command to run, and its conditions."""

    command: Sequence[str]
    env: Mapping[str, str]
    wait_s: float
    """How long to compete; 0 is one try."""
    grace_s: float
    log_level: str | None
    hold_for_s: float = 0.0
    """The shortest time for which leadership is kept, from the start of a command that succeeds."""

    @property
    def waited(self) -> str:
        return f" (waited {self.wait_s:g} s)" if self.wait_s else ""


class WayToLead(Protocol):
    @property
    def loss(self) -> str:
        """The text that says that leadership was lost."""
        ...

    async def lead(self, run: "OneRun") -> None:
        """Compete, run the command while leading, and release leadership.

        Returns after the command was run, or after a signal has ended the wait for leadership. Raises `NotWon`, or the
        error that made leading impossible.
        """
        ...


async def run_once(job: Job, way: WayToLead) -> int:
    """Run the command while leading, and return its exit code."""
    run = OneRun(job)
    run.catch_signals()
    await way.lead(run)
    if run.failure is not None:
        raise run.failure
    if run.skipped is not None:
        click.echo(run.skipped, err=True)
        return 0
    if not run.began:
        return exit_code_for_signal(run.interrupted_by.result())
    if not run.all_gone:
        warn("a process of the command has survived SIGKILL and may still act")
    if run.lost:
        raise CommandStopped(f"{way.loss}, so the command was stopped: {run.reason}")
    assert run.exit_code is not None
    return run.exit_code


@dataclass
class OneRun:
    """The command, from the moment this node leads until no process of its group is left."""

    job: Job
    began: bool = False
    called_off: bool = False
    lost: bool = False
    exit_code: int | None = None
    all_gone: bool = True
    reason: Exception | None = None
    skipped: str | None = None
    """Why there was nothing to do."""
    failure: Exception | None = None
    """Why the command could not be run: it was not found, or is not executable (127, 126)."""
    over: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The command has ended, or could not be started."""
    interrupted_by: "asyncio.Future[int]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _child: Supervised | None = None
    _early_signals: list[int] = field(default_factory=list)
    _hold_over: asyncio.Event = field(default_factory=asyncio.Event)

    async def work(self, reason: Callable[[], Exception | None], env: Mapping[str, str] | None = None) -> None:
        """The work for `lead`, which cancels it when leadership ends; `reason` then says why. Raises no other error.

        `lead` starts its work again in the next term, but the command runs only once: a second call does nothing, and
        neither does a call after a signal has ended the wait.
        """
        if self.began or self.called_off or self.interrupted_by.done():
            return
        self.began = True
        configure(self.job.log_level or "WARNING")
        try:
            hold_until = asyncio.get_running_loop().time() + self.job.hold_for_s
            self._child = child = await Supervised.start(self.job.command, {**self.job.env, **(env or {})})
            await self._see_through(child, reason)
            if self.exit_code == 0:
                await within(max(0.0, hold_until - asyncio.get_running_loop().time()), self._hold_over.wait())
        except asyncio.CancelledError:
            # Leadership has ended before the command has, or before the command was known to have started.
            self.lost = self.exit_code is None
            self.reason = self.reason or reason()
        except Exception as error:
            self.failure = error
        finally:
            settle(self.over)

    async def _see_through(self, child: Supervised, reason: Callable[[], Exception | None]) -> None:
        for signum in self._early_signals:
            child.forward(signum)
        try:
            try:
                self.exit_code = await child.wait()
            except asyncio.CancelledError:
                self.reason = reason()  # ask now: while the command ends, other errors may follow
                raise
            finally:
                # Also after the command has ended by itself: what it left in the background would outlive the lock.
                self.all_gone = await child.stop(self.job.grace_s)
        finally:
            child.close()

    def on_signal(self, signum: int) -> None:
        if self.exit_code is not None:
            self._hold_over.set()  # the command has ended: a signal now ends the rest of the minimum hold
        elif self._child is not None:
            self._child.forward(signum)
        elif self.began:
            self._early_signals.append(signum)
        elif signum in ENDING_SIGNALS and not self.interrupted_by.done():
            self.interrupted_by.set_result(signum)

    def catch_signals(self) -> None:
        """Pass signals on to the command from now on."""
        loop = asyncio.get_running_loop()
        for signum in FORWARDED_SIGNALS:
            # A signal that this process has inherited as ignored (nohup, a background job) stays ignored.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                loop.add_signal_handler(signum, self.on_signal, signum)


# --- With the database: a lock, or an election


class _WithDatabase(abc.ABC):
    """What a lock and an election share: start, compete, wait for the command, shut down, explain a failure."""

    _run: OneRun

    def __init__(
        self,
        dsn: str,
        key: LockKey,
        contender: LeaderLock | LeaderElection,
        *,
        probe_host: str = "",
        probe_port: int | None = None,
    ) -> None:
        self.loss = f"lost leadership of {key}"
        self._dsn = dsn
        self._key = key
        self._contender = contender
        self._probe_host = probe_host
        self._probe_port = probe_port
        self._warned = ""

    async def lead(self, run: OneRun) -> None:
        self._run = run
        async with Watched(self._contender, host=self._probe_host, port=self._probe_port) as around:
            try:
                await self._contender.start()
                leading = asyncio.ensure_future(self._work())
                around.ready()
                await self._compete(leading)
                if run.began:
                    await run.over
                run.called_off = True
            finally:
                around.stopping()
                with contextlib.suppress(ShutdownError):
                    await self._contender.shutdown(SHUTDOWN_TIMEOUT_S)
            with contextlib.suppress(LockError):
                await leading  # it has ended by now
        if run.began or run.interrupted_by.done():
            return
        error = self._failure()
        if error is not None:
            raise _for_people(error)
        raise NotWon(f"not won: {self._key} is held by {await self._holder()}{run.job.waited}")

    @abc.abstractmethod
    async def _work(self) -> None:
        """Run the command once leadership is won."""

    @abc.abstractmethod
    async def _compete(self, leading: "asyncio.Future[None]") -> None:
        """Return when the command runs, or when it is certain that it never will. `leading` is the task of `_work`."""

    @abc.abstractmethod
    def _failure(self) -> Exception | None:
        """Why leadership was not won; None if another node leads."""

    async def _holder(self) -> str:
        """The current holder, if the server answers soon. It may be another one than when we tried the lock."""
        with contextlib.suppress(PgLeaderLockError, TimeoutError):
            async with asyncio.timeout(HOLDER_TIMEOUT_S):
                return await who_holds(self._dsn, "pgleaderlock exec", self._key)
        return "somebody else"

    def _warn_of(self, error: Exception) -> None:
        if str(error) != self._warned:
            self._warned = str(error)
            warn(f"{error} (trying again for up to {self._run.job.wait_s:g} s)")


def _for_people(error: Exception) -> PgLeaderLockError:
    """The error with advice for the command line."""
    if isinstance(error, UnsafeSessionError):
        return UnsafeSessionError(error.reason, in_option_words(str(error)))
    return explained(error) if isinstance(error, PgLeaderLockError) else LockError(str(error))


class WithLock(_WithDatabase):
    """Leads with a plain lock. It is also the lock's retry strategy, and so learns why each try has failed."""

    _contender: LeaderLock

    def __init__(self, dsn: str, key: LockKey, options: LockOptions) -> None:
        # No reconnect grace: the lock is not held while reconnecting, so the command would have to be stopped anyway.
        super().__init__(dsn, key, make_lock(dsn, key, **(options | LockOptions(retry_strategy=self))))
        self._last_error: Exception | None = None
        self._completed_one = False
        self._back_off = ExponentialBackoff(RETRY_BASE_S, RETRY_MAX_S)

    async def _work(self) -> None:
        await self._contender.lead(lambda: self._run.work(lambda: self._contender.last_error))

    async def _compete(self, leading: "asyncio.Future[None]") -> None:
        run = self._run
        await any_done(leading, run.over, run.interrupted_by, timeout_s=run.job.wait_s or None)

    def next_delay_s(self, ctx: RetryContext) -> float | None:
        if self._run.began:
            return RETRY_MAX_S  # the competition is over: `lead` only waits for the end of the command
        self._last_error = error = ctx.last_error
        if error is None:
            self._completed_one = True
        # If an earlier try has worked, a later one may work again: a password may just be rotated.
        if self._run.job.wait_s == 0 or (error is not None and hopeless(error) and not self._completed_one):
            return None
        if error is not None:
            self._warn_of(error)
        return self._back_off.next_delay_s(ctx)

    def _failure(self) -> Exception | None:
        return self._last_error


class WithElection(_WithDatabase):
    """Leads behind the gate of an election (`--fenced`). The command gets the role and the epoch of its term."""

    _contender: LeaderElection

    def __init__(
        self,
        dsn: str,
        key: LockKey,
        election: LeaderElection,
        *,
        switched_off: str,
        probe_host: str,
        probe_port: int | None,
    ) -> None:
        """`switched_off` names the setting that forbids this node to lead; empty if there is none."""
        super().__init__(dsn, key, election, probe_host=probe_host, probe_port=probe_port)
        assert key.name is not None
        self._role = key.name
        self._switched_off = switched_off
        self._news = asyncio.Event()
        self._looked = bool(switched_off)
        """The first try is over, whatever its result."""
        self._connected = False
        self._error: Exception | None = None

    async def lead(self, run: OneRun) -> None:
        self._contender.on_state_change(self._on_state_change)
        self._contender.on_error(self._on_error)
        watching = asyncio.ensure_future(self._watch())
        await asyncio.sleep(0)  # it watches before the election starts
        try:
            await super().lead(run)
        finally:
            watching.cancel()

    async def _work(self) -> None:
        await self._contender.lead(self._role, self._run_command)

    async def _run_command(self, token: LeaderToken) -> None:
        await self._run.work(self._why_shut, _of_term(token))

    def _why_shut(self) -> Exception | None:
        """Why the gate is shut; None while it is open."""
        try:
            self._contender.gate(self._role).require_leader()
        except NotLeader as refused:
            return (self._contender.last_error if refused.reason == "lost" else None) or refused
        return None

    async def _compete(self, leading: "asyncio.Future[None]") -> None:
        # Once the lock is won, wait for the gate to open, however long that takes.
        loop = asyncio.get_running_loop()
        run, wait_s = self._run, self._run.job.wait_s
        deadline = loop.time() + wait_s
        while not (run.began or leading.done() or run.interrupted_by.done()):
            left_s = None
            if self._contender.state(self._role) is not LockState.LEADER:
                left_s = deadline - loop.time() if wait_s else None
                if self._is_hopeless() or (self._looked if left_s is None else left_s <= 0):
                    return
            self._news.clear()
            news = asyncio.ensure_future(self._news.wait())
            await any_done(leading, run.interrupted_by, news, timeout_s=left_s)
            news.cancel()

    def _is_hopeless(self) -> bool:
        return self._error is not None and not self._connected and hopeless(self._error)

    def _failure(self) -> Exception | None:
        if self._switched_off:
            return NotWon(f"not won: this node is switched off, it never leads ({self._switched_off})")
        error = self._error or self._contender.last_error
        return error if self._contender.leader(self._role) is None else None

    async def _watch(self) -> None:
        """End the first try at each change: the election then knows who leads, or that it cannot find out."""
        async for _ in self._contender.changes():
            self._looked = True
            self._news.set()

    def _on_state_change(self, _role: str, _old: LockState, new: LockState) -> None:
        if new is LockState.LEADER:
            self._connected, self._error = True, None
        self._news.set()

    def _on_error(self, error: Exception) -> None:
        self._error = error
        if self._run.job.wait_s and not self._run.began:
            self._warn_of(error)
        self._news.set()


def _of_term(token: LeaderToken) -> dict[str, str]:
    """The variables that a command needs to fence its writes."""
    return {
        "PGLEADERLOCK_ROLE": token.role,
        "PGLEADERLOCK_EPOCH": str(token.epoch),
        "PGLEADERLOCK_NAMESPACE": token.namespace,
    }


class WithSlot:
    """Leads for one tick of the clock, or for one slot by name (`--once-per`, `--slot`): see `pgleaderlock.slots`."""

    def __init__(self, dsn: str, name: str, slot: SlotOptions, election: ElectionOptions) -> None:
        self.loss = f"lost leadership of {name}"
        self._dsn, self._name = dsn, name
        self._slot, self._election = slot, election
        self._run: OneRun

    async def lead(self, run: OneRun) -> None:
        self._run = run
        going = asyncio.ensure_future(once(self._dsn, self._name, self._run_command, **self._slot, **self._election))
        await any_done(going, run.interrupted_by)
        if not run.began and not going.done():
            await cancel_and_wait(going)
            return
        try:
            done = await going
        except (CommandFailed, CommandStopped):
            return  # the exit code shows the failure
        except PgLeaderLockError as error:
            if run.exit_code is None:
                raise _for_people(error) from error
            warn(f"how the command ended could not be recorded, so another node may run it again: {error}")
            return
        if done.outcome == "missed":
            raise NotWon(
                f"not won: the slot {done.slot} of {self._name} was not begun: another one ran until the tick was over"
            )
        if not done.ran:
            run.skipped = f"nothing to do: the slot {done.slot} of {self._name} is {done.outcome}"

    async def _run_command(self, token: LeaderToken) -> None:
        key1, key2 = key_pair(token.role, token.namespace)
        env = _of_term(token) | {"PGLEADERLOCK_KEY1": str(key1), "PGLEADERLOCK_KEY2": str(key2)}
        await self._run.work(lambda: LockError("the term has ended"), env)
        if not self._run.began:
            raise CommandStopped("a signal came before the command was started")
        if self._run.lost:
            raise CommandStopped(self.loss)
        if self._run.failure is not None:
            raise CommandFailed(str(self._run.failure))
        if self._run.exit_code:
            raise CommandFailed(f"exit code {self._run.exit_code}")


# --- With a lock server


class WithLease:
    """Leads with a lease of a lock server. The command gets the lease and its fencing token."""

    def __init__(self, server: ServerOptions, owner: str | None, name: str, ttl_s: float) -> None:
        self.loss = f"the lease of {name} is lost"
        self._server = server
        self._owner = owner
        self._name = name
        self._ttl_s = ttl_s

    async def lead(self, run: OneRun) -> None:
        async with self._server.async_client(self._owner) as client:
            acquiring = asyncio.ensure_future(client.acquire(self._name, self._ttl_s, wait_s=run.job.wait_s))
            await any_done(acquiring, run.interrupted_by)
            if not acquiring.done():
                acquiring.cancel()
                with contextlib.suppress(asyncio.CancelledError, PgLeaderLockError):
                    await client.release(await acquiring)
                return
            try:
                lease = acquiring.result()
            except LockHeld as held:
                raise NotWon(f"not won: {held}{run.job.waited}") from held
            try:
                await _keep_and_run(client, lease, run)
            finally:
                try:
                    await client.release(lease)
                except LockServerError as error:
                    warn(f"the lock was not released, its ttl ends it: {error}")


async def _keep_and_run(client: AsyncLockClient, lease: AsyncLease, run: OneRun) -> None:
    def reason() -> Exception:
        if not lease.valid:
            return lease.loss()
        return LeaseLost(lease.lock_name, "deadline", "no renewal was acknowledged in time")

    env = {
        "PGLEADERLOCK_LOCK_NAME": lease.lock_name,
        "PGLEADERLOCK_FENCING_TOKEN": str(lease.fencing_token),
        "PGLEADERLOCK_OWNER_ID": lease.owner_id,
        "PGLEADERLOCK_LEASE_ID": lease.lease_id,
    }
    client.start_heartbeat(lease)
    working = asyncio.ensure_future(run.work(reason, env))
    endangered = asyncio.ensure_future(_endangered(lease, run.job.grace_s))
    try:
        await any_done(working, endangered)
    finally:
        endangered.cancel()
        if not working.done():
            working.cancel()
        await working


async def _endangered(lease: AsyncLease, grace_s: float) -> None:
    """Return when the lease is lost, or when the command must be stopped in order to end before the deadline."""
    while lease.remaining_s > grace_s:
        await within(min(LOOK_S, lease.remaining_s - grace_s), lease.lost.wait())
