"""The program `pgleaderlock` as a real process: started, listened to line by line, signalled, waited for.

Imports the standard library only. Nothing of the environment reaches it that would choose a database.
"""

import contextlib
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

__all__ = ["PATIENCE_S", "Program", "command", "running"]

# Not asserted anywhere: only the bound after which a test gives up instead of hanging.
PATIENCE_S = 30.0
_READ_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Done:
    code: int
    out: str
    err: str


class Program:
    """A running process, and what it has said so far."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self._said = {"out": b"", "err": b""}

    @property
    def out(self) -> str:
        return self._said["out"].decode()

    @property
    def err(self) -> str:
        return self._said["err"].decode()

    def until(self, text: str, stream: str = "err", times: int = 1) -> None:
        """Reads until `text` has been said, so many times since the start."""
        deadline = time.monotonic() + PATIENCE_S
        while self._said[stream].count(text.encode()) < times:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"{text!r} was not said in time, but: {self.err}{self.out}"
            assert self._read(left_s), f"it ended before it said {text!r}: {self.err}{self.out}"

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Waits for the end, and reads everything until then."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read(max(0.0, deadline - time.monotonic())):
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def _read(self, timeout_s: float) -> bool:
        """Reads what there is, or waits for it; False when both streams have ended or time is up."""
        streams: dict[IO[bytes], str] = {}
        for name, stream in (("out", self.process.stdout), ("err", self.process.stderr)):
            assert stream is not None
            if not stream.closed:
                streams[stream] = name
        if not streams:
            return False
        ready: list[IO[bytes]] = select.select(list(streams), [], [], timeout_s)[0]
        for stream in ready:
            chunk = os.read(stream.fileno(), _READ_BYTES)
            self._said[streams[stream]] += chunk
            if not chunk:
                stream.close()
        return bool(ready)


def command(*args: str, env: Mapping[str, str] | None = None) -> Done:
    """Runs one command line to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "pgleaderlock", *args],
        env=environment(env or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


@contextlib.contextmanager
def running(*args: str, env: Mapping[str, str] | None = None, code: str = "") -> Iterator[Program]:
    """Runs one command line beside the test. `code` runs before it."""
    argv = [sys.executable, "-c", f"{code}\nfrom pgleaderlock.cli import main\nmain({list(args)!r})"]
    with started(argv, env or {}) as program:
        yield program


@contextlib.contextmanager
def started(argv: Sequence[str], env: Mapping[str, str]) -> Iterator[Program]:
    """A process with exactly these variables of ours; at the end it is killed if it still runs."""
    process = subprocess.Popen(
        argv, env=environment(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield Program(process)
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Ours without libpq's variables, PG_DSN and what changes the look of output; with `extra`."""
    kept = {name: value for name, value in os.environ.items() if re.match(r"(?!PG)|PGLEADERLOCK", name)}
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        kept.pop(name, None)
    return {**kept, **extra}
