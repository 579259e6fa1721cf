"""Decorators: only the leader runs a function, or one process at a time runs it.

`leader_only` asks a gate at each call of the function; a running call counts as work in flight, which a drain waits
for. If it is given no election, it uses one for the whole process, which is created from the configuration or the
environment and started with the first call, never on import. Functions may be plain or async.
"""

import asyncio
import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, ParamSpec, TypeVar, get_args

from pgleaderlock import election as aio
from pgleaderlock._config.load import dsn_in_environment
from pgleaderlock._pg.conninfo import Dsn, libpq_knows_where
from pgleaderlock.errors import ConfigurationError, NotLeader
from pgleaderlock.gate import LeaderGate
from pgleaderlock.keys import DEFAULT_NAMESPACE
from pgleaderlock.sync import background
from pgleaderlock.sync.election import LeaderElection
from pgleaderlock.sync.guard import LeadershipGuard, acquire_leadership

__all__ = ["Otherwise", "advisory_lock", "dsn_of_environment", "leader_only"]

P = ParamSpec("P")
R = TypeVar("R")
Otherwise = Literal["raise", "skip", "wait"]
AnyElection = LeaderElection | aio.LeaderElection


@contextlib.contextmanager
def advisory_lock(
    name: str,
    dsn: Dsn | None = None,
    *,
    timeout_s: float | None = None,
    namespace: str = DEFAULT_NAMESPACE,
    allow_pooler: bool = False,
) -> Iterator[LeadershipGuard]:
    """Hold a lock while the block runs: `with advisory_lock("import"):`. Also a decorator of plain functions.

    dsn: the database. None: PG_CONN_STRING, PG_DSN, or libpq's variables.
    timeout_s: how long to wait for the lock, in seconds, before `LockNotAcquired`; 0 tries once, None waits.

    The lock is on a separate connection, which is probed and has a lease. If its session ends inside the block, the
    end of the block raises `DatabaseError`.
    """
    found = dsn_of_environment() if dsn is None else dsn
    guard = acquire_leadership(found, name, timeout_s=timeout_s, namespace=namespace, allow_pooler=allow_pooler)
    with guard:
        yield guard


def leader_only(
    role: str, *, election: AnyElection | None = None, otherwise: Otherwise = "raise", timeout_s: float | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function run only while this process may act for the role: `@leader_only("billing")`.

    election: a running one, async or not. None: one for the process, from its configuration or environment.
    otherwise: what a call does while this process may not act. "raise" raises `NotLeader`; "skip" returns None without
        calling the function; "wait" waits until this process leads, and raises `NotLeader` after `timeout_s` seconds.

    The gate is asked once, before the function begins: a long-running function should ask again, or fence its writes.
    """
    if otherwise not in get_args(Otherwise):
        raise ConfigurationError(f'otherwise={otherwise!r} is not usable: "raise", "skip" or "wait"')
    if election is None:
        _process.needs(role)

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        if not callable(fn):
            raise ConfigurationError('leader_only takes the name of the role: @leader_only("billing")')
        wait_s = timeout_s if otherwise == "wait" else 0.0

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            gate = _gate(_process.election() if election is None else election, role)
            if wait_s != 0 and not gate.is_leader:
                background.call(lambda: gate.wait_open(wait_s))
            with contextlib.ExitStack() as work:
                if _enter(gate, work, skip=otherwise == "skip"):
                    return fn(*args, **kwargs)
            return None

        @functools.wraps(fn)
        async def call_async(*args: P.args, **kwargs: P.kwargs) -> Any:
            used = await asyncio.to_thread(_process.election) if election is None else election
            gate = _gate(used, role)
            if wait_s != 0 and not gate.is_leader:
                await gate.wait_open(wait_s)
            with contextlib.ExitStack() as work:
                if _enter(gate, work, skip=otherwise == "skip"):
                    return await fn(*args, **kwargs)  # type: ignore[misc]
            return None

        return call_async if inspect.iscoroutinefunction(fn) else call  # type: ignore[return-value]

    return decorate


def _gate(election: AnyElection, role: str) -> LeaderGate:
    gate = election.gate(role)
    return gate if isinstance(gate, LeaderGate) else gate.aio


def _enter(gate: LeaderGate, work: contextlib.ExitStack, *, skip: bool) -> bool:
    """Enter `acting()`; False if the gate is shut and `skip` is set. Otherwise a shut gate raises."""
    try:
        work.enter_context(gate.acting())
    except NotLeader:
        if not skip:
            raise
        return False
    return True


class _ProcessElection:
    """The election of the process, for every `leader_only` without an election."""

    def __init__(self) -> None:
        self._roles: dict[str, None] = {}
        self._election: LeaderElection | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._starting = threading.Lock()
        self._running = False

    def needs(self, role: str) -> None:
        with self._starting:
            self._roles[role] = None
            if self._election is not None and role not in self._election.roles:
                self._election.add_role(role)

    def election(self) -> LeaderElection:
        """The running election: created at the first call, and started again in a forked child."""
        with self._starting:
            if self._election is None:
                self._election = LeaderElection.from_config(roles=list(self._roles))
            if not self._running:
                self._election.start()
                self._running = True
            return self._election


_process = _ProcessElection()
os.register_at_fork(after_in_child=_process._begin_anew)  # noqa: SLF001 - our own class


def dsn_of_environment() -> str:
    """The database of PG_CONN_STRING, PG_DSN or libpq's variables; `ConfigurationError` if there is none."""
    if (found := dsn_in_environment()) is not None:
        return found
    if libpq_knows_where():
        return ""
    raise ConfigurationError("which database? Pass dsn=…, or set PG_DSN or libpq's variables (PGHOST, …)")
