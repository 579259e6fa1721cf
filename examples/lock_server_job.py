"""A job that runs on one machine at a time, with a lock server instead of a database, and a write that is fenced.

Exit codes: 0 done, 2 lock server, 75 somebody else is at it, 76 the lease was lost. Needs PGLEADERLOCK_SERVER; the
report goes to the folder REPORTS.
"""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

from pgleaderlock.client import AsyncLease, AsyncLockClient, LeaseLost, LockHeld, LockServerError

SERVER, NOT_WON, LOST = 2, 75, 76


# -- the downstream side: the program that stores the result enforces the fence
class Reports:
    """Accepts a write only if its token is not lower than the highest it has seen."""

    def __init__(self, folder: Path) -> None:
        self._token, self._report = folder / "token", folder / "report"

    def write(self, text: str, token: int) -> None:
        seen = int(self._token.read_text()) if self._token.exists() else 0
        if token < seen:
            raise PermissionError(f"token {token} is stale: {seen} was here")
        self._token.write_text(str(token))
        self._report.write_text(text)


# -- shown in docs/client.md
async def job(lease: AsyncLease, reports: Reports) -> None:
    for step in range(1, 4):
        lease.raise_if_lost()
        await asyncio.sleep(0.1)  # the work
        reports.write(f"step {step} by {lease.owner_id}\n", lease.fencing_token)
        print("step", step, "with token", lease.fencing_token, flush=True)


async def main() -> int:
    reports = Reports(Path(os.environ["REPORTS"]))
    async with AsyncLockClient(os.environ["PGLEADERLOCK_SERVER"].split()) as client:
        try:
            lease = await client.acquire_with_retry("job-lock", ttl_s=10, max_retries=20, max_total_wait_s=2)
        except LockHeld as held:
            print("not now:", held)
            return NOT_WON
        except LockServerError as error:
            print("lock server:", error)
            return SERVER
        client.start_heartbeat(lease, interval_s=0.1)
        working = asyncio.create_task(job(lease, reports))
        losing = asyncio.create_task(lease.wait_lost())
        await asyncio.wait({working, losing}, return_when=asyncio.FIRST_COMPLETED)
        try:
            if losing.done():  # stop at once: somebody else may be at it already
                working.cancel()
                raise lease.loss()
            await working
        except LeaseLost as lost:
            print("lost:", lost)
            return LOST
        finally:
            losing.cancel()
            with contextlib.suppress(LockServerError):  # its ttl ends it
                await client.release(lease)
    print("done")
    return 0


# -- until here


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
