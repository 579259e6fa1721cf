"""Celery: of many beats, one sends; of many workers, one at a time runs a task. Needs the extra `celery`.

    celery -A billing beat --scheduler pgleaderlock.contrib.celery.LeaderScheduler

What it does not promise: a tick between the end of a leader and its successor's first probe is not sent. If every tick
counts, let the task claim its slot with `pgleaderlock.sync.once`.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from pgleaderlock._base.logging import get_logger
from pgleaderlock._pg.conninfo import Dsn
from pgleaderlock.contrib._jobs import Otherwise, exclusive
from pgleaderlock.errors import ConfigurationError, PgLeaderLockError
from pgleaderlock.sync import LeaderLock
from pgleaderlock.sync.easy import dsn_of_environment

try:
    from celery import current_app
    from celery.beat import PersistentScheduler
except ImportError as error:
    raise ImportError(
        "pgleaderlock.contrib.celery needs celery: pip install 'pgleaderlock[celery]'", name=error.name
    ) from error

__all__ = ["LeaderOnly", "LeaderScheduler", "one_at_a_time"]

P = ParamSpec("P")
R = TypeVar("R")
CLOSE_S = 5.0

_log = get_logger("pgleaderlock")


class LeaderOnly:
    """Lets a beat scheduler send only while its process leads: `class Mine(LeaderOnly, DatabaseScheduler)`.

    A follower runs through the same schedule without sending, so it does not catch up on old ticks after a takeover.

    Settings of the Celery app: `pgleaderlock_dsn` (or PG_CONN_STRING, PG_DSN, libpq's variables), `pgleaderlock_beat`
    (the lock's name; default `celery-beat/` and the app's name), `pgleaderlock_options` (of `LeaderLock`).
    """

    app: Any
    leader_lock: LeaderLock | None = None

    def setup_schedule(self) -> None:
        """Start the lock here: only the process that sends calls this, not one that only shows the settings."""
        super().setup_schedule()  # type: ignore[misc]  # of the scheduler that this is mixed into
        conf = self.app.conf
        name = conf.get("pgleaderlock_beat") or f"celery-beat/{self.app.main or 'celery'}"
        dsn = _dsn(conf)
        self.leader_lock = LeaderLock.for_name(
            dsn_of_environment() if dsn is None else dsn, name, **conf.get("pgleaderlock_options", {})
        )
        self.leader_lock.start()

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """A task is due: send it if this process leads at this moment, by the clock."""
        if self.leader_lock is not None and self.leader_lock.is_leader:
            super().apply_entry(entry, producer=producer)  # type: ignore[misc]
        else:
            _log.debug("task_not_sent", task=entry.name, reason="another beat leads")

    def close(self) -> None:
        """Beat ends: release the lock, so that another beat takes over at once."""
        try:
            super().close()  # type: ignore[misc]
        finally:
            if self.leader_lock is not None:
                try:
                    self.leader_lock.shutdown(CLOSE_S)
                except PgLeaderLockError as error:
                    _log.warning("shutdown_failed", error=error)


class LeaderScheduler(LeaderOnly, PersistentScheduler):
    """Beat's own scheduler, for any number of beats: give each its own file with `--schedule`."""


def _dsn(conf: Any) -> Dsn | None:
    dsn: Dsn | None = conf.get("pgleaderlock_dsn")
    if dsn is not None and not isinstance(dsn, str) and not callable(dsn):
        raise ConfigurationError(f"pgleaderlock_dsn must be a string or a function, not {type(dsn).__name__}")
    return dsn


def one_at_a_time(
    name: str, *, dsn: Dsn | None = None, timeout_s: float | None = 0.0, otherwise: Otherwise = "skip"
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Run a task in one worker at a time, whatever the number of messages: below `@app.task`.

    dsn: the database. None: the app's `pgleaderlock_dsn`, PG_CONN_STRING, PG_DSN, or libpq's variables.
    timeout_s: how long to wait for the end of another run, in seconds; None waits without a limit.
    otherwise: what to do if another run has not ended by then. "skip" returns None without running the task; "raise"
        raises `LockNotAcquired`, for `autoretry_for`.

    If the lock's session ends during the run, `DatabaseError` is raised at its end: another run may have begun.
    """
    return exclusive(name, lambda: _dsn(current_app.conf) if dsn is None else dsn, timeout_s, otherwise)
