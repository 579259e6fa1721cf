"""Which file a command means, and why it cannot be run when it cannot.

The answers and exit codes are those that people know from their shell: 127 when nothing was found, 126 when
something was found that cannot be executed.

Imports the standard library and `errors` only. It must never start anything: `supervise` does.
"""

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from pgleaderlock.errors import PgLeaderLockError

__all__ = ["CommandError", "CommandNotExecutable", "CommandNotFound", "exec_failure", "find_executable"]


class CommandError(PgLeaderLockError):
    """The command was not run. `exit_code` is what a shell would exit with."""

    exit_code = 126


class CommandNotFound(CommandError):  # "Not found" is what every shell calls it.
    """There is no such command."""

    exit_code = 127


class CommandNotExecutable(CommandError):
    """There is such a file, but it cannot be executed."""


def find_executable(name: str, env: Mapping[str, str]) -> str:
    """The path to execute for `name`, looked up as a shell would: in the PATH that the command itself will see."""
    if not name:
        raise CommandNotFound("the command is an empty string: write the program to run after `--`")
    search_path = env.get("PATH", os.defpath)
    found = shutil.which(name, path=search_path)
    if found is not None:
        return found
    for candidate in _candidates(name, search_path):
        # The first file of that name is the one that was meant; a shell reports it too.
        if candidate.is_dir():
            if os.path.dirname(name):  # noqa: PTH120 - pathlib drops the "./" that makes the difference.
                raise CommandNotExecutable(f"{name}: is a directory, not a program")
        elif candidate.exists():
            raise CommandNotExecutable(f"{candidate}: permission denied (make it executable: chmod +x {candidate})")
    if os.path.dirname(name):  # noqa: PTH120 - as above.
        raise CommandNotFound(f"{name}: no such file")
    raise CommandNotFound(f"{name}: command not found in PATH={search_path}")


def exec_failure(path: str, errno_given: int) -> CommandError:
    """The error for what the kernel said when `path` was to be executed."""
    if errno_given == errno.ENOENT:
        if Path(path).exists():
            return CommandNotExecutable(f"{path}: the interpreter named in its first line does not exist")
        return CommandNotFound(f"{path}: no such file any more")
    if errno_given == errno.ENOEXEC:
        return CommandNotExecutable(
            f"{path}: not a program for this machine (a script needs a first line such as #!/bin/sh)"
        )
    return CommandNotExecutable(f"{path}: {os.strerror(errno_given)}")


def _candidates(name: str, search_path: str) -> Iterator[Path]:
    if os.path.dirname(name):  # noqa: PTH120 - as above.
        yield Path(name)
        return
    for folder in search_path.split(os.pathsep):
        yield Path(folder) / name
