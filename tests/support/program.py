"""The program `pgleaderlock` as a real process: started, listened to line by line, signalled, waited for.

Imports `support.preloaded` and the standard library. Nothing of the environment reaches it that would choose a
database.
"""

import contextlib
import os
import re
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from support.preloaded import Process, start

__all__ = ["PATIENCE_S", "Program", "attended", "command", "environment", "port_of", "running", "started"]

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

    def __init__(self, process: Process) -> None:
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
            if left_s <= 0 or not self._read(left_s):
                raise AssertionError(f"{text!r} was not said: {self}")

    def __str__(self) -> str:
        """How it stands, and what it has said, for a test that fails."""
        code = self.process.poll()
        how = "it still runs" if code is None else f"it ended with {code}" if code >= 0 else f"it was ended by {-code}"
        return f"{how}; output {self.out!r}, errors:\n{self.err}"

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
    with started([sys.executable, "-m", "pgleaderlock", *args], env or {}) as program:
        code = program.end()
        return Done(code, program.out, program.err)


@contextlib.contextmanager
def running(*args: str, env: Mapping[str, str] | None = None, code: str = "") -> Iterator[Program]:
    """Runs one command line beside the test. `code` runs before it."""
    argv = [sys.executable, "-c", f"{code}\nfrom pgleaderlock.cli import main\nmain({list(args)!r})"]
    with started(argv, env or {}) as program:
        yield program


@contextlib.contextmanager
def started(argv: Sequence[str], env: Mapping[str, str]) -> Iterator[Program]:
    """A process with exactly these variables of ours; at the end it is killed if it still runs."""
    with attended(start(argv, environment(env))) as program:
        yield program


@contextlib.contextmanager
def attended(process: Process) -> Iterator[Program]:
    """A process that was started; at the end it is killed if it still runs."""
    try:
        yield Program(process)
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Ours without libpq's variables, PG_DSN and what changes the look of output; with `extra`."""
    kept = {name: value for name, value in os.environ.items() if re.match(r"(?!PG)|PGLEADERLOCK", name)}
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        kept.pop(name, None)
    return {**kept, **extra}


def port_of(program: Program) -> str:
    """The port of its endpoint for probes and metrics."""
    program.until("probes_listening")
    return str(re.findall(r"probes_listening.*\bport=(\d+)", program.err)[-1])
