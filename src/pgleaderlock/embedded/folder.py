"""The folder of one embedded server: its contents, its permissions, and its creation.

    FOLDER/                 0700, or 0710 with the group of the account when root runs it
      data/                 PostgreSQL's data directory; the account's, 0700
      run/                  the socket; the account's, 0700
      conf/                 settings and access rules: ours, so that the account cannot make root write elsewhere
      server.log  password  ours, 0600
      start.lock            held while starting, stopping or creating
      users.lock            held shared by each user, as long as it uses the server
      reaper.lock           held by the reaper

Must never change the permissions of a folder that it did not make, and as root never write into a folder that the
account could have prepared.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pgleaderlock.embedded import reaper
from pgleaderlock.embedded.binaries import EmbeddedError, Programs, run_as
from pgleaderlock.errors import ConfigurationError

__all__ = ["SOCKET_PORT", "SUPERUSER", "Folder", "check_settings", "default_folder"]

# The environment variable that names the server's folder if the program names none.
FOLDER_VARIABLE = "PGLEADERLOCK_EMBEDDED_DIR"
SUPERUSER = "postgres"
LOOPBACK = "127.0.0.1"
# The number in the socket's name when there is no TCP. The folder is private, so no other server uses the same name.
SOCKET_PORT = 5432
# The kernel's limit is 107 bytes on Linux and 103 on macOS, for the whole path of the socket.
SOCKET_PATH_BYTES_MAX = 100
START_LOCK_TIMEOUT_S = 120.0
INITDB_TIMEOUT_S = 90.0
LOG_BYTES_MAX = 8 * 1024 * 1024
LOCK_POLL_S = 0.01

OURS = frozenset(
    {
        "config_file",
        "data_directory",
        "external_pid_file",
        "hba_file",
        "ident_file",
        "listen_addresses",
        "logging_collector",
        "port",
        "unix_socket_directories",
        "unix_socket_group",
        "unix_socket_permissions",
    }
)


def default_folder(programs: Programs) -> Path:
    """The folder used when none is named: one per user and major version."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen)
    name = f"postgres-{programs.major}"
    if programs.owner.uid == 0:
        return Path("/var/lib/pgleaderlock") / name
    data_home = os.environ.get("XDG_DATA_HOME", "")
    base = Path(data_home) if data_home.startswith("/") else Path.home() / ".local" / "share"
    return base / "pgleaderlock" / name


def check_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Refuses names that are not PostgreSQL settings, and settings by which this module keeps the server private."""
    for name in settings:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]*", name):
            raise ConfigurationError(f"{name!r} is not the name of a PostgreSQL setting.")
        if name.lower() in OURS:
            raise ConfigurationError(f"The setting {name!r} belongs to the embedded server itself; leave it out.")
    return dict(settings)


@dataclass(frozen=True, slots=True)
class Folder:
    """One server's folder, and the programs that work in it."""

    path: Path
    programs: Programs

    @property
    def data(self) -> Path:
        """PostgreSQL's data directory."""
        return self.path / reaper.DATA

    @property
    def conf(self) -> Path:
        """Our settings and access rules."""
        return self.path / "conf"

    @property
    def log(self) -> Path:
        """The server's standard output and error."""
        return self.path / "server.log"

    # --- Creating it

    def make(self) -> None:
        """Creates the folder unless it exists, and proves that the account can reach it."""
        self._make_parents()
        self._refuse_unreachable(self.path.parent)
        if not self.path.exists():
            # Create it under another name first, so that no process sees it half-made.
            scratch = Path(tempfile.mkdtemp(prefix=f".{self.path.name}-", dir=self.path.parent))
            self._share_with_account(scratch, 0o710)
            try:
                scratch.rename(self.path)
            except OSError:
                scratch.rmdir()
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != self.programs.owner.uid:
            raise EmbeddedError(f"{self.path} is not a folder of {self.programs.owner.name}. Name another data folder.")
        if found.st_mode & stat.S_IWOTH:
            raise EmbeddedError(f"{self.path} is writable for everyone. Name a data folder that is private.")
        self._refuse_unreachable(self.path)

    def _make_parents(self) -> None:
        missing = [parent for parent in self.path.parents if not parent.exists()]
        for parent in reversed(missing):
            parent.mkdir(exist_ok=True)
            if self.programs.owner.uid == 0:
                # We have just created it, so it is ours: the account must be able to traverse it, whatever the umask.
                parent.chmod(0o755)

    def _refuse_unreachable(self, path: Path) -> None:
        if self.programs.account == self.programs.owner:
            return
        chain = [str(folder) for folder in (*reversed(path.parents), path)]
        script = 'for folder; do [ -x "$folder" ] || { printf %s "$folder"; exit 1; }; done'
        done = run_as(self.programs.account, ["/bin/sh", "-c", script, "sh", *chain], timeout_s=10.0)
        if done.returncode != 0:
            raise EmbeddedError(
                f"PostgreSQL runs as {self.programs.account.name!r} here, and that account cannot enter {done.stdout}."
                " Its permissions are not ours to change: name another data folder, for example below /var/lib."
            )

    def _share_with_account(self, path: Path, mode: int) -> None:
        """Lets the owner write and the account read or traverse it; if both are the same, only the owner."""
        if self.programs.account == self.programs.owner:
            path.chmod(mode & 0o700)
            return
        os.chown(path, self.programs.owner.uid, self.programs.account.gid)
        path.chmod(mode)

    def _give_to_account(self, path: Path, mode: int) -> None:
        if self.programs.account != self.programs.owner:
            os.chown(path, self.programs.account.uid, self.programs.account.gid)
        path.chmod(mode)

    # --- Locks

    def open_lock(self, name: str) -> int:
        """A descriptor of one of the lock files. Closing it releases its locks, as the end of the process does."""
        return os.open(self.path / name, os.O_RDWR | os.O_CREAT, 0o600)

    @contextlib.contextmanager
    def starting(self) -> Iterator[int]:
        """Holds start.lock: one process at a time starts, stops or creates a server. Yields the descriptor."""
        lock = self.open_lock(reaper.START_LOCK)
        try:
            deadline = time.monotonic() + START_LOCK_TIMEOUT_S
            while not try_lock(lock, fcntl.LOCK_EX):
                if time.monotonic() >= deadline:
                    raise EmbeddedError(
                        f"Another process has been starting or stopping the server in {self.path} for"
                        f" {START_LOCK_TIMEOUT_S:.0f} s. End it, then try again."
                    )
                time.sleep(LOCK_POLL_S)
            yield lock
        finally:
            # Close it without unlocking: a program that we have started, and that still runs, keeps the lock.
            os.close(lock)

    # --- Filling it

    def initialise(self, lock: int) -> None:
        """Creates the database cluster unless it exists. `lock` is the descriptor of the held start.lock."""
        if self.data.exists():
            self._check_version()
            return
        password = secrets.token_urlsafe(24)
        word = self._new_file("password.init", password)
        self._give_to_account(word, 0o600)

        def fill(scratch: Path) -> subprocess.CompletedProcess[str]:
            arguments = ["-D", str(scratch), "-U", SUPERUSER, f"--pwfile={word}", "--auth-local=peer"]
            arguments += ["--auth-host=scram-sha-256", "-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions"]
            return self.programs.run("initdb", arguments, timeout_s=INITDB_TIMEOUT_S, pass_fds=(lock,))

        try:
            self.fill_data(fill)
        finally:
            word.unlink(missing_ok=True)
        self.keep_password(password)

    def fill_data(self, fill: Callable[[Path], subprocess.CompletedProcess[str]]) -> None:
        """Lets a program fill a new data directory, which gets its final name only when it is complete."""
        for leftover in self.path.glob("data.init-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix="data.init-", dir=self.path))
        self._give_to_account(scratch, 0o700)
        try:
            try:
                done = fill(scratch)
            except subprocess.TimeoutExpired as late:
                raise EmbeddedError(f"{Path(late.cmd[0]).name} did not end within {late.timeout:.0f} s.") from None
            if done.returncode != 0:
                raise EmbeddedError(f"{Path(done.args[0]).name} failed:\n{done.stdout.strip()}")
            scratch.rename(self.data)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _check_version(self) -> None:
        try:
            found = (self.data / "PG_VERSION").read_text(encoding="ascii").strip()
        except FileNotFoundError:
            raise EmbeddedError(f"{self.data} is no data directory of PostgreSQL. Name another data folder.") from None
        if found != str(self.programs.major):
            raise EmbeddedError(
                f"{self.path} was made by PostgreSQL {found}, and {self.programs.binaries} is PostgreSQL"
                f" {self.programs.version}. Name another data folder, or programs of version {found}."
            )

    def configure(self, settings: Mapping[str, str], port: int | None) -> None:
        """Writes settings and access rules. Called before each launch."""
        self.conf.mkdir(exist_ok=True)
        self._share_with_account(self.conf, 0o750)
        every = {
            # Checkpoints would only fill the log.
            "log_checkpoints": "off",
            **settings,
            "listen_addresses": LOOPBACK if port is not None else "",
            "port": str(port if port is not None else SOCKET_PORT),
            "unix_socket_directories": _quote_list_item(str(self.socket_folder())),
            "unix_socket_permissions": "0700",
            "hba_file": str(self.conf / "pg_hba.conf"),
            "ident_file": str(self.conf / "pg_ident.conf"),
        }
        lines = [f"include {_quote(str(self.data / 'postgresql.conf'))}"]
        lines += [f"{name} = {_quote(value)}" for name, value in every.items()]
        access = ["local all all peer map=owner", "local replication all peer map=owner"]
        if port is not None:
            access += [f"host {what} all {LOOPBACK}/32 scram-sha-256" for what in ("all", "replication")]
        # Only the operating-system user that owns the server may connect: not even the account that it runs as.
        identity = [f'owner "{self.programs.owner.name}" {SUPERUSER}']
        for name, content in (("postgresql.conf", lines), ("pg_hba.conf", access), ("pg_ident.conf", identity)):
            self._new_file(f"conf/{name}", "\n".join(content) + "\n")

    def socket_folder(self) -> Path:
        """The folder of the socket: in the server's folder or, if its path cannot be used for a socket, a separate
        one."""
        run = self.path / reaper.RUN
        # In a DSN's host, a comma separates several hosts.
        if len(os.fsencode(run / f".s.PGSQL.{SOCKET_PORT}")) <= SOCKET_PATH_BYTES_MAX and "," not in str(run):
            with contextlib.suppress(FileExistsError):
                run.mkdir()
                self._give_to_account(run, 0o700)
            return run
        note = self.path / reaper.SOCKET_FOLDER
        with contextlib.suppress(OSError):
            remembered = Path(note.read_text(encoding="utf-8"))
            found = remembered.lstat()
            if stat.S_IMODE(found.st_mode) == 0o700 and found.st_uid == self.programs.account.uid:
                return remembered
        # Always /tmp, because $TMPDIR may be as long as the path that we avoid; mkdtemp makes it safe.
        elsewhere = Path(tempfile.mkdtemp(prefix="pgleaderlock-", dir="/tmp"))
        self._give_to_account(elsewhere, 0o700)
        self._new_file(reaper.SOCKET_FOLDER, str(elsewhere))
        return elsewhere

    def open_log(self) -> int:
        """A descriptor of the log, for the server to inherit. A large log is renamed first."""
        with contextlib.suppress(FileNotFoundError):
            if self.log.stat().st_size > LOG_BYTES_MAX:
                self.log.replace(self.log.with_suffix(".log.old"))
        return os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    @property
    def password(self) -> str:
        """The password for connections over TCP."""
        return (self.path / "password").read_text(encoding="ascii")

    def keep_password(self, password: str) -> None:
        """Stores the password in a file that only the owner can read."""
        self._new_file("password", password)

    def _new_file(self, name: str, content: str) -> Path:
        # Written completely and then renamed: a reader sees the old file or the new one.
        path = self.path / name
        scratch = path.with_name(f".{path.name}.new")
        with contextlib.suppress(FileNotFoundError):
            scratch.unlink()
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        if name.startswith("conf/"):
            self._share_with_account(scratch, 0o640)
        return scratch.replace(path)


def try_lock(descriptor: int, kind: int) -> bool:
    """Takes the lock if that is possible without waiting; returns whether it was."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _quote(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


def _quote_list_item(value: str) -> str:
    # This setting is a list, in which a comma or a space would begin the next item.
    return '"' + value.replace('"', '""') + '"'
