"""A disk under SQLite that writes down what is written and synced, can be full or broken, and can be cut from power.

After a power cut a disk holds all that was synced and, of what was written since, any part. What a sync that failed was
to bring to the disk is lost for good, as on Linux: the system takes it for written, and no later sync brings it there.
`Disk.after_power_cut` makes such a disk from the record. Imports apsw and the standard library.
"""

import itertools
import random
from pathlib import Path
from typing import Any

import apsw

__all__ = ["Disk"]

_numbers = itertools.count()
Entry = tuple[str, str, int, bytes]


class Disk(apsw.VFS):
    """Use `disk.name` as the store's `vfs`. `record` is what happened, in order; marks of the test's own go in too."""

    def __init__(self) -> None:
        self.name = f"torn-{next(_numbers)}"
        super().__init__(self.name, "")
        self.record: list[Entry] = []
        self.full = False
        self.sync_fails = False
        self.read_fails = False
        self.syncs = 0

    def xOpen(self, name: Any, flags: list[int]) -> "_File":  # noqa: N802 - SQLite's name
        return _File(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        self.record.append(("delete", Path(filename).name, 0, b""))
        super().xDelete(filename, syncdir)

    def mark(self, what: str, number: int = 0) -> None:
        self.record.append(("mark", what, number, b""))

    def after_power_cut(self, at: int, folder: Path, chance: random.Random) -> None:
        """Makes in `folder` the files as a power cut after so many entries of the record may have left them."""
        folder.mkdir()
        synced = {name: index for index, (kind, name, _, _) in enumerate(self.record[:at]) if kind == "sync"}
        lost = self._lost(at)
        files: dict[str, bytearray] = {}
        for index, (kind, name, offset, data) in enumerate(self.record[:at]):
            if index in lost:
                continue
            if kind in {"write", "truncate"} and index > synced.get(name, -1) and chance.random() < 0.5:
                continue
            if kind == "write":
                content = files.setdefault(name, bytearray())
                content.extend(bytes(max(0, offset + len(data) - len(content))))
                content[offset : offset + len(data)] = data
            elif kind == "truncate":
                del files.setdefault(name, bytearray())[offset:]
            elif kind == "delete":
                files.pop(name, None)
        for name, content in files.items():
            (folder / name).write_bytes(content)

    def _lost(self, at: int) -> set[int]:
        """Which entries are what a sync that failed has lost."""
        lost: set[int] = set()
        unsynced: dict[str, list[int]] = {}
        for index, (kind, name, _, _) in enumerate(self.record[:at]):
            if kind in {"write", "truncate"}:
                unsynced.setdefault(name, []).append(index)
            elif kind == "sync":
                unsynced.pop(name, None)
            elif kind == "sync failed":
                lost.update(unsynced.pop(name, []))
        return lost


class _File(apsw.VFSFile):
    def __init__(self, disk: Disk, name: Any, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._disk = disk
        self._name = Path(name.filename() if isinstance(name, apsw.URIFilename) else name or "temporary").name

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
        if self._disk.read_fails:
            raise apsw.IOError("this disk does not read")
        return super().xRead(amount, offset)

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        if self._disk.full:
            raise apsw.FullError("no space left on this disk")
        self._disk.record.append(("write", self._name, offset, bytes(data)))
        super().xWrite(data, offset)

    def xTruncate(self, size: int) -> None:  # noqa: N802
        self._disk.record.append(("truncate", self._name, size, b""))
        super().xTruncate(size)

    def xSync(self, flags: int) -> None:  # noqa: N802
        if self._disk.sync_fails:
            self._disk.record.append(("sync failed", self._name, 0, b""))
            raise apsw.IOError("this disk does not sync")
        # Before the call: what another thread writes meanwhile may have come too late for this sync.
        self._disk.record.append(("sync", self._name, 0, b""))
        super().xSync(flags)
        self._disk.syncs += 1
