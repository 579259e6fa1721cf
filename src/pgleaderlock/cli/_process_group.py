"""Who is left in a process group.

`kill(-pgid, 0)` cannot tell: it also succeeds for processes that are dead but not yet reaped, and in a container
whose first process reaps nobody they stay for ever. A dead process can do no harm, so only live ones are counted.

Imports the standard library only. It looks, and must never send a signal.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

__all__ = ["live_members"]

_PROC = Path("/proc")
_PS = ("ps", "-A", "-o", "pid=,pgid=,stat=")
_PS_TIMEOUT_S = 5.0
_DEAD = frozenset("ZX")


def live_members(pgid: int) -> frozenset[int] | None:
    """The pids that live in group `pgid`; None where the system offers no way to find out.

    May block for some milliseconds on a machine with thousands of processes: call it from a thread.
    """
    rows = _rows_from_proc() if (_PROC / "self" / "stat").exists() else _rows_from_ps()
    if rows is None:
        return None
    return frozenset(pid for pid, group, state in rows if group == pgid and state not in _DEAD)


def _rows_from_proc() -> Iterator[tuple[int, int, str]]:
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_bytes()
        except OSError:
            continue  # It ended between the listing and the reading.
        # The name in parentheses may itself contain spaces and parentheses: what follows its last one is regular.
        state, _parent, group = stat.rpartition(b")")[2].split()[:3]
        yield int(entry.name), int(group), state.decode()


def _rows_from_ps() -> list[tuple[int, int, str]] | None:
    """For systems without /proc, such as macOS."""
    try:
        listing = subprocess.run(_PS, capture_output=True, timeout=_PS_TIMEOUT_S, check=True, text=True)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = (line.split() for line in listing.stdout.splitlines())
    return [(int(row[0]), int(row[1]), row[2][0]) for row in rows if len(row) == 3]
