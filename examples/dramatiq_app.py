"""Dramatiq with messages that one worker process of many sends periodically: `dramatiq dramatiq_app`.

Needs PG_DSN, and REDIS_URL for the broker.
"""

import os

# -- shown in docs/jobs.md
import dramatiq
from dramatiq.brokers.redis import RedisBroker

from pgleaderlock.contrib.dramatiq import Periodic, one_at_a_time
from pgleaderlock.sync import LeaderLock

broker = RedisBroker(url=os.environ["REDIS_URL"])
dramatiq.set_broker(broker)
periodic = Periodic(LeaderLock.for_name(os.environ["PG_DSN"], "periodic"))
broker.add_middleware(periodic)


@periodic.every(1)
@dramatiq.actor
@one_at_a_time("poll")
def poll() -> None:
    print("polled", flush=True)


# -- until here
