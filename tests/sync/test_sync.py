"""What the face for threads promises beyond the async one: threads, interrupts, forks, and the end of the program."""

import asyncio
import contextlib
import functools
import inspect
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import pgleaderlock
from pgleaderlock import ConfigurationError, LockError, LockNotAcquired, LockState, ShutdownError, key_pair
from pgleaderlock.election import ElectionOptions
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.errors import DatabaseError
from pgleaderlock.lock import LockOptions
from pgleaderlock.observer import ElectionObserver
from pgleaderlock.retry import FixedInterval
from pgleaderlock.sync import LeaderElection, LeaderLock, acquire_leadership, once
from support.counts import count
from support.elections import PATIENT, ledger_dsns
from support.fakes import captured_log
from support.server_side import holders, terminate, until_held_by

WAIT_S = 60.0
THREADS = 8
NOWHERE = "host=127.0.0.1 port=1 dbname=nowhere"


@pytest.fixture
def name() -> str:
    return f"sync-{uuid.uuid4()}"


@pytest.fixture
def program(dsn: str, name: str) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Starts a script that knows `DSN` and `NAME`; one that is left is ended, with its children."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str) -> "subprocess.Popen[str]":
        head = f"from pgleaderlock.sync import *\nimport os, sys, threading, time\nDSN, NAME = {dsn!r}, {name!r}\n"
        command = [sys.executable, "-c", head + script]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def said(process: "subprocess.Popen[str]", word: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == word


# --- held


def test_held_keeps_the_lock_for_the_block_and_not_longer(dsn: str, name: str) -> None:
    lock = LeaderLock.for_name(dsn, name)
    with lock.held(timeout_s=WAIT_S) as lost:
        assert (lock.is_leader, lost.is_set(), len(holders(dsn, key_pair(name)))) == (True, False, 1)
        with pytest.raises(LockNotAcquired, match=name), LeaderLock.for_name(dsn, name).held(timeout_s=0.05):
            pytest.fail("two hold it")
    assert lock.state is LockState.STOPPED
    # The other one's session, which has ended, may be granted the lock for a moment.
    asyncio.run(until_held_by(dsn, key_pair(name), 0))


@pytest.mark.parametrize("auto_reacquire", [False, True])
def test_held_of_a_running_lock_steps_down_after_the_block(dsn: str, name: str, auto_reacquire: bool) -> None:
    with LeaderLock.for_name(dsn, name, auto_reacquire=auto_reacquire) as lock:
        with lock.held(timeout_s=WAIT_S):
            assert lock.is_leader
        assert not lock.is_leader


def test_leadership_that_ends_inside_the_block_is_told_there_and_at_its_end(dsn: str, name: str) -> None:
    lock = LeaderLock.for_name(dsn, name)

    def block() -> None:
        with lock.held(timeout_s=WAIT_S) as lost:
            terminate(dsn, key_pair(name))
            assert lost.wait(WAIT_S)

    with pytest.raises(LockError, match="ended inside the block"):
        block()
    assert lock.state is LockState.STOPPED


def test_held_raises_the_exception_of_its_block_and_has_released_the_lock(dsn: str, name: str) -> None:
    with pytest.raises(KeyError), LeaderLock.for_name(dsn, name).held(timeout_s=WAIT_S):
        raise KeyError
    assert holders(dsn, key_pair(name)) == []


def test_a_database_that_cannot_be_reached_is_not_called_a_holder(name: str) -> None:
    with pytest.raises(DatabaseError, match="cannot connect"), LeaderLock.for_name(NOWHERE, name).held(timeout_s=0.5):
        pytest.fail("nothing is there to be held")


def test_held_within_itself_is_refused_and_does_not_hang(dsn: str, name: str) -> None:
    lock = LeaderLock.for_name(dsn, name)
    with lock.held(timeout_s=WAIT_S), pytest.raises(LockError, match="already"), lock.held(timeout_s=WAIT_S):
        pytest.fail("it would wait for itself at its end")
    with lock.held(timeout_s=WAIT_S):
        pass


@pytest.mark.parametrize("wrong", [-1, float("nan"), "5"])
def test_a_wait_that_is_no_time_is_refused(dsn: str, name: str, wrong: Any) -> None:
    lock = LeaderLock.for_name(dsn, name)
    with pytest.raises(ConfigurationError, match="timeout_s"), lock.held(timeout_s=wrong):
        pytest.fail("not a time")
    assert lock.state is LockState.STOPPED


def test_of_the_threads_that_share_a_lock_one_holds_it_at_a_time(dsn: str, name: str) -> None:
    inside: list[int] = []

    def hold(_: int) -> None:
        with lock.held(timeout_s=WAIT_S) as lost:
            inside.append(1)
            assert len(inside) == 1
            lost.wait(0.05)
            inside.pop()

    with LeaderLock.for_name(dsn, name) as lock, ThreadPoolExecutor(4) as pool:
        list(pool.map(hold, range(4)))
        with lock.held(timeout_s=WAIT_S), pytest.raises(LockNotAcquired):
            pool.submit(_hold_shortly, lock).result(WAIT_S)


def _hold_shortly(lock: LeaderLock) -> None:
    with lock.held(timeout_s=0.05):
        pytest.fail("another thread holds it")


# --- Callbacks


def test_callbacks_of_the_next_run_are_called_though_one_of_the_last_run_hung(
    postgres: EmbeddedPostgres, name: str
) -> None:
    hung, go_on, heard = threading.Event(), threading.Event(), threading.Event()

    def on_acquired(_: str) -> None:
        if hung.is_set():
            heard.set()
        else:
            hung.set()
            assert go_on.wait(WAIT_S)

    election = LeaderElection(ledger_dsns(postgres.dsn)["superuser"], name, **PATIENT)
    election.on_acquired(on_acquired)
    election.start()
    assert hung.wait(WAIT_S)
    with pytest.raises(ShutdownError):
        election.shutdown(timeout_s=0.05)
    election.start()
    go_on.set()
    assert heard.wait(WAIT_S)
    election.shutdown()


def test_a_lock_may_be_started_again_by_the_callback_that_hears_of_its_end(dsn: str, name: str) -> None:
    restarted = threading.Event()
    lock = LeaderLock.for_name(dsn, name)

    @lock.on_stopped
    def again() -> None:
        if not restarted.is_set():
            lock.start()
            restarted.set()

    lock.start()
    assert lock.wait_for_leadership(WAIT_S)
    lock.shutdown(timeout_s=WAIT_S)
    assert restarted.wait(WAIT_S)
    lock.start()
    assert lock.wait_for_leadership(WAIT_S)
    lock.shutdown(timeout_s=WAIT_S)


# --- Threads


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.timeout(1800)  # at the full count
def test_start_and_stop_from_many_threads_leave_nothing_behind(dsn: str, name: str) -> None:
    with LeaderLock.for_name(dsn, name).held():
        pass  # the loop and its thread are there from now on
    threads, files = threading.active_count(), open_files()
    heard: list[str] = []

    def cycles(worker: int) -> None:
        for turn in range(count(40, 1_000) // THREADS):
            lock = LeaderLock.for_name(dsn, f"{name}-{worker}")
            lock.on_acquired(lambda: heard.append("acquired"))
            lock.on_stopped(lambda: heard.append("stopped"))
            with lock:
                assert lock.wait_for_leadership(WAIT_S), turn

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(cycles, range(THREADS)))
    assert heard.count("acquired") == heard.count("stopped") == count(40, 1_000)
    for thread in threading.enumerate():
        if thread.name == "pgleaderlock callbacks":
            thread.join(WAIT_S)  # it ends a moment after its last callback
    assert threading.active_count() <= threads
    assert open_files() <= files


def test_the_work_runs_in_the_thread_that_leads(dsn: str, name: str) -> None:
    with LeaderLock.for_name(dsn, name) as lock:
        assert lock.lead(lambda stop: (threading.current_thread(), stop.is_set())) == (
            threading.current_thread(),
            False,
        )


def test_a_work_may_ask_for_the_end_of_its_own_term(dsn: str, name: str) -> None:
    turns: list[bool] = []

    def work(stop: threading.Event) -> str | None:
        if turns:
            return "again"
        lock.step_down()
        turns.append(stop.wait(WAIT_S))
        return None

    with LeaderLock.for_name(dsn, name) as lock:
        assert lock.lead(work) == "again"
    assert turns == [True]


def test_the_release_waits_for_a_work_that_has_not_seen_its_stop(dsn: str, name: str) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work(stop: threading.Event) -> None:
        begun.set()
        assert go_on.wait(WAIT_S)

    with LeaderLock.for_name(dsn, name, auto_reacquire=False) as lock, ThreadPoolExecutor(2) as pool:
        leading = pool.submit(lock.lead, work)
        assert begun.wait(WAIT_S)
        stepping_down = pool.submit(lock.step_down)
        assert len(holders(dsn, key_pair(name))) == 1
        go_on.set()
        stepping_down.result(WAIT_S)
        assert holders(dsn, key_pair(name)) == []
        leading.result(WAIT_S)


def test_an_async_function_is_refused_with_the_remedy(dsn: str, name: str) -> None:
    async def work(*_: object) -> None: ...

    with LeaderLock.for_name(dsn, name) as lock:
        for use in (lock.lead, lock.on_acquired):
            with pytest.raises(ConfigurationError, match="plain function"):
                use(work)
    with pytest.raises(ConfigurationError, match=r"call shutdown\(\)"):
        LeaderLock.for_name(dsn, name, shutdown_event=asyncio.Event())


def test_a_call_with_an_argument_that_there_is_not_fails_and_does_not_hang(dsn: str, name: str) -> None:
    with LeaderLock.for_name(dsn, name) as lock, pytest.raises(TypeError):
        lock.lead(lambda stop: None, nonsense=True)


def test_an_observer_that_would_block_its_own_loop_is_refused(postgres: EmbeddedPostgres, name: str) -> None:
    refused: list[Exception] = []

    class Blocking(ElectionObserver):
        def acquired(self, role: str, epoch: int, latency_s: float, from_other: bool) -> None:
            try:
                election.drain(role)
            except LockError as error:
                refused.append(error)

    election = LeaderElection(ledger_dsns(postgres.dsn)["superuser"], name, **PATIENT)
    election.observe(Blocking())
    with election:
        assert election.gate(name).wait_open(WAIT_S)
    assert "from another thread" in str(refused[0])


def test_once_runs_the_work_in_the_calling_thread_and_only_once(postgres: EmbeddedPostgres, name: str) -> None:
    ledger = ledger_dsns(postgres.dsn)["superuser"]
    works = [once(ledger, name, lambda token, _: (token.role, threading.current_thread()), slot="s") for _ in range(2)]
    assert [(each.ran, each.value) for each in works] == [(True, (name, threading.current_thread())), (False, None)]


# --- The process


async def test_at_the_end_of_the_program_leadership_is_released_and_told(
    dsn: str, name: str, program: Callable[[str], "subprocess.Popen[str]"]
) -> None:
    process = program(
        "lock = LeaderLock.for_name(DSN, NAME)\n"
        "lock.on_released(lambda: print('released', flush=True))\n"
        "lock.start()\n"
        "lock.wait_for_leadership()\n"
        "print('leads', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    said(process, "leads")
    said(process, "released")
    assert process.wait(WAIT_S) == 0
    await until_held_by(dsn, key_pair(name), 0)


def test_after_the_end_of_the_program_a_call_is_refused_and_does_not_hang(
    program: Callable[[str], "subprocess.Popen[str]"],
) -> None:
    process = program(
        "import atexit\n"
        "def late():\n"
        "    try:\n"
        "        LeaderLock.for_name(DSN, NAME).start()\n"
        "    except Exception as error:\n"
        "        print(error, flush=True)\n"
        "import pgleaderlock.sync.background as background\n"
        "atexit.unregister(background._background.end)\n"
        "atexit.register(late)\n"
        "atexit.register(background._background.end)\n"
        "with LeaderLock.for_name(DSN, NAME).held():\n"
        "    pass\n"
    )
    said(process, "the program is ending: nothing can be begun any more")
    assert process.wait(WAIT_S) == 0


class Interrupted(BaseException):
    """As KeyboardInterrupt, which pytest takes for its own."""


@pytest.mark.parametrize("kind", ["lock", "election"])
def test_a_lead_that_was_interrupted_gives_up_leadership_until_it_is_entered_again(
    postgres: EmbeddedPostgres, name: str, kind: str
) -> None:
    dsn = ledger_dsns(postgres.dsn)["superuser"]
    with captured_log() as records, contextlib.ExitStack() as stack:
        lead: Callable[[Callable[..., object]], object]
        if kind == "lock":
            lead = stack.enter_context(LeaderLock.for_name(dsn, name, retry_strategy=FixedInterval(0.05))).lead
        else:
            lead = functools.partial(stack.enter_context(LeaderElection(dsn, name, **PATIENT)).lead, name)

        def interrupted(*_: object) -> None:
            raise Interrupted

        with pytest.raises(Interrupted):
            lead(interrupted)
        with LeaderLock.for_name(dsn, name).held(timeout_s=WAIT_S):  # another one may have it
            pass
        assert lead(lambda *_: "done") == "done"
    told = [vars(record).get("event") for record in records]
    assert (told.count("lead_cancelled"), "work_failed" in told) == (2, False)  # the other one has left its block


@pytest.mark.parametrize("where", ["in the work", "while it follows"])
async def test_ctrl_c_leaves_lead_and_nothing_is_held(
    dsn: str, name: str, program: Callable[[str], "subprocess.Popen[str]"], where: str
) -> None:
    script = (
        "signal = __import__('signal'); signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def work(stop):\n"
        "    print('works', flush=True)\n"
        "    time.sleep(600)\n"
        "lock = LeaderLock.for_name(DSN, NAME)\n"
        "lock.on_acquire_failed(lambda: print('follows', flush=True))\n"
        "try:\n"
        "    with lock:\n"
        "        lock.lead(work)\n"
        "except KeyboardInterrupt:\n"
        "    print(lock.state.name, flush=True)\n"
    )
    with contextlib.ExitStack() as stack:
        if where == "while it follows":
            stack.enter_context(acquire_leadership(dsn, name))
        process = program(script)
        said(process, "works" if where == "in the work" else "follows")
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.read().split()[-1] == "STOPPED"
        assert process.wait(WAIT_S) == 0
    await until_held_by(dsn, key_pair(name), 0)


async def test_a_forked_child_does_not_lead_and_may_start_anew(
    dsn: str, name: str, program: Callable[[str], "subprocess.Popen[str]"]
) -> None:
    """As under gunicorn --preload: made and started before the fork."""
    process = program(
        "lock = LeaderLock.for_name(DSN, NAME)\n"
        "lock.on_acquired(lambda: print('acquired', flush=True))\n"
        "lock.start()\n"
        "lock.wait_for_leadership()\n"
        "with acquire_leadership(DSN, NAME + '-guard') as guard:\n"
        "    time.sleep(0)\n"
        "    sys.stdout.flush()\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        own = LeaderLock.for_name(DSN, NAME + '-child')\n"
        "        with own.held(timeout_s=60):\n"
        "            print(lock.is_leader, lock.state.name, guard.held, own.is_leader, flush=True)\n"
        "        lock.start()\n"
        "        print(lock.wait_for_leadership(0.05), flush=True)\n"
        "        lock.shutdown()\n"
        "        os._exit(0)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), lock.is_leader, guard.check(), flush=True)\n"
    )
    said(process, "acquired")
    said(process, "False STOPPED False True")
    said(process, "False")
    said(process, "0 True True")
    assert process.wait(WAIT_S) == 0
    await until_held_by(dsn, key_pair(name), 0)


@pytest.mark.parametrize("leave", ["sys.exit(7)", "raise KeyError(1)"])
@pytest.mark.parametrize(
    "inside",
    [
        "with LeaderLock.for_name(DSN, NAME).held(timeout_s=60):\n    fork()\n",
        "with LeaderLock.for_name(DSN, NAME) as lock:\n    lock.lead(lambda stop: fork())\n",
    ],
    ids=["held", "lead"],
)
async def test_a_child_that_was_forked_inside_can_leave(
    dsn: str, name: str, program: Callable[[str], "subprocess.Popen[str]"], inside: str, leave: str
) -> None:
    process = program(
        "sys.stderr = open(os.devnull, 'w')\n"
        "def fork():\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        f"        {leave}\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
        f"{inside}"
        "print('left', flush=True)\n"
    )
    said(process, "7" if "7" in leave else "1")
    said(process, "left")
    assert process.wait(WAIT_S) == 0
    await until_held_by(dsn, key_pair(name), 0)


# --- The same options


@pytest.mark.parametrize(
    ("options", "made"),
    [(LockOptions, pgleaderlock.LeaderLock), (ElectionOptions, pgleaderlock.LeaderElection)],
    ids=["LeaderLock", "LeaderElection"],
)
def test_the_options_are_those_of_the_async_constructor(options: Any, made: type) -> None:
    parameters = inspect.signature(made).parameters.values()
    keywords = {one.name: one.annotation for one in parameters if one.kind is one.KEYWORD_ONLY}
    assert options.__annotations__ == keywords


@pytest.mark.parametrize("kind", ["LeaderLock", "LeaderElection", "LeaderGate", "LeadershipGuard"])
def test_every_name_that_users_call_is_there(kind: str) -> None:
    """What the gate has for its election is not for users."""
    for_elections = {
        *("open", "renew", "close", "drain", "cancel_acting", "switch_off", "opens_at", "deadline", "token"),
        *("wait_idle", "wait_closed", "wait_over", "shut_in_child", "begin_anew", "record", "told", "untold"),
    }
    made = {"lapses", "role", "name", "key", "require_leader", "ensure_epoch", "acting", "fenced", "disable", "enable"}
    public = {one for one in dir(getattr(pgleaderlock, kind)) if not one.startswith("_")}
    blocking = {one for one in dir(getattr(pgleaderlock.sync, kind)) if not one.startswith("_")}
    missing = public - blocking - made - (for_elections if kind == "LeaderGate" else set())
    assert missing == set()
