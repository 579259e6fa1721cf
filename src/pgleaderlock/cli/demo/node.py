"""One node of the demo: a process that competes for the lock and works while it leads.

It gets its commands and reports what happens in JSON lines:

    stdin    {"dsn": …, "lock": …, "health_interval_s": …, …}   first of all
             {"do": "step_down"}                                then as needed; the end of the pipe ends the node
    stdout   {"event": "state", "at": …, "state": "follower"}
             {"event": "claim", "before": …, "after": …, "first": true}   "I lead": the first of a term, then the others
             {"event": "asked", "at": …}                        the step-down has arrived
             {"event": "woke", "at": …, "state": …, "is_leader": …}       the first instruction after a SIGCONT

Times are the boot-time clock, which all processes of a machine share. It must never outlive the demo: the end of
standard input is its end.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys

from pgleaderlock._base.clock import BOOT_CLOCK
from pgleaderlock.errors import ShutdownError
from pgleaderlock.lock import LeaderLock
from pgleaderlock.models import LockState

__all__ = ["main"]

WORK_EVERY_S = 0.05
SHUTDOWN_TIMEOUT_S = 2.0


def tell(event: str, **fields: object) -> None:
    """Report an event: one line in one write, because it may also be called from a signal handler."""
    os.write(1, json.dumps({"event": event, **fields}).encode() + b"\n")


async def run() -> None:
    orders = await _open_orders()
    plan = json.loads(await orders.readline())
    lock = LeaderLock.for_name(
        plan["dsn"],
        plan["lock"],
        health_interval_s=plan["health_interval_s"],
        health_timeout_s=plan["health_timeout_s"],
        session_lease_s=plan["session_lease_s"],
        standby_wait_s=plan["standby_wait_s"],
    )

    @lock.on_state_change
    def on_state_change(_before: LockState, now: LockState) -> None:
        tell("state", at=BOOT_CLOCK.now(), state=now.value)

    def on_wake(*_: object) -> None:
        # Python runs this before the event loop can notice the end of the connection.
        tell("woke", at=BOOT_CLOCK.now(), state=lock.state.value, is_leader=lock.is_leader)

    signal.signal(signal.SIGCONT, on_wake)
    await lock.start()
    leading = asyncio.ensure_future(lock.lead(lambda: work(lock)))
    try:
        while order := await orders.readline():
            if json.loads(order)["do"] == "step_down":
                tell("asked", at=BOOT_CLOCK.now())
                await lock.step_down()
    finally:
        with contextlib.suppress(ShutdownError):
            await lock.shutdown(SHUTDOWN_TIMEOUT_S)
        await leading


async def work(lock: LeaderLock) -> None:
    """The work that only one node at a time may do. It checks before each piece of work, as every work should."""
    first = True
    while True:
        before = BOOT_CLOCK.now()
        if lock.is_leader:
            tell("claim", before=before, after=BOOT_CLOCK.now(), first=first)
            first = False
        await asyncio.sleep(WORK_EVERY_S)


async def _open_orders() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def main() -> None:
    # A killed demo no longer reads.
    with contextlib.suppress(BrokenPipeError):
        asyncio.run(run())


if __name__ == "__main__":
    main()
