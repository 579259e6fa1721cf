"""The file of the SQLite store: taken for one process, opened with the settings that durability needs, and its errors
turned into words that say what to do.

Imports apsw, the store's protocol and the standard library. Must never grant anything, and never open a file with
weaker settings than asked for: what cannot be verified is refused.
"""

import contextlib
import errno
import fcntl
import os
import time
import weakref
from pathlib import Path

import apsw

from pgleaderlock import _sql
from pgleaderlock.server.store import StoreBusy, StoreError

__all__ = [
    "SCHEMA_VERSION",
    "Claim",
    "Identity",
    "count_run",
    "described",
    "explained",
    "open_copier",
    "open_reader",
    "open_writer",
    "sql",
]

SCHEMA_VERSION = 1
APPLICATION_ID = 0x70676C6C  # "pgll", in the header of the file: nobody else's database is touched
SYNCHRONOUS_NORMAL = 1
SYNCHRONOUS_FULL = 2
SYNCHRONOUS = SYNCHRONOUS_FULL
PAGE_BYTES = 1024  # a grant writes one page: with a million locks, small ones are a third faster
CACHE_KIB = 64 * 1024
LOG_PAGES = 4_000
LOG_HEADER_BYTES = 32
FRAME_HEADER_BYTES = 24
BUSY_MS = 2000
FOLDER_SETTLED_NS = 1_000_000_000
LOOK_AGAIN_S = 0.01
"""For so long both names are taken for what they were. Who opens a file waits longer before it grants anything, and
what is written just after a file was moved is not lost in any other way than what was written just before."""
# SQLite's write-ahead log needs memory that all its users share, and locks that hold: neither crosses a network.
NETWORK_FILE_SYSTEMS = frozenset({
    "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.cephfs", "fuse.glusterfs", "fuse.rclone", "fuse.s3fs",
    "fuse.sshfs", "gfs2", "glusterfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "smb2", "smb3", "smbfs",
})  # fmt: skip


def sql(name: str) -> str:
    """The text of a statement of this store."""
    return _sql.statement(f"sqlite_{name}").decode()


# --- One process


_claims: "weakref.WeakSet[Claim]" = weakref.WeakSet()


class Claim:
    """The right to be the one process that uses a file: a lock of the operating system on a file beside it.

    The kernel ends it with the process, however that ends. The file beside stays: to remove it would let two in.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(f"{path}-owner")
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror}: {_remedy(error.errno)}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            pid = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
                raise StoreError(
                    f"{path} is in use by another lock server (process {pid or 'unknown'}): one server, one file. "
                    f"Stop that one, give this one a file of its own, or let many servers share a PostgreSQL store"
                ) from error
            raise StoreError(f"{self.path}: {error.strerror}: {_remedy(error.errno)}") from error
        _claims.add(self)

    def give_up(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _in_child() -> None:
    """A forked child must not keep the claim of a parent that has died."""
    for claim in list(_claims):
        claim.give_up()


os.register_at_fork(after_in_child=_in_child)


class Identity:
    """Which files the connection writes to. When the names lead elsewhere, what is written is lost to whoever opens
    the file next, and the tokens with it."""

    def __init__(self, path: Path) -> None:
        self._folder = str(path.parent)
        self._verified_at = float("-inf")
        self._settled: tuple[int, int, int] | None = None
        """The folder as it was when both names were last looked at; None while it has just changed."""
        self._paths = (str(path), f"{path}-wal")
        self._were = self._are()

    def verify(self) -> None:
        """Before each grant."""
        now = time.monotonic()
        if now - self._verified_at < LOOK_AGAIN_S:
            return
        self._verified_at = float("-inf")
        self._look()
        self._verified_at = now

    def _look(self) -> None:
        """While nothing has come into their folder or left it, both names are what they were."""
        with contextlib.suppress(OSError):
            status = os.stat(self._folder)  # noqa: PTH116 - a Path costs more than the call
            folder = (status.st_dev, status.st_ino, status.st_mtime_ns)
            if folder == self._settled:
                return
            # Two changes within one tick of the system's clock look like one.
            self._settled = folder if time.time_ns() - status.st_mtime_ns > FOLDER_SETTLED_NS else None
        if self._are() != self._were:
            self._settled = None
            raise StoreError(
                f"{self._paths[0]} was moved, removed or replaced while in use: nothing is granted any more. "
                "Put the file and its -wal back, or restart the server to use what is there now"
            )

    def _are(self) -> list[tuple[int, int]]:
        found = []
        for path in self._paths:
            with contextlib.suppress(OSError):
                status = os.stat(path)  # noqa: PTH116
                found.append((status.st_dev, status.st_ino))
        return found


# --- Opening


def open_writer(path: Path, vfs: str | None) -> apsw.Connection:
    """The connection that writes, with the schema in place and every setting verified."""
    _refuse_bad_place(path)
    fresh = not path.exists() or path.stat().st_size == 0
    with described(path):
        connection = apsw.Connection(str(path), vfs=vfs, statementcachesize=64)
        try:
            connection.set_busy_timeout(BUSY_MS)
            if fresh:
                connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            else:
                _refuse_strange(connection, path)
            _set_up(connection, path)
            _make_schema(connection)
        except BaseException:
            connection.close(True)
            raise
    if fresh:
        _sync_folder(path.parent)
    _make_room(Path(f"{path}-wal"))
    return connection


def _make_room(log: Path) -> None:
    """The log has its usual length from the beginning: a commit that makes a file longer takes twice the time.

    What lies behind the last commit in a log is never read: zeros are no pages.
    """
    with contextlib.suppress(OSError), log.open("ab") as file:  # if it cannot be done, it grows by itself
        missing_bytes = LOG_HEADER_BYTES + LOG_PAGES * (FRAME_HEADER_BYTES + PAGE_BYTES) - file.tell()
        if missing_bytes > 0:
            file.write(bytes(missing_bytes))
            file.flush()
            os.fsync(file.fileno())


def open_reader(path: Path, vfs: str | None) -> apsw.Connection:
    """A connection that cannot write, and leaves the log to the one that does."""
    with described(path):
        connection = apsw.Connection(str(path), vfs=vfs, statementcachesize=16)
        connection.set_busy_timeout(BUSY_MS)
        connection.wal_autocheckpoint(0)
        connection.execute("PRAGMA query_only = ON")
        connection.execute(f"PRAGMA cache_size = {-CACHE_KIB // 8}")
    return connection


def open_copier(path: Path, vfs: str | None) -> apsw.Connection:
    """A connection that copies the log into the file, as durably as the writer would."""
    with described(path):
        connection = apsw.Connection(str(path), vfs=vfs)
        _set_up(connection, path)
        connection.wal_autocheckpoint(0)
    return connection


def count_run(connection: apsw.Connection, path: Path) -> int:
    """The number of this run, one higher than ever, durably."""
    with described(path):
        connection.execute(sql("next_run"))  # a transaction by itself
        number: int = connection.execute(sql("meta"), ("run",)).get
    return number


def _refuse_bad_place(path: Path) -> None:
    if not path.parent.is_dir():
        raise StoreError(f"the folder {path.parent} does not exist: create it, or choose another --store")
    if path.exists() and not path.is_file():
        raise StoreError(f"{path} is not a file: choose another --store")
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        raise StoreError(f"{path} may not be read and written by this user: {_remedy(errno.EACCES)}")
    kind = _file_system(path.parent.resolve())
    if kind in NETWORK_FILE_SYSTEMS:
        raise StoreError(
            f"{path} is on a network file system ({kind}), where SQLite's locks and log are not safe: "
            "use a local disk, or a PostgreSQL store"
        )


def _file_system(folder: Path) -> str:
    """The kind of file system of a folder, or "" where the system does not say."""
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        mount = fields.split(" ")[4].encode().decode("unicode_escape")
        if len(mount) >= len(best) and (folder.is_relative_to(mount)):
            best, kind = mount, rest.split(" ")[0]
    return kind


def _refuse_strange(connection: apsw.Connection, path: Path) -> None:
    found = connection.execute("PRAGMA application_id").get
    empty = connection.execute(sql("empty")).get
    if found != APPLICATION_ID and not empty:
        raise StoreError(f"{path} is a database of another program: choose another --store")
    if not empty:
        version = connection.execute(sql("meta"), ("schema_version",)).get
        if version is None or version > SCHEMA_VERSION:
            raise StoreError(
                f"{path} was written by a newer version of pgleaderlock (schema {version}, this one knows "
                f"{SCHEMA_VERSION}): upgrade this server, or choose another --store"
            )


def _set_up(connection: apsw.Connection, path: Path) -> None:
    mode = connection.execute("PRAGMA journal_mode = WAL").get
    connection.execute(f"PRAGMA synchronous = {SYNCHRONOUS}")
    connection.execute("PRAGMA fullfsync = ON")  # where a plain sync stops at the drive's cache; elsewhere no effect
    connection.execute("PRAGMA checkpoint_fullfsync = ON")
    connection.execute(f"PRAGMA cache_size = {-CACHE_KIB}")
    connection.execute("PRAGMA temp_store = MEMORY")
    synchronous = connection.execute("PRAGMA synchronous").get
    if mode != "wal" or synchronous != SYNCHRONOUS:
        raise StoreError(
            f"{path} cannot be written durably (journal_mode {mode}, synchronous {synchronous}): "
            "a grant might be lost and its token given twice. Use a local disk"
        )


def sync_commits(connection: apsw.Connection, wanted: bool) -> None:
    """Whether the commits from now on wait for the disk. Not inside a transaction."""
    connection.execute(f"PRAGMA synchronous = {SYNCHRONOUS if wanted else SYNCHRONOUS_NORMAL}")


def _make_schema(connection: apsw.Connection) -> None:
    if connection.execute("PRAGMA application_id").get == APPLICATION_ID:
        return
    with connection:
        connection.execute(sql("schema"))
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")


def _sync_folder(folder: Path) -> None:
    """The name of a new file is durable only when its folder is."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- Errors


class described:  # noqa: N801 - used like contextlib.suppress
    """Turns what SQLite and the system raise into a `StoreError` that says what to do."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, apsw.Error | OSError):
            raise explained(error, self._path) from error


def explained(error: Exception, path: Path) -> Exception:
    """The same error in words; what is no error of SQLite or the system stays as it is."""
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return StoreBusy(f"{path} is locked by another program that reads or writes it: try again in a moment")
    if isinstance(error, OSError):
        return StoreError(f"{path}: {error.strerror}: {_remedy(error.errno)}")
    for kind, remedy in _REMEDIES:
        if isinstance(error, kind):
            return StoreError(f"{path}: {remedy} ({error})")
    if isinstance(error, apsw.Error):
        return StoreError(f"{path}: {error}. If this goes on, restart the server and look at the disk")
    return error


_REMEDIES: tuple[tuple[type[apsw.Error], str], ...] = (
    (apsw.FullError, "the disk is full: free some space; nothing that was granted is lost"),
    (apsw.ReadOnlyError, "the file is read-only: make file and folder writable for this user"),
    (apsw.CantOpenError, "cannot be opened: the folder must exist and be writable for this user"),
    (apsw.PermissionsError, "may not be used: make file and folder readable and writable for this user"),
    (apsw.NotADBError, "is not an SQLite database: choose another --store, or move that file away"),
    (apsw.CorruptError, "the file is damaged: stop the server and restore a backup. Without it, tokens start again"),
    (apsw.IOError, "the disk gave an error: look at the system's log; nothing is granted until it works"),
    (apsw.NoMemError, "out of memory: give the server more"),
)  # fmt: skip


def _remedy(number: int | None) -> str:
    match number:
        case errno.ENOSPC | errno.EDQUOT:
            return "free some space"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "make file and folder readable and writable for this user"
        case errno.ENOENT | errno.ENOTDIR:
            return "create the folder"
        case _:
            return "look at the disk and the system's log"
