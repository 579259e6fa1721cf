"""Keep trying, where nobody would start this program again; after a loss, compete again.

Exit codes: 0 ended by SIGTERM; 2 or 75 when PATIENCE_S (ten minutes) are over, for the last reason. Needs PG_DSN.
"""

import asyncio
import os
import signal
import sys

from pgleaderlock import (
    CoordinationError,
    LockNotAcquired,
    RetryContext,
    acquire_leadership_with_retry,
)
from pgleaderlock.errors import ConfigurationError, DatabaseError

DATABASE, NOT_WON = 2, 75
PATIENCE_S = float(os.environ.get("PATIENCE_S", "600"))


async def send_invoices() -> None:
    print("leading: sending invoices")
    await asyncio.Event().wait()  # your work: here it never ends


# -- shown in docs/guard.md
class Patience:
    """A policy: every second, until it takes too long. Ready-made ones are in `pgleaderlock.retry`."""

    def next_delay_s(self, ctx: RetryContext) -> float | None:
        print(f"attempt {ctx.attempt}:", ctx.last_error or "somebody else leads")
        return 1.0 if ctx.elapsed_s < PATIENCE_S else None


async def lead() -> None:
    while True:
        guard = await acquire_leadership_with_retry(os.environ["PG_DSN"], "billing", Patience())
        try:
            async with guard, asyncio.TaskGroup() as tasks:
                work = tasks.create_task(send_invoices())
                await guard.lost()
                work.cancel()
        except DatabaseError as lost:
            print("lost:", lost)


# -- until here


async def main() -> int:
    leading = asyncio.create_task(lead())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leading.cancel)
    try:
        await leading
    except asyncio.CancelledError:
        print("stopped: nothing is held")
    except (CoordinationError, ConfigurationError) as error:
        print("gave up:", error)
        return NOT_WON if isinstance(error, LockNotAcquired) else DATABASE
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
