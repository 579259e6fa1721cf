"""Starts what the lock server is measured with: wrk as the client, etcd and Redis as peers.

Each peer listens on loopback, keeps its data in a temporary folder, and is as durable as we are: etcd always is, and
Redis is set to append every write to its file and sync it.
"""

import asyncio
import contextlib
import re
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from tools.debian import Tool, provide

__all__ = ["Wrk", "etcd", "free_port", "lock_server", "redis", "running"]

READY_TIMEOUT_S = 20.0
END_TIMEOUT_S = 15.0
READY_POLL_S = 0.02


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def running(command: Sequence[str], port: int, env: dict[str, str] | None = None) -> AsyncIterator[int]:
    """Run a process that listens on this port; yields its pid. Ends it with SIGTERM, and if that fails, by force."""
    with tempfile.TemporaryFile() as said:
        process = await asyncio.create_subprocess_exec(*command, env=env, stdout=said, stderr=said)
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not await _listens(port):
                    if process.returncode is not None:
                        said.seek(0)
                        raise RuntimeError(f"{command[0]} ended: {said.read().decode(errors='replace')[-2000:]}")
                    await asyncio.sleep(READY_POLL_S)  # no event tells that a port is open
            yield process.pid
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    async with asyncio.timeout(END_TIMEOUT_S):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


@contextlib.asynccontextmanager
async def lock_server(store: str, *options: str) -> AsyncIterator[tuple[str, int]]:
    """Run `pgleaderlock serve`, as a user starts it; yields its URL and its pid."""
    port = free_port()
    command = [sys.executable, "-m", "pgleaderlock", "serve", "--store", store, "--port", str(port), *options]
    async with running(command, port) as pid:
        yield f"http://127.0.0.1:{port}", pid


@contextlib.asynccontextmanager
async def etcd() -> AsyncIterator[tuple[str, int]]:
    """Run etcd; yields its URL and its pid."""
    tool = provide("etcd-server")
    client, peer = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="pgl-etcd-") as folder:
        url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        command = [str(tool.path), "--data-dir", folder, "--log-level", "error"]
        command += ["--listen-client-urls", url, "--advertise-client-urls", url]
        command += ["--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url]
        command += ["--initial-cluster", f"default={peer_url}"]
        async with running(command, client, {**tool.env, "ETCD_UNSUPPORTED_ARCH": ""}) as pid:
            yield url, pid


@contextlib.asynccontextmanager
async def redis() -> AsyncIterator[tuple[int, int]]:
    """Run Redis; yields its port and its pid."""
    tool = provide("redis-server")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="pgl-redis-") as folder:
        command = [str(tool.path), "--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
        command += ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        async with running(command, port, tool.env) as pid:
            yield port, pid


class Wrk:
    """wrk with a Lua script that makes the requests."""

    def __init__(self, script: str) -> None:
        self._tool: Tool = provide("wrk")
        self._script = script

    async def run(self, url: str, connections: int, duration_s: int, threads: int = 1) -> float:
        """Requests per second. Raises unless all were answered with 200."""
        with tempfile.TemporaryDirectory(prefix="pgl-wrk-") as folder:
            path = Path(folder) / "script.lua"
            path.write_text(self._script)
            command = [str(self._tool.path), "-c", str(connections), "-t", str(threads), "-d", f"{duration_s}s"]
            process = await asyncio.create_subprocess_exec(
                *command,
                *("-s", str(path), "--latency", url),
                env=self._tool.env,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            output = (await process.communicate())[0].decode()
        found = re.search(r"Requests/sec:\s+([\d.]+)", output)
        assert process.returncode == 0, output
        assert found is not None, output
        assert "Non-2xx" not in output, output
        assert "Socket errors" not in output, output
        return float(found[1])
