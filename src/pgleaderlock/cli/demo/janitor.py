"""Cleans up after the demo, however the demo ends.

It is a small separate process. It creates the demo's folder, prints its path, and then reads from a pipe whose other
end only the demo holds. When that end closes, by `close()` or because the demo was killed, the janitor kills every
node, frozen ones included, waits for the end of the private server, and removes the folder.

The nodes are in this process's group: while this process lives, no other group can have the same number.

It is run by its path, so it imports only the standard library. It must never remove a folder that it did not create.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

__all__ = ["main"]

# A server that does not stop must not keep this process alive.
PATIENCE_S = 90
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def main(parent: Path, mode: int, server_mark: str) -> None:
    """`server_mark` is a file in the folder that is locked for as long as the server runs."""
    for signum in IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    folder = Path(tempfile.mkdtemp(prefix="pgleaderlock-demo-", dir=parent))
    folder.chmod(mode)
    # If the demo has ended already, only the folder is left to clean up.
    with contextlib.suppress(BrokenPipeError):
        os.write(1, os.fsencode(folder) + b"\n")
    while os.read(0, 1024):
        pass
    group = os.getpgrp()
    if os.fork() != 0:
        signal.pause()  # until the child kills the group, including this process
    os.setsid()
    os.killpg(group, signal.SIGKILL)
    signal.alarm(PATIENCE_S)
    _await_end_of_server(folder / server_mark)
    shutil.rmtree(folder, ignore_errors=True)


def _await_end_of_server(mark: Path) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        descriptor = os.open(mark, os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.close(descriptor)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2], 8), sys.argv[3])
