"""APScheduler 3 in any number of processes, of which one runs the jobs. Needs PG_DSN; SIGTERM ends it."""

import os
import signal
import sys
from typing import Any

# -- shown in docs/jobs.md
from apscheduler.schedulers.blocking import BlockingScheduler

from pgleaderlock.contrib.apscheduler import LeaderOnly
from pgleaderlock.sync import LeaderLock


class Scheduler(LeaderOnly, BlockingScheduler):
    """The processes have the same jobs; the one that leads runs them."""


scheduler = Scheduler(leader_lock=LeaderLock.for_name(os.environ["PG_DSN"], "jobs"))


@scheduler.scheduled_job("interval", seconds=1, misfire_grace_time=30)
def poll() -> None:
    print("polled by", os.getpid(), flush=True)


# -- until here


def stop(*_: Any) -> None:
    sys.exit(0)  # leaves the scheduler's loop; the lock is released as the interpreter ends


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    print("started", flush=True)
    scheduler.start()
