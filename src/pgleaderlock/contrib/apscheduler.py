"""APScheduler 3: of many processes with the same jobs, one runs them. Needs the extra `apscheduler`.

    class Scheduler(LeaderOnly, BlockingScheduler): ...

    scheduler = Scheduler(leader_lock=LeaderLock.for_name(dsn, "jobs"))

What it does not promise: a job that is running when leadership is lost goes on. It should ask `leader_lock.is_leader`
before each act, or fence its writes.
"""

from typing import Any

from pgleaderlock.sync import LeaderLock

try:
    from apscheduler.schedulers.base import BaseScheduler
except ImportError as error:
    raise ImportError(
        "pgleaderlock.contrib.apscheduler needs APScheduler 3: pip install 'pgleaderlock[apscheduler]'", name=error.name
    ) from error

__all__ = ["LeaderOnly"]

# How often a follower checks whether it leads; it is also woken by a change.
LOOK_S = 1.0


class LeaderOnly(BaseScheduler):
    """Makes a scheduler look for due jobs only while its process leads. Name it before the scheduler's class.

    Jobs that were due before it led are late: `misfire_grace_time` and `coalesce` of each job decide whether they run.
    The processes may have separate job stores, or share one.
    """

    def __init__(self, gconfig: Any = None, *, leader_lock: LeaderLock, **options: Any) -> None:
        """The lock is started and shut down with the scheduler; the other arguments are those of the scheduler."""
        self.leader_lock = leader_lock
        super().__init__({} if gconfig is None else gconfig, **options)
        leader_lock.on_acquired(self._look_now)

    def start(self, *args: Any, **options: Any) -> None:
        """Start the lock, and then the scheduler."""
        self.leader_lock.start()
        super().start(*args, **options)

    def shutdown(self, wait: bool = True) -> None:
        """Stop the scheduler, then release the lock: with `wait`, after the last job has ended."""
        try:
            super().shutdown(wait)
        finally:
            self.leader_lock.shutdown()

    def _process_jobs(self) -> Any:
        return super()._process_jobs() if self.leader_lock.is_leader else LOOK_S

    def _look_now(self) -> None:
        if self.running:
            self.wakeup()
