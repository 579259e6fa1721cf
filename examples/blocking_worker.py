"""A worker without asyncio: any number may run, one of them works. Needs PG_DSN; Ctrl-C or SIGTERM ends it."""

import os
import signal
import sys
import threading
import time

from pgleaderlock.sync import LeaderLock


# -- shown in docs/sync.md
def work(stop: threading.Event) -> None:
    """Called in each term, in the thread that called `lead`. Return soon after `stop` is set."""
    while not stop.wait(1.0):
        print("tick", time.time(), flush=True)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # leaves the block, which releases the lock
    with LeaderLock.for_name(os.environ["PG_DSN"], "billing") as lock:
        lock.lead(work)


# -- until here


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
