"""pgbench as a client, so that the server is measured and not Python."""

import asyncio
import re
import tempfile
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from pgleaderlock.embedded import find_binaries

__all__ = ["one_line", "run_pgbench", "tps"]


async def tps(dsn: str, script: str, writers: int, duration_s: int) -> float:
    """Transactions per second, without the time to connect."""
    with tempfile.TemporaryDirectory(prefix="pgl-bench-") as folder:
        path = Path(folder) / "script.sql"
        path.write_text(script)
        how = ("-n", "-M", "prepared", "-c", str(writers), "-j", "2", "-T", str(duration_s), "-f", str(path))
        output = await run_pgbench(dsn, *how)
    found = re.search(r"tps = ([\d.]+) \(without", output)
    assert found is not None, output
    assert "aborted" not in output, output
    return float(found[1])


async def run_pgbench(dsn: str, *arguments: str) -> str:
    parts = {key: str(value) for key, value in conninfo_to_dict(dsn).items()}
    binaries = find_binaries()
    process = await asyncio.create_subprocess_exec(
        str(binaries / "pgbench"),
        *arguments,
        *("-h", parts["host"], "-p", parts["port"], "-U", parts["user"], parts["dbname"]),
        env={"PGPASSWORD": parts["password"], "LD_LIBRARY_PATH": f"{binaries.parent / 'lib'}", "PATH": "/usr/bin"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    return output


def one_line(sql: str) -> str:
    """A statement in the form that a pgbench script needs."""
    return " ".join(sql.split())
