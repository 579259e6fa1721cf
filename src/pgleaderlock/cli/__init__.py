"""The command line. `main` is the entry point of the `pgleaderlock` program.

Importing this package imports only the standard library, so that an installation without the extra `cli` gets a helpful
message instead of a traceback. Everything else starts in `app`. Nothing imports this package.
"""

import importlib.util
import sys
from collections.abc import Sequence

__all__ = ["main"]

_NEEDED = ("click", "loguru", "rich")
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130
"""What a shell reports after Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program with `argv` (default: the process's own) and exits with its code."""
    try:
        code = _run(argv)
    except KeyboardInterrupt:  # while it was imported: afterwards, `run` has an answer
        code = _EXIT_INTERRUPTED
    sys.exit(code)


def _run(argv: Sequence[str] | None) -> int:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"error: the command line needs {', '.join(missing)}: pip install 'pgleaderlock[cli]'",
            file=sys.stderr,
        )
        return _EXIT_USAGE
    from pgleaderlock.cli.app import run  # noqa: PLC0415 - needs what has just been looked for.

    return run(argv)
