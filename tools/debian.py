"""Unpacks Debian's tools for tests and benchmarks below .deps: it needs no root, and installs nothing.

`provide("pgbouncer")` returns the program and the environment to run it in. Packages are fetched once, under a lock,
because test processes run side by side. Run as a script (`make test-deps`), it fetches everything beforehand.

Imports the standard library. Must never install anything, and never look at PATH for the tool itself: a machine's own
version would make results differ from one machine to the next.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FetchError", "Tool", "provide"]

DEPS = Path(__file__).resolve().parents[1] / ".deps"
ROOT = DEPS / "root"
ARCHIVES = DEPS / "archives"
APT = DEPS / "apt"
FETCH_TIMEOUT_S = 90.0
# A tool's libraries, and the libraries of these. A greater depth would fetch a whole distribution.
DEPTH_MAX = 2

# The path of each tool, and the packages that contain it.
TOOLS = {
    "pgbouncer": ("usr/sbin/pgbouncer", ("pgbouncer",)),
    "wrk": ("usr/bin/wrk", ("wrk",)),
    "etcd-server": ("usr/bin/etcd", ("etcd-server",)),
    "prometheus": ("usr/bin/prometheus", ("prometheus",)),
    "promtool": ("usr/bin/promtool", ("prometheus",)),
    "amtool": ("usr/bin/amtool", ("prometheus-alertmanager",)),
    "chromium": ("usr/lib/chromium/chromium", ("chromium-common", "chromium")),
    # Renders the Helm chart: its templates are Go's. The version is part of the names; this is Debian 12's.
    "go": ("usr/lib/go-1.19/bin/go", ("golang-1.19-src", "golang-1.19-go")),
    "redis-server": ("usr/bin/redis-server", ("redis-tools", "redis-server")),
}


class FetchError(Exception):
    """The tool cannot be provided on this machine."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A program, and the environment in which it finds its libraries."""

    path: Path
    env: dict[str, str]

    def copied_to(self, folder: Path) -> "Tool":
        """Copy the program and its libraries to a folder, for an account that has no access to this one."""
        listed = re.findall(r"=> (/\S+)", _output(["ldd", str(self.path)], env=self.env))
        libraries = [Path(path) for path in listed if Path(path).is_relative_to(ROOT)]
        for path in (self.path, *libraries):
            copy = folder / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
        return Tool(folder / self.path.relative_to(ROOT), _environment(folder))


def provide(name: str) -> Tool:
    """The tool of this name, fetched if need be. Raises `FetchError`, or what apt and dpkg fail with."""
    DEPS.mkdir(exist_ok=True)
    path, packages = TOOLS[name]
    with (DEPS / "fetch.lock").open("w") as lock:
        # The caller's own time limit bounds this wait.
        fcntl.flock(lock, fcntl.LOCK_EX)
        program = ROOT / path
        if not program.exists():
            for package in packages:
                _unpack(package)
        tool = Tool(program, _environment())
        missing = _missing_libraries(tool)
        for depth in range(DEPTH_MAX):
            if not missing:
                break
            for package in packages:
                _unpack_libraries_of(package, depth)
            # Build the environment anew: it names the folders of the libraries, and there are more now.
            tool = Tool(program, _environment())
            missing = _missing_libraries(tool)
    if missing:
        raise FetchError(f"its libraries {', '.join(missing)} are missing")
    return tool


def _environment(root: Path = ROOT) -> dict[str, str]:
    folders = sorted({str(path.parent) for path in root.glob("usr/lib/**/*.so*")} | {str(root / "usr/lib")})
    return {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LD_LIBRARY_PATH": ":".join(folders), "LC_ALL": "C"}


def _missing_libraries(tool: Tool) -> list[str]:
    listing = _output(["ldd", str(tool.path)], env=tool.env)
    return re.findall(r"(\S+) => not found", listing)


def _unpack(package: str) -> Path:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise FetchError("this is not Debian")
    ARCHIVES.mkdir(exist_ok=True)
    options = ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []
    try:
        _output(["apt-get", *options, "download", package], cwd=ARCHIVES)
    except subprocess.CalledProcessError:
        # The machine's package lists are absent or too old. Lists of our own need no root.
        options += _own_lists()
        _output(["apt-get", *options, "update"])
        try:
            _output(["apt-get", *options, "download", package], cwd=ARCHIVES)
        except subprocess.CalledProcessError as error:
            raise FetchError(error.stdout.strip().splitlines()[-1] if error.stdout.strip() else "no network") from error
    archive = max(ARCHIVES.glob(f"{package}_*.deb"), key=lambda path: path.stat().st_mtime)
    _output(["dpkg-deb", "-x", str(archive), str(ROOT)])
    return archive


def _own_lists() -> list[str]:
    for folder in ("lists/partial", "cache/archives/partial"):
        (APT / folder).mkdir(parents=True, exist_ok=True)
    return ["-o", f"Dir::State::Lists={APT / 'lists'}", "-o", f"Dir::Cache={APT / 'cache'}"]


def _unpack_libraries_of(package: str, depth: int) -> None:
    """Fetches the libraries that the package, or at greater depth any fetched one, names and the machine lacks."""
    pattern = f"{package}_*.deb" if depth == 0 else "*.deb"
    wanted: set[str] = set()
    for archive in ARCHIVES.glob(pattern):
        for clause in _output(["dpkg-deb", "-f", str(archive), "Depends"]).split(","):
            name = re.split(r"[\s(:|]", clause.strip(), maxsplit=1)[0]
            if name.startswith("lib"):
                wanted.add(name)
    for name in sorted(wanted):
        if not any(ARCHIVES.glob(f"{name}_*.deb")) and not _installed(name):
            _unpack(name)


def _installed(package: str) -> bool:
    done = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Status}", package], capture_output=True, text=True, check=False, timeout=30
    )
    return done.stdout.strip() == "install ok installed"


def _output(command: Sequence[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        check=True,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=FETCH_TIMEOUT_S,
    ).stdout


def main() -> int:
    """Fetches every tool, and says where each one is."""
    for name in TOOLS:
        try:
            sys.stdout.write(f"{name}: {provide(name).path}\n")
        except (FetchError, OSError, subprocess.SubprocessError) as error:
            sys.stderr.write(f"{name} cannot be fetched: {error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
