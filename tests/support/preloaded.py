"""Python programs as real processes that need not import everything again.

Most of what a short command does is to import its modules. So each test process keeps one process that has imported the
package, and forks a child of it for each program: with its own pid, descriptors, variables, folder, signals and exit
code. It holds no connection, no thread and no event loop, so that there is nothing to share. Nor does a child take
apart at its end what it has not made itself: see `_leave`.

Programs that are not Python, and variables that have to be known before Python starts, are started in the ordinary way.

Imports the standard library. Run as a script, it is the process that forks.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import pkgutil
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

__all__ = ["Parent", "Process", "start"]

_MESSAGE_BYTES_MAX = 1 << 20
_STARTED_S_MAX = 60.0
# Read when Python starts, when a library is loaded or when a module is imported.
_EARLY = re.compile(r"PYTHON(?!UNBUFFERED)|LC_|LANG|LD_|LOGURU|MALLOC|UVLOOP|COVERAGE")


class Process(Protocol):
    """What tests use of `subprocess.Popen`."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


def start(argv: Sequence[str], env: Mapping[str, str], *, spoken_to: bool = False) -> Process:
    """Starts a program with these variables, its output and errors in pipes, and so its input, or an empty one."""
    if argv[0] == sys.executable and _early(env) == _early(os.environ):
        return _parent(os.getpid()).start(argv[1:], env, spoken_to=spoken_to)
    stdin = subprocess.PIPE if spoken_to else subprocess.DEVNULL
    return subprocess.Popen(
        list(argv), env=dict(env), stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )


def _early(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if _EARLY.match(name)}


@functools.cache
def _parent(pid: int) -> "Parent":
    """The one of this process: a fork of it gets its own."""
    return Parent()


class Parent:
    """The test's end of the process that forks."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._one_at_a_time = threading.Lock()
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-P", __file__], stdin=theirs.fileno(), cwd="/")
        atexit.register(self.end)

    def start(self, argv: Sequence[str], env: Mapping[str, str], *, spoken_to: bool = False) -> "_Child":
        in_end, into = os.pipe() if spoken_to else (os.open(os.devnull, os.O_RDONLY), None)
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        ends = [in_end, out_end, err_end]
        try:
            request = {"do": "start", "argv": list(argv), "env": dict(env), "cwd": str(Path.cwd())}
            pid = self.asks(request, ends)
        finally:
            for end in ends:
                os.close(end)
        return _Child(self, pid, into, out, err)

    def asks(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Any:
        with self._one_at_a_time:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            assert select.select([self._socket], [], [], _STARTED_S_MAX)[0], "the preloaded process does not answer"
            answer = self._socket.recv(_MESSAGE_BYTES_MAX)
            assert answer, f"the preloaded process has ended with {self._process.wait(_STARTED_S_MAX)}"
            return json.loads(answer)

    def end(self) -> None:
        self._socket.close()
        self._process.wait(_STARTED_S_MAX)


class _Child:
    """A program. As with every child, its pid is its own until it has been waited for."""

    def __init__(self, parent: Parent, pid: int, into: int | None, out: int, err: int) -> None:
        self._parent = parent
        self._code: int | None = None
        self._one_asks = threading.Lock()  # of two, the second would wait for a child that is gone
        self.pid = pid
        self.stdin: IO[bytes] | None = None if into is None else os.fdopen(into, "wb", buffering=0)
        self.stdout: IO[bytes] | None = os.fdopen(out, "rb", buffering=0)
        self.stderr: IO[bytes] | None = os.fdopen(err, "rb", buffering=0)

    def poll(self) -> int | None:
        with self._one_asks:
            if self._code is None:
                self._code = self._parent.asks({"do": "poll", "pid": self.pid})
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            ended = os.pidfd_open(self.pid)
            try:
                select.select([ended], [], [], timeout)
            finally:
                os.close(ended)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"program {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# -- The process that forks -------------------------------------------------------------------------------------------


def _preload() -> None:
    """Every module of the package whose libraries are there."""
    import pgleaderlock

    for module in pkgutil.walk_packages(pgleaderlock.__path__, "pgleaderlock."):
        # Not the doors for frameworks: those would be imported with them, for programs of ours that use none.
        if not module.name.endswith("__main__") and ".contrib." not in module.name:
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    gc.collect()
    gc.freeze()


def _forks(tests: socket.socket) -> dict[str, Any] | None:
    """Obeys until the test process is gone, which gives None. A child gets what it is to run."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(tests, _MESSAGE_BYTES_MAX, 3)
        if not message:
            return None
        request: dict[str, Any] = json.loads(message)
        if request["do"] == "start":
            pid = os.fork()
            if pid == 0:
                _become(request, descriptors)
                tests.close()
                return request
            for descriptor in descriptors:
                os.close(descriptor)
            answer: int | None = pid
        else:
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        tests.send(json.dumps(answer).encode())


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    if os.environ.get("PYTHONUNBUFFERED"):
        # As Python does it at its start. `reconfigure(write_through=True)` leaves the buffer below as it is.
        output = open(1, "wb", buffering=0, closefd=False)  # noqa: SIM115 - it is the output until the end
        sys.stdout = sys.__stdout__ = io.TextIOWrapper(output, "utf-8", write_through=True)  # type: ignore[misc]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _main() -> None:
    # Ctrl-C is for the tests, and whoever ends them ends this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _preload()
    # Not at 0, which is the input of each child.
    tests = socket.socket(fileno=os.dup(0))
    request = _forks(tests)
    if request is None:
        return
    code = 0
    try:
        _run(request)
    except SystemExit as end:
        # Another code is a message, which Python prints; and what is no SystemExit at all, it ends with as well.
        if end.code is not None and not isinstance(end.code, int):
            raise
        code = end.code or 0
    _leave(code)
    sys.exit(code)


def _leave(code: int) -> None:
    """Ends a child as Python ends a program, except that the modules are not taken apart, which would take four times
    as long as most programs run: it copies every page that the child shares.

    What the program has made and left is collected, and says so if it has to; what was there before is frozen. Comes
    back where the output cannot be written: then the ordinary end has the last word.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return
    gc.collect()
    sys.stderr.flush()
    os._exit(code)


def _run(request: Mapping[str, Any]) -> None:
    match request["argv"]:
        case ["-c", code, *args]:
            sys.argv = ["-c", *args]
            sys.path.insert(0, "")
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
        case ["-m", module, *args]:
            sys.argv = [module, *args]
            sys.path.insert(0, request["cwd"])
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *args]:
            sys.argv = [script, *args]
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _main()
