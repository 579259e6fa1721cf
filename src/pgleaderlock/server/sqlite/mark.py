"""The mark beside the SQLite file: what must be known about a store if its log is damaged.

After a kill, SQLite reads the log up to the first page with a wrong checksum, and silently ignores the rest. Grants in
the rest would be lost, and their tokens granted again. So the mark keeps two things outside the log:

- The ceiling: no token above it is granted before a higher ceiling is on the disk. After an unclean end, every lock
  continues above the ceiling, whatever is left of the log.
- A note of how many pages the log has. It is written after each commit and not synced: the system keeps it if the
  process is killed. A log with fewer pages than noted was damaged. After a restart of the machine, the note proves
  nothing and is not compared.

After a clean end there is a third: a checksum of the file. SQLite has none in its pages, so a page that the disk has
lost, or written long ago and never again, may look valid and have old tokens in it.

An old copy of the file is recognised by its run number, or by its run not having ended. If the mark itself is lost, the
age of the file is unknown, and tokens continue far above those in it.

Must never lower the ceiling.
"""

import contextlib
import os
import secrets
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import apsw

from pgleaderlock.server.sqlite.file import LOG_HEADER_BYTES, check_integrity, described, sql, sync_folder
from pgleaderlock.server.store import StoreError

__all__ = ["RESERVED_TOKENS", "Left", "Mark", "begin_run", "checksum_of", "examine"]

RESERVED_TOKENS = 10_000
"""How far a new ceiling is above the token that needs it: the busiest lock needs one sync for this many grants."""
UNKNOWN_TOKENS = 1_000_000
"""Without a mark, tokens continue this far above the highest one in the file."""
MAGIC = b"pgllmark"
HEAD = struct.Struct("<8sqqq?I16s")
CHECKSUM = struct.Struct("<I")
HEAD_BYTES = HEAD.size + CHECKSUM.size
NOTE = struct.Struct("<IIII")
NOTE_AT = 128
NOTE_CHECK = 0x6D61726B
LOG_SALTS = struct.Struct(">16xII")
_PART_BYTES = 1 << 20


class Head(NamedTuple):
    """The part that is synced."""

    store_id: int
    run: int
    ceiling: int
    clean: bool
    """The run has ended cleanly: all of its log is in the file."""
    checksum: int
    """Of the file, after a clean end."""
    boot: bytes
    """The boot id of the machine when this was written."""

    def encode(self) -> bytes:
        packed = HEAD.pack(MAGIC, *self)
        return packed + CHECKSUM.pack(zlib.crc32(packed))


class LogState(NamedTuple):
    """The state of a log: its two salts, which change each time it restarts from its beginning, and its valid pages."""

    salts: tuple[int, int] | None
    pages: int


def read_mark(path: Path) -> tuple[Head, LogState | None] | None:
    """The mark of a file, with its note if that is intact; None if the mark is missing or empty. Raises `ValueError`
    for a damaged mark."""
    try:
        data = mark_path(path).read_bytes()
    except FileNotFoundError:
        return None
    if not data:  # the disk was full when it was created
        return None
    head = data[: HEAD.size]
    if len(data) < HEAD_BYTES or data[HEAD.size : HEAD_BYTES] != CHECKSUM.pack(zlib.crc32(head)):
        raise ValueError("checksum")
    magic, *fields = HEAD.unpack(head)
    if magic != MAGIC:
        raise ValueError("magic")
    return Head(*fields), _note_in(data[NOTE_AT : NOTE_AT + NOTE.size])


def _note_in(data: bytes) -> LogState | None:
    if len(data) < NOTE.size:
        return None
    first, second, pages, check = NOTE.unpack(data)
    return LogState((first, second), pages) if check == first ^ second ^ pages ^ NOTE_CHECK else None


def mark_path(path: Path) -> Path:
    return Path(f"{path}-mark")


def boot() -> bytes:
    """The boot id of the machine, or zeros if the system has none."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return bytes.fromhex(text.strip().replace("-", "")).ljust(16, b"\0")[:16]
    except (OSError, ValueError):
        return bytes(16)


# --- What is left of a log


class Left(NamedTuple):
    """The state of the store that an earlier run has left."""

    store_id: int
    run: int
    """The number of the last run in the file; 0 for a new file."""
    floor: int
    """Tokens up to this one may have been granted, even if they are not in the file."""
    ceiling: int
    """No token above this one was ever granted."""
    unclean: bool
    lost: str | None
    """Text that says what is known to be missing; None if nothing is."""


def examine(connection: apsw.Connection, path: Path, checksum: int) -> Left:
    """Compares file, log and mark. Call it before this process writes anything. `checksum`: `checksum_of` the file,
    taken before the connection was opened."""
    log = _log_state(connection, path)
    store_id, run, ended = None, 0, 0
    if not connection.execute(sql("empty")).get:
        store_id, run, ended = (connection.execute(sql("meta"), (name,)).get for name in ("store_id", "run", "ended"))
    try:
        read = read_mark(path)
        trouble = "is missing" if read is None and run else None
    except ValueError:
        read, trouble = None, "is damaged"
    if read is None and trouble is None:
        return Left(secrets.randbits(63), 0, 0, 0, False, None)
    highest = connection.execute(sql("highest_token")).get if run else 0
    if read is not None:
        head, noted = read
        if head.clean and (store_id, run, ended) == (head.store_id, head.run, run):
            if head.checksum == checksum:
                return Left(head.store_id, run, 0, head.ceiling, False, None)
            check_integrity(connection)
        if store_id is None or (store_id == head.store_id and run <= head.run + 1):  # a start writes it last
            # A file that has lost everything is still the same store: its tokens continue.
            lost = _lost(head, noted, log, run, ended)
            return Left(head.store_id, run, head.ceiling, max(head.ceiling, highest), True, lost)
        trouble = "belongs to another store, or is older than the file"
    floor = max(highest + UNKNOWN_TOKENS, 0 if read is None else read[0].ceiling)
    lost = f"{mark_path(path)} {trouble}: if the file is a copy from earlier, what was granted since is not known"
    return Left(secrets.randbits(63) if store_id is None else store_id, run, floor, floor, True, lost)


def _lost(head: Head, noted: LogState | None, log: LogState, run: int, ended: int) -> str | None:
    """What is missing from the file and its log according to the mark; None if nothing is."""
    lost = lost_of_log(noted, log) if noted is not None and not head.clean and head.boot == boot() else None
    if lost is None and (run < head.run or (head.clean and ended != run)):
        lost = "the file is older than its mark: a copy from earlier, or its log is missing"
    if lost is None and head.clean:
        lost = "the file is not what the last run has left: a page of it is damaged, or another program has changed it"
    return lost


def begin_run(connection: apsw.Connection, path: Path, left: Left) -> tuple["Mark", int]:
    """Begins a new run: writes its number and the new mark durably. Returns the mark and the number."""
    # Write the mark with the number of the last run first: if there is no space for it, no run has been counted.
    mark = Mark(path, Head(left.store_id, left.run, left.ceiling, False, 0, boot()))
    try:
        with described(path):
            with connection:
                connection.execute(sql("next_run"))
                connection.execute(sql("set_store_id"), (left.store_id,))
                connection.execute(sql("raise_floor"), (left.floor,))
            run: int = connection.execute(sql("meta"), ("run",)).get
            mark.begin(run)
            mark.note(_log_state(connection, path).pages)
    except BaseException:
        mark.close()
        raise
    return mark, run


def _log_state(connection: apsw.Connection, path: Path) -> LogState:
    """The log as SQLite has read it."""
    pages: int = connection.execute("PRAGMA wal_checkpoint(NOOP)").get[1]
    return LogState(_salts_of(path), max(0, pages))


def _salts_of(path: Path) -> tuple[int, int] | None:
    try:
        with Path(f"{path}-wal").open("rb") as log:
            header = log.read(LOG_HEADER_BYTES)
    except FileNotFoundError:
        return None
    return LOG_SALTS.unpack_from(header) if len(header) == LOG_HEADER_BYTES else None


def lost_of_log(noted: LogState, found: LogState) -> str | None:
    """What is missing from the log according to the note; None if nothing is."""
    if noted.salts is None or noted.pages == 0:
        return None
    if found.salts == noted.salts:
        missing = noted.pages - found.pages
        return f"{missing} of {noted.pages} pages of the log are damaged or missing" if missing > 0 else None
    if found.salts is not None and found.salts[0] == (noted.salts[0] + 1) & 0xFFFFFFFF:
        # The log may just have restarted, which happens when all of it is in the file: then the second salt differs.
        return None if found.salts[1] != noted.salts[1] else "the header of the log is damaged"
    return f"the log of {noted.pages} pages is damaged or missing (or another program has copied it into the file)"


# --- The mark of a running store


class Mark:
    """The mark of an open store. Only the thread that writes the store uses it."""

    def __init__(self, path: Path, head: Head) -> None:
        """Write the mark durably, without a note: the note of an earlier run must not be compared with a new log."""
        self._path = path
        self._head = head
        with described(mark_path(path)):
            self._fd = os.open(mark_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._log_fd = -1
            try:
                self._log_fd = os.open(f"{path}-wal", os.O_RDONLY | os.O_CLOEXEC)
                durably(self._fd, head.encode().ljust(NOTE_AT + NOTE.size, b"\0"))
                sync_folder(path.parent)
            except BaseException:
                self.close()
                raise

    @property
    def ceiling(self) -> int:
        return self._head.ceiling

    def begin(self, run: int) -> None:
        self._write(self._head._replace(run=run))

    def reserve(self, token: int) -> int:
        """Raise the ceiling durably, so that this token may be granted; returns the new ceiling."""
        self._write(self._head._replace(ceiling=token + RESERVED_TOKENS))
        return self._head.ceiling

    def note(self, pages: int) -> None:
        """Writes down how many pages the log has, and its salts: it may have restarted at any commit. This is a call
        that can fail: through a map of the file, a full disk or a file that was cut short would end the process."""
        try:
            first, second = LOG_SALTS.unpack(os.pread(self._log_fd, LOG_SALTS.size, 0))
            os.pwrite(self._fd, NOTE.pack(first, second, pages, first ^ second ^ pages ^ NOTE_CHECK), NOTE_AT)
        except (OSError, struct.error):
            return  # without a note, less damage is noticed, but no token is lost

    def end(self, *, in_order: bool) -> None:
        """Called when the file is closed. `in_order`: the file records that its run has ended. The end is clean if
        SQLite has also removed the log. May be called repeatedly."""
        with contextlib.suppress(StoreError, OSError):  # then the end does not count as clean
            if in_order and self._fd >= 0 and not Path(f"{self._path}-wal").exists():
                self._write(self._head._replace(clean=True, checksum=checksum_of(self._path)))
        self.close()

    def close(self) -> None:
        for fd in (self._fd, self._log_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._log_fd = -1

    def _write(self, head: Head) -> None:
        with described(mark_path(self._path)):
            durably(self._fd, head.encode())
        self._head = head


def checksum_of(path: Path) -> int:
    """Of a file that this process has no connection to: closing any descriptor of a file would drop the POSIX locks of
    SQLite on it, and another program could then take its log away. 0 if there is no file."""
    checksum = 0
    if not path.exists():
        return checksum
    with path.open("rb") as file:
        while part := file.read(_PART_BYTES):
            checksum = zlib.crc32(part, checksum)
    return checksum


def durably(fd: int, data: bytes) -> None:
    os.pwrite(fd, data, 0)
    os.fsync(fd)
