"""The file of the SQLite store: claims it for one process, opens it with the settings that durability needs, and
explains its errors.

Must never open a file with weaker settings than asked for: a setting that cannot be verified is an error.
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import apsw

from pgleaderlock._base.logging import get_logger
from pgleaderlock._pg import statements
from pgleaderlock.server.store import StoreBusy, StoreError

__all__ = [
    "LOG_HEADER_BYTES",
    "SCHEMA_VERSION",
    "Claim",
    "Identity",
    "check_integrity",
    "described",
    "explained",
    "open_copier",
    "open_reader",
    "open_to_look",
    "open_writer",
    "refuse_bad_place",
    "sql",
    "sync_folder",
]

SCHEMA_VERSION = 1
APPLICATION_ID = 0x70676C6C  # "pgll", in the header of the file: other programs' databases are refused
SYNCHRONOUS_NORMAL = 1
SYNCHRONOUS_FULL = 2
SYNCHRONOUS = SYNCHRONOUS_FULL
PAGE_BYTES = 2048  # for new files: larger pages take longer to write, and smaller ones are split more often
CACHE_KIB = 64 * 1024
LOG_PAGES = 2_000
LOG_HEADER_BYTES = 32
FRAME_HEADER_BYTES = 24
LOG_KEPT_FACTOR = 2
"""A log that is this many times longer than usual is truncated when it restarts from its beginning. Under load it is
always somewhat longer than usual, and each truncation would cost the time to extend the file again."""
BUSY_MS = 2000
LOOK_AGAIN_S = 0.01
"""How long a check of both names is cached. A server that opens a file waits longer than this before it grants
anything. A write just after a file was moved is lost in the same way as a write just before."""
# SQLite's write-ahead log needs shared memory and reliable locks. Network file systems have neither, and nor have those
# that show a virtual machine or a container a folder of its host.
NETWORK_FILE_SYSTEMS = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.cephfs", "fuse.glusterfs", "fuse.grpcfuse",
    "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "gfs2", "glusterfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "smb2",
    "smb3", "smbfs", "vboxsf", "virtiofs",
})  # fmt: skip

_log = get_logger("pgleaderlock.server")


def sql(name: str) -> str:
    """The text of one of this store's named statements."""
    return statements.statement(f"sqlite_{name}").decode()


# --- One process


_claims: "weakref.WeakSet[Claim]" = weakref.WeakSet()


class Claim:
    """The exclusive right of one process to use a file: operating-system locks on two files.

    The lock on the `-owner` file protects the name, because the log belongs to the name and only one server may use it.
    That file is never removed, because removing it could let two servers in. The lock on the database itself protects
    the file, whatever path leads to it. Linux keeps these locks apart from SQLite's, which are POSIX locks.

    The kernel releases both when the process ends, however it ends. It also releases all POSIX locks of a process on a
    file as soon as that process closes any descriptor of that file. So a claim is given up only after SQLite's
    connections are closed, and a file that this process has claimed already is not even opened.
    """

    def __init__(self, path: Path) -> None:
        self._fds: list[int] = []
        self.inode: tuple[int, int] | None = None
        try:
            self._take_name(path)
            if sys.platform == "linux":  # elsewhere, a lock on the database would conflict with SQLite's own locks
                self._take_file(path)
            _refuse_second_name(path)
        except BaseException:
            self.give_up()
            raise
        _claims.add(self)

    def _take_name(self, path: Path) -> None:
        fd = self._open(Path(f"{path}-owner"))
        if not _locked(fd):
            pid = os.pread(fd, 32, 0).decode(errors="replace").strip()
            raise StoreError(f"{path} is in use by another lock server (process {pid or 'unknown'}): {_ONE_SERVER}")
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    def _take_file(self, path: Path) -> None:
        ours = path.exists() and any(claim.inode == _inode(path.stat()) for claim in _claims)
        if ours or not _locked(self._open(path)):
            raise StoreError(
                f"{path} is in use by another lock server, under another path (a hard link, or a mount of the file): "
                f"{_ONE_SERVER}"
            )
        self.inode = _inode(os.fstat(self._fds[-1]))

    def _open(self, path: Path) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._fds.append(fd)
        return fd

    def give_up(self) -> None:
        while self._fds:
            os.close(self._fds.pop())
        self.inode = None


_ONE_SERVER = (
    "one server, one file. Stop that one, give this one a file of its own, or let many servers share a PostgreSQL store"
)


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _refuse_second_name(path: Path) -> None:
    """Refuse a file with hard links, or mounted by itself: SQLite finds the log by the file's name. Under another name
    it would miss the log that a killed server has left, and tokens would be granted again."""
    if path.exists() and (names := path.stat().st_nlink) > 1:
        raise StoreError(
            f"{path} has {names} names (hard links), and its log belongs to one of them: remove the others "
            f"(find -samefile finds them), or copy the file while no server runs"
        )
    if any(mount == str(path) for mount, _ in _mounts()):
        raise StoreError(
            f"{path} is mounted by itself, so its log would be in another place than the file: mount the folder instead"
        )


def _in_child() -> None:
    """In a forked child: drop the claims, which would otherwise outlive the parent."""
    for claim in list(_claims):
        claim.give_up()


os.register_at_fork(after_in_child=_in_child)


class Identity:
    """The files that the connection writes to. If their names lead to other files by now, the next server that opens
    the names does not see what this one writes, and would grant the same tokens again."""

    def __init__(self, path: Path) -> None:
        self._verified_at = float("-inf")
        self._paths = (str(path), f"{path}-wal")
        self._were = self._are()

    def verify(self) -> None:
        """Called at the beginning of each transaction: checks both names, at most once within `LOOK_AGAIN_S`."""
        now = time.monotonic()
        if now - self._verified_at < LOOK_AGAIN_S:
            return
        self._verified_at = float("-inf")
        if self._are() != self._were:
            raise StoreError(
                f"{self._paths[0]} was moved, removed or replaced while in use: nothing is granted any more. "
                "Put the file and its -wal back, or restart the server to use what is there now"
            )
        self._verified_at = now

    def _are(self) -> list[tuple[int, int]]:
        found = []
        for path in self._paths:
            with contextlib.suppress(OSError):
                found.append(_inode(os.stat(path)))  # noqa: PTH116
        return found


# --- Opening


def open_writer(path: Path, vfs: str | None) -> apsw.Connection:
    """The connection that writes, with the schema in place and every setting verified."""
    fresh = not path.exists() or path.stat().st_size == 0
    with described(path):
        connection = apsw.Connection(str(path), vfs=vfs, statementcachesize=64)
        try:
            connection.set_busy_timeout(BUSY_MS)
            # A failed start must leave the log unchanged: the next start compares it with the mark.
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            if fresh:
                connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            else:
                _refuse_strange(connection, path)
            _set_up(connection, path)
            _make_schema(connection)
            _tighten(path)
        except BaseException:
            connection.close(True)
            raise
    if fresh:
        sync_folder(path.parent)
    _make_room(Path(f"{path}-wal"))
    return connection


def open_to_look(path: Path, vfs: str | None) -> apsw.Connection:
    """A connection that changes nothing, not even when it is closed. Raises `StoreError` for a damaged file."""
    with described(path):
        connection = apsw.Connection(str(path), vfs=vfs)
        try:
            connection.set_busy_timeout(BUSY_MS)
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, Path(f"{path}-wal").exists())
            _refuse_strange(connection, path)
            check_integrity(connection)
        except BaseException:
            connection.close(True)
            raise
    return connection


def check_integrity(connection: apsw.Connection) -> None:
    """Reads the whole file. Raises `apsw.CorruptError` if it is no valid database."""
    if (problem := connection.execute("PRAGMA integrity_check(1)").get) != "ok":
        raise apsw.CorruptError(problem)


def _tighten(path: Path) -> None:
    """Restrict the file's mode: a user who can read the file learns the ids of leases, and could release them. SQLite
    gives new files beside the database the same mode."""
    for suffix in ("", "-wal", "-shm", "-owner", "-mark"):
        file = Path(f"{path}{suffix}")
        mode = stat.S_IMODE(file.stat().st_mode) if file.exists() else 0
        if not mode & 0o077:
            continue
        try:
            file.chmod(0o600)
        except OSError as error:
            raise StoreError(
                f"other users may read {file} (mode {mode:04o}), and this user cannot change that: chmod 600"
            ) from error
        _log.warning("permissions_tightened", file=str(file), was=f"{mode:04o}", now="0600")


def _log_bytes() -> int:
    """The usual length of the log."""
    return LOG_HEADER_BYTES + LOG_PAGES * (FRAME_HEADER_BYTES + PAGE_BYTES)


def _make_room(log: Path) -> None:
    """Extend the log to its usual length at the start: a commit that extends a file takes twice the time.

    SQLite never reads beyond the last commit in a log, and zeros are not valid pages.
    """
    with contextlib.suppress(OSError), log.open("ab", buffering=0) as file:  # if this fails, the log grows as needed
        was_bytes = file.tell()
        missing_bytes = max(0, _log_bytes() - was_bytes)
        if file.write(bytes(missing_bytes)) < missing_bytes:
            file.truncate(was_bytes)  # leave the rest of the disk to other files, such as the mark
        os.fsync(file.fileno())


def open_reader(path: Path, vfs: str | None) -> apsw.Connection:
    """A connection that cannot write, and leaves checkpoints of the log to the writer's connection."""
    with described(path):
        connection = apsw.Connection(str(path), vfs=vfs, statementcachesize=16)
        connection.set_busy_timeout(BUSY_MS)
        connection.wal_autocheckpoint(0)
        connection.execute("PRAGMA query_only = ON")
        connection.execute(f"PRAGMA cache_size = {-CACHE_KIB // 8}")
    return connection


def open_copier(path: Path, vfs: str | None) -> apsw.Connection:
    """A connection that copies the log into the file (a checkpoint), as durably as the writer's would."""
    with described(path):
        connection = apsw.Connection(str(path), vfs=vfs)
        _set_up(connection, path)
        connection.wal_autocheckpoint(0)
    return connection


def refuse_bad_place(path: Path) -> None:
    """Refuse an unusable folder before anything is created in it."""
    if not path.parent.is_dir():
        raise StoreError(f"the folder {path.parent} does not exist: create it, or choose another --store")
    if path.exists() and not path.is_file():
        raise StoreError(f"{path} is not a file: choose another --store")
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        raise StoreError(f"{path} may not be read and written by this user: {_remedy(errno.EACCES)}")
    kind = _file_system(path.parent.resolve())
    if kind in NETWORK_FILE_SYSTEMS:
        raise StoreError(
            f"{path} is on a network or shared file system ({kind}), where SQLite's locks and log are not safe: "
            "use a local disk, or a PostgreSQL store"
        )


def _file_system(folder: Path) -> str:
    """The type of a folder's file system, or "" if the system does not tell."""
    best, kind = "", ""
    for mount, mounted in _mounts():
        if len(mount) >= len(best) and folder.is_relative_to(mount):
            best, kind = mount, mounted
    return kind


def _mounts() -> Iterator[tuple[str, str]]:
    """The mount points with the types of their file systems; none if the system does not tell."""
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        fields, _, rest = line.partition(b" - ")
        # Blanks and backslashes are encoded as three octal digits.
        mount = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), fields.split(b" ")[4])
        yield os.fsdecode(mount), rest.split(b" ")[0].decode()


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
    connection.execute("PRAGMA fullfsync = ON")  # for systems whose fsync stops at the drive's cache, such as macOS
    connection.execute("PRAGMA checkpoint_fullfsync = ON")
    connection.execute(f"PRAGMA cache_size = {-CACHE_KIB}")
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute(f"PRAGMA journal_size_limit = {LOG_KEPT_FACTOR * _log_bytes()}")
    synchronous = connection.execute("PRAGMA synchronous").get
    if mode != "wal" or synchronous != SYNCHRONOUS:
        raise StoreError(
            f"{path} cannot be written durably (journal_mode {mode}, synchronous {synchronous}): "
            "a grant might be lost and its token given twice. Use a local disk"
        )


def sync_statement(wanted: bool) -> str:
    """The statement that sets whether commits wait for the disk."""
    return f"PRAGMA synchronous = {SYNCHRONOUS if wanted else SYNCHRONOUS_NORMAL}"


def _make_schema(connection: apsw.Connection) -> None:
    if connection.execute("PRAGMA application_id").get == APPLICATION_ID:
        return
    with connection:
        connection.execute(sql("schema"))
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")


def sync_folder(folder: Path) -> None:
    """Sync a folder: the name of a new file is durable only when its folder is."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- Errors


class described:  # noqa: N801 - used like contextlib.suppress
    """Turns the errors of SQLite and the operating system into a `StoreError` that says what to do."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, apsw.Error | OSError):
            raise explained(error, self._path) from error


def explained(error: Exception, path: Path) -> Exception:
    """A `StoreError` that says what to do. Errors that are not SQLite's or the operating system's are returned
    unchanged."""
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


_DAMAGED = (
    "the file is damaged: stop the server, and restore a backup or move the file and its -wal away. "
    "With its -mark left in place, tokens go on above those that were granted"
)
_REMEDIES: tuple[tuple[type[apsw.Error], str], ...] = (
    (apsw.FullError, "the disk is full: free some space; nothing that was granted is lost"),
    (apsw.ReadOnlyError, "the file is read-only: make file and folder writable for this user"),
    (apsw.CantOpenError, "cannot be opened: the folder must exist and be writable for this user"),
    (apsw.PermissionsError, "may not be used: make file and folder readable and writable for this user"),
    (apsw.NotADBError, "is not an SQLite database: choose another --store, or move that file away"),
    (apsw.CorruptError, _DAMAGED),
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
