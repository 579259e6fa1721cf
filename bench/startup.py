"""The figures of the command line: how long it takes to answer, against the import of the database driver alone.

Each call is a new process, in turns. The quickest counts, because other load on the machine can only add time.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable

from bench.harness import Figure, in_turns

__all__ = ["startup"]

BLOCKS = 15
PROGRAM = ("-m", "pgleaderlock")


async def startup(dsn: str) -> list[Figure]:
    """`--help` and `status`, from the start of the process to its end."""
    with tempfile.TemporaryDirectory(prefix="pgl-bench-") as compiled:
        # As after an installation: the first block writes the bytecode, whatever the environment says.
        env = {**os.environ, "PYTHONPYCACHEPREFIX": compiled, "PYTHONDONTWRITEBYTECODE": ""}
        took = await in_turns(
            {
                "driver": _process(env, "-c", "import psycopg"),
                "help": _process(env, *PROGRAM, "--help"),
                "status": _process(env, *PROGRAM, "status", "--name", "nobody", "--dsn", dsn),
            },
            BLOCKS,
        )
    driver_s, help_s, status_s = (min(took[name]) for name in ("driver", "help", "status"))
    against = f"import psycopg {driver_s * 1e3:.0f} ms (best of {BLOCKS})"
    return [
        Figure(
            "pgleaderlock --help, against import psycopg", f"{help_s * 1e3:.0f} ms", against, help_s / driver_s, 1.5
        ),
        Figure(
            "pgleaderlock status, against import psycopg", f"{status_s * 1e3:.0f} ms", against, status_s / driver_s, 2.5
        ),
    ]


def _process(env: dict[str, str], *args: str) -> Callable[[int], Awaitable[float]]:
    async def run(_block: int) -> float:
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            sys.executable, *args, env=env, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        code = await process.wait()
        took_s = time.perf_counter() - began
        # 1 is an answer of `status`: nobody leads.
        assert code in (0, 1), f"{args} exits with {code}"
        return took_s

    return run
