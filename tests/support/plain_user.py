"""What a plain user needs in order to run pgleaderlock, when the tests run as root.

A root user's Python and checkout often lie below a folder that nobody else may enter. Here they are copied to where a
plain user can reach them, so that the test sees what such a user would see. Called by root only.
"""

import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pgleaderlock
from pgleaderlock.embedded import binaries

__all__ = ["PlainUser", "plain_user"]

PACKAGES = ("psycopg", "psycopg_binary", "psycopg_binary.libs", "typing_extensions.py")
# Large, and of no use to a program.
LEFT_OUT = ("test", "tests", "idlelib", "tkinter", "ensurepip", "site-packages", "__pycache__", "config-*")


@dataclass(frozen=True, slots=True)
class PlainUser:
    """An interpreter and an environment in which `import pgleaderlock` works for every account."""

    python: Path
    env: dict[str, str]


def plain_user(folder: Path, home: Path) -> PlainUser:
    """Puts what is out of reach into `folder`, which every account can enter."""
    programs = binaries.Programs.prepare()
    packages = folder / "packages"
    packages.mkdir()
    shutil.copytree(Path(pgleaderlock.__file__).parent, packages / "pgleaderlock")
    for name in PACKAGES:
        found = next(Path(path) / name for path in sys.path if (Path(path) / name).exists())
        if found.is_dir():
            shutil.copytree(found, packages / name)
        else:
            shutil.copy(found, packages / name)
    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(home),
        "PYTHONPATH": str(packages),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PGLEADERLOCK_PG_BIN": str(programs.binaries),
    }
    python = Path(sys.executable).resolve()
    if not _runs(python, programs.account):
        python = _copy_of_python(python, folder)
        # The interpreter looks for its library where it was built, and failing that takes the system's: another one.
        env["LD_LIBRARY_PATH"] = str(folder / "python" / "lib")
    return PlainUser(python, env)


def _runs(python: Path, account: binaries.Account) -> bool:
    try:
        return binaries.run_as(account, [str(python), "-c", ""], timeout_s=30).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def _copy_of_python(python: Path, folder: Path) -> Path:
    library = Path(sysconfig.get_path("stdlib"))
    copy = folder / "python" / "bin" / python.name
    copy.parent.mkdir(parents=True)
    shutil.copy(python, copy)
    target = folder / "python" / library.relative_to(sys.base_prefix)
    shutil.copytree(library, target, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for shared in Path(sys.base_prefix, "lib").glob("libpython*.so*"):
        shutil.copy(shared, folder / "python" / "lib" / shared.name)
    return copy
