"""Measures the figures, prints them, and exits with 1 if one misses its limit."""

import asyncio
import logging
import platform
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench import attacks, election, fence, frameworks, guard, lease, lock, readme, roles, server, standbys, startup
from bench.harness import Figure
from pgleaderlock.embedded import EmbeddedPostgres

Measurement = Callable[[str], Awaitable[Figure | list[Figure]]]

FIGURES: dict[str, Measurement] = {
    "cli.startup": startup.startup,
    "lock.start": lock.start,
    "lock.probe": lock.probe,
    "lock.loss": lock.loss,
    "lock.hot_standby": lock.hot_standby,
    "lock.readme": readme.readme,
    "lock.standbys": standbys.standbys,
    "guard.cycle": guard.cycle,
    "guard.lost": guard.lost,
    "fence.throughput": fence.throughput,
    "fence.bump": fence.bump,
    "election.gate": election.gate,
    "election.heartbeat": election.heartbeat,
    "election.failover_hot": election.failover_hot,
    "election.handover": election.handover,
    "election.failover_defaults": election.failover,
    "frameworks.stops": frameworks.stops,
    "lease.failover": lease.failover,
    "lease.tick": lease.tick,
    "lease.standbys": lease.standbys,
    "roles.drain": roles.drain,
    "roles.steady": roles.steady,
    "server.acquire": server.acquire,
    "server.postgres": server.postgres,
    "server.cycle": server.cycle,
    "server.under_attack": attacks.under_attack,
    "server.hold": attacks.hold,
    "server.peers": server.peers,
    "server.many_locks": server.many_locks,
}


def main(wanted: list[str]) -> int:
    chosen = {name: run for name, run in FIGURES.items() if not wanted or any(word in name for word in wanted)}
    if not chosen:
        print(f"no such figure: {' '.join(wanted)}; there are {', '.join(FIGURES)}", file=sys.stderr)
        return 2
    # The benchmarks kill nodes on purpose: do not mix the nodes' log lines with the figures.
    logging.getLogger("pgleaderlock").setLevel(logging.CRITICAL)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="pgl-bench-", dir="/tmp") as folder:
        Path(folder).chmod(0o711)  # the server's account needs access to what is inside
        with EmbeddedPostgres(Path(folder) / "pg", port=0) as server:
            print(f"Python {platform.python_version()}, PostgreSQL {server.version}, asyncio, TCP on loopback")
            for run in chosen.values():
                measured = asyncio.run(_measure(run, server.dsn))
                print(*measured, sep="\n", flush=True)
                figures += measured
    held = sum(figure.holds for figure in figures)
    print(f"{held} of {len(figures)} figures hold")
    return 0 if held == len(figures) else 1


async def _measure(run: Measurement, dsn: str) -> list[Figure]:
    measured = await run(dsn)
    return measured if isinstance(measured, list) else [measured]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
