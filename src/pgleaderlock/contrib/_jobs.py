"""What the integrations of job frameworks share: one run of a function at a time, among all workers."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar, get_args

from pgleaderlock._base.logging import get_logger
from pgleaderlock._pg.conninfo import Dsn
from pgleaderlock.errors import ConfigurationError, LockNotAcquired
from pgleaderlock.sync import advisory_lock

__all__ = ["Otherwise", "exclusive", "one_at_a_time"]

P = ParamSpec("P")
R = TypeVar("R")
Otherwise = Literal["skip", "raise"]

_log = get_logger("pgleaderlock")


def one_at_a_time(
    name: str, *, dsn: Dsn | None = None, timeout_s: float | None = 0.0, otherwise: Otherwise = "skip"
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Run the function in one worker at a time, whatever the number of messages: `@one_at_a_time("import")`.

    dsn: the database. None: PG_CONN_STRING, PG_DSN, or libpq's variables.
    timeout_s: how long to wait for the end of another run, in seconds; None waits without a limit.
    otherwise: what to do if another run has not ended by then. "skip" returns None without calling the function;
        "raise" raises `LockNotAcquired`, so that the framework can retry the message later.

    If the lock's session ends during the run, `DatabaseError` is raised at its end: another run may have begun.
    """
    return exclusive(name, lambda: dsn, timeout_s, otherwise)


def exclusive(
    name: str, dsn: Callable[[], Dsn | None], timeout_s: float | None, otherwise: Otherwise
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """The same with a DSN that is only known when the function is called."""
    if not isinstance(name, str):
        raise ConfigurationError('one_at_a_time takes the name of the lock: @one_at_a_time("import")')
    if otherwise not in get_args(Otherwise):
        raise ConfigurationError(f'otherwise={otherwise!r} is not usable: "skip" or "raise"')

    def decorate(fn: Callable[P, R]) -> Callable[P, R | None]:
        if inspect.iscoroutinefunction(fn):
            raise ConfigurationError(f"one_at_a_time decorates a plain function, and {fn.__qualname__} is async")

        @functools.wraps(fn)
        def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
            with contextlib.ExitStack() as held:
                try:
                    held.enter_context(advisory_lock(name, dsn(), timeout_s=timeout_s))
                except LockNotAcquired:
                    if otherwise == "raise":
                        raise
                    _log.info("run_skipped", lock=name, reason="another run has not ended")
                    return None
                return fn(*args, **kwargs)

        return run

    return decorate
