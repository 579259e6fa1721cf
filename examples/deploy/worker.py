"""A program that leads, with probes and metrics of its own: what kubernetes.yaml runs.

SIGTERM lets the work end, gives the role away and exits with 0. A work that raises ends the program with a traceback
and exit code 1: the orchestrator starts it again, and another node leads meanwhile. Needs PG_DSN;
PROBES_HOST (127.0.0.1) and PROBES_PORT (7422; 0 takes any) say where it answers.
"""

import asyncio
import os
import signal

from pgleaderlock import LeaderElection, LeaderToken
from pgleaderlock.metrics import ElectionMetrics
from pgleaderlock.probes import ProbeServer

DRAIN_TIMEOUT_S = 20.0


async def send_invoices(token: LeaderToken) -> None:
    print(f"leading: sending invoices, epoch {token.epoch}")
    try:
        await asyncio.Event().wait()  # your work: here it never ends
    finally:
        print("the work has ended")


async def main() -> None:
    asked_to_stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked_to_stop.set)
    # -- shown in docs/deployment.md
    election = LeaderElection(os.environ["PG_DSN"], "billing", node_id=os.environ.get("HOSTNAME"))
    metrics = ElectionMetrics(election)
    probes = ProbeServer(
        election,
        host=os.environ.get("PROBES_HOST", "127.0.0.1"),
        port=int(os.environ.get("PROBES_PORT", "7422")),
        metrics=metrics.exposition,
    )
    # The group is the outermost: when the work fails it ends the program, and at SIGTERM `lead` ends with the election.
    async with asyncio.TaskGroup() as tasks, probes, election:
        print("probes on port", probes.port)
        tasks.create_task(election.lead("billing", send_invoices))
        await asked_to_stop.wait()
        await election.drain(timeout_s=DRAIN_TIMEOUT_S)
    # -- until here


if __name__ == "__main__":
    asyncio.run(main())
