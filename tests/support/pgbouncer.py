"""pgbouncer in front of a test server, in any pool mode.

Imports `support.deps`, psycopg and the standard library. It ends only the process that it started.
"""

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from support.deps import debian_tool

__all__ = ["PoolMode", "point_at", "pooler", "restart"]

PoolMode = Literal["session", "transaction", "statement"]
READY_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 10.0
STARTS_MAX = 5


@contextlib.contextmanager
def pooler(dsn: str, pool_mode: PoolMode, settings: Mapping[str, str] | None = None) -> Iterator[str]:
    """Runs pgbouncer in front of the server of `dsn`; gives the DSN that leads through it."""
    tool = debian_tool("pgbouncer")
    account = _account()
    folder = Path(tempfile.mkdtemp(prefix="pgl-pool-"))
    try:
        if account is not None:
            # The checkout may lie where only root can go, and this folder is the account's.
            tool = tool.copied_to(folder / "tool")

        def start() -> subprocess.Popen[bytes]:
            with (folder / "pgbouncer.log").open("ab") as log:
                return subprocess.Popen(
                    [tool.path, "-q", folder / "pgbouncer.ini"],
                    env=tool.env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    start_new_session=True,
                    user=account.pw_uid if account else None,
                    group=account.pw_gid if account else None,
                    extra_groups=[] if account else None,
                )

        for _ in range(STARTS_MAX):
            port = _free_port()

            def configure(dsn: str, port: int = port) -> None:
                _configure(folder, dsn, pool_mode, port, settings or {})

            configure(dsn)
            running = _running[str(port)] = _Running(start, configure, start())
            try:
                if _ready(running.process, port):
                    yield make_conninfo(dsn, host="127.0.0.1", port=port)
                    return
            finally:
                del _running[str(port)]
                running.process.kill()
                running.process.wait(STOP_TIMEOUT_S)
        raise RuntimeError("pgbouncer did not start:\n" + (folder / "pgbouncer.log").read_text()[-2000:])
    finally:
        shutil.rmtree(folder)


@dataclass
class _Running:
    start: Callable[[], "subprocess.Popen[bytes]"]
    configure: Callable[[str], None]
    process: "subprocess.Popen[bytes]"


_running: dict[str, _Running] = {}
"""By port."""


def restart(dsn: str) -> None:
    """Kill the pooler of this DSN, whatever its clients are at, and start it again."""
    port = str(conninfo_to_dict(dsn)["port"])
    running = _running[port]
    running.process.kill()
    running.process.wait(STOP_TIMEOUT_S)
    running.process = running.start()
    if not _ready(running.process, int(port)):
        raise RuntimeError("pgbouncer did not start again")


def point_at(pooled: str, dsn: str) -> None:
    """Lead the pooler of the DSN `pooled` to the server of `dsn`, as soon as it is told to RELOAD or starts again."""
    _running[str(conninfo_to_dict(pooled)["port"])].configure(dsn)


def _account() -> pwd.struct_passwd | None:
    # pgbouncer refuses to run as root, as PostgreSQL does.
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


def _configure(folder: Path, dsn: str, pool_mode: PoolMode, port: int, settings: Mapping[str, str]) -> None:
    server = conninfo_to_dict(dsn)
    users = folder / "users.txt"
    options = {
        "listen_addr": "127.0.0.1",
        "listen_port": str(port),
        "unix_socket_dir": "",
        "auth_type": "scram-sha-256",
        "auth_file": str(users),
        "pool_mode": pool_mode,
        **settings,
    }
    there = f"host={server['host']} port={server['port']}"
    # By its name, too: a RELOAD leaves alone what has come in by the star.
    lines = ["[databases]", f"{server['dbname']} = {there}", f"* = {there}", "[pgbouncer]"]
    lines += [f"{name} = {value}" for name, value in options.items()]
    ini = folder / "pgbouncer.ini"
    ini.write_text("\n".join(lines) + "\n")
    users.write_text(f'"{server["user"]}" "{server["password"]}"\n')
    account = _account()
    if account is not None:
        for path in (folder, ini, users):
            os.chown(path, account.pw_uid, account.pw_gid)
    users.chmod(0o600)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _ready(process: subprocess.Popen[bytes], port: int) -> bool:
    # Nothing signals that pgbouncer listens, so this looks every 10 ms until it does, has ended, or time is up.
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.01)
        else:
            return process.poll() is None
    return False
