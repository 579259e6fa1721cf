"""Runs the figures, prints them, and exits with 1 when one is missed."""

import asyncio
import logging
import platform
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench import election, fence, guard, lock, roles, server
from bench.harness import Figure
from pgleaderlock.embedded import EmbeddedPostgres

Measurement = Callable[[str], Awaitable[Figure | list[Figure]]]

FIGURES: dict[str, Measurement] = {
    "lock.start": lock.start,
    "lock.loss": lock.loss,
    "lock.hot_standby": lock.hot_standby,
    "guard.cycle": guard.cycle,
    "guard.lost": guard.lost,
    "fence.throughput": fence.throughput,
    "fence.bump": fence.bump,
    "election.gate": election.gate,
    "election.failover_hot": election.failover_hot,
    "election.handover": election.handover,
    "election.failover_defaults": election.failover,
    "roles.drain": roles.drain,
    "roles.steady": roles.steady,
    "server.acquire": server.acquire,
    "server.postgres": server.postgres,
    "server.cycle": server.cycle,
    "server.under_attack": server.under_attack,
    "server.many_locks": server.many_locks,
}


def main(wanted: list[str]) -> int:
    chosen = {name: run for name, run in FIGURES.items() if not wanted or any(word in name for word in wanted)}
    if not chosen:
        print(f"no such figure: {' '.join(wanted)}; there are {', '.join(FIGURES)}", file=sys.stderr)
        return 2
    # The nodes are killed on purpose here; their complaints are not the figures.
    logging.getLogger("pgleaderlock").setLevel(logging.CRITICAL)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="pgl-bench-", dir="/tmp") as folder:
        Path(folder).chmod(0o711)  # the server's account must be able to pass through
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
