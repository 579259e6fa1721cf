"""Runs the figures, prints them, and exits with 1 when one is missed."""

import asyncio
import logging
import platform
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench import guard, lock
from bench.harness import Figure
from pgleaderlock.embedded import EmbeddedPostgres

FIGURES: dict[str, Callable[[str], Awaitable[Figure]]] = {
    "lock.start": lock.start,
    "lock.loss": lock.loss,
    "lock.hot_standby": lock.hot_standby,
    "guard.cycle": guard.cycle,
    "guard.lost": guard.lost,
}


def main(wanted: list[str]) -> int:
    chosen = {name: run for name, run in FIGURES.items() if not wanted or any(word in name for word in wanted)}
    if not chosen:
        print(f"no such figure: {' '.join(wanted)}; there are {', '.join(FIGURES)}", file=sys.stderr)
        return 2
    # The nodes are killed on purpose here; their complaints are not the figures.
    logging.getLogger("pgleaderlock").setLevel(logging.CRITICAL)
    missed = 0
    with tempfile.TemporaryDirectory(prefix="pgl-bench-", dir="/tmp") as folder:
        Path(folder).chmod(0o711)  # the server's account must be able to pass through
        with EmbeddedPostgres(Path(folder) / "pg", port=0) as server:
            print(f"Python {platform.python_version()}, PostgreSQL {server.version}, asyncio, TCP on loopback")
            for run in chosen.values():
                figure = asyncio.run(_measure(run, server.dsn))
                print(figure, flush=True)
                missed += not figure.holds
    print(f"{len(chosen) - missed} of {len(chosen)} figures hold")
    return 1 if missed else 0


async def _measure(run: Callable[[str], Awaitable[Figure]], dsn: str) -> Figure:
    return await run(dsn)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
