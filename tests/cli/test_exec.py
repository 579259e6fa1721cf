"""`pgleaderlock exec`: the command runs only while this node leads, once, and never outlives its leadership.

Each test starts the real program against a real server. Outputs and ends of pipes are the signals that are waited for.
"""

import asyncio
import contextlib
import os
import re
import select
import signal
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from conftest import StartServer
from pgleaderlock import key_pair
from support import preloaded
from support.preloaded import Process
from support.program import Program, attended, command, started
from support.proxy import Proxy

# Not asserted anywhere: only the bound after which a test gives up instead of hanging.
PATIENCE_S = 30.0

Start = Callable[..., Process]

# Two processes that no SIGTERM ends. Both hold the output open.
STUBBORN = "(trap '' TERM; echo child; while :; do sleep 600; done) & trap '' TERM; echo parent; while :; do wait; done"


@pytest.fixture
def name() -> str:
    """A lock that no other test knows."""
    return f"exec-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def start(dsn: str, name: str) -> Iterator[Start]:
    """Starts `pgleaderlock exec`; at the end it is killed, if it still runs, and its command with it."""
    with contextlib.ExitStack() as all_started:

        def start_one(
            *command: str,
            options: tuple[str, ...] = (),
            on: str = dsn,
            spoken_to: bool = False,
            behind: tuple[str, ...] = (),
        ) -> Process:
            argv = [*behind, sys.executable, "-m", "pgleaderlock", "exec", "--name", name, *options, "--", *command]
            process = preloaded.start(argv, {**os.environ, "PG_DSN": on}, spoken_to=spoken_to)
            all_started.enter_context(attended(process))
            return process

        yield start_one


def sh(script: str) -> tuple[str, ...]:
    return "/bin/sh", "-c", textwrap.dedent(script)


def read_until(stream: object, wanted: bytes | None) -> bytes:
    """What comes until `wanted` was among it; until the end if None."""
    fd = stream.fileno()  # type: ignore[attr-defined]
    seen = b""
    deadline = time.monotonic() + PATIENCE_S
    while wanted is None or wanted not in seen:
        assert select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0], f"{wanted!r} not in {seen!r}"
        chunk = os.read(fd, 4096)
        if not chunk:
            assert wanted is None, f"waited for {wanted!r}, but the end came after {seen!r}"
            break
        seen += chunk
    return seen


def ended(process: Process) -> tuple[int, str, str]:
    """Exit code, output and errors, once it has ended. Reads what nobody has read yet."""
    if process.stdin is not None:
        process.stdin.close()
    program = Program(process)
    code = program.end()
    return code, program.out, program.err


def holders(dsn: str, name: str) -> list[int]:
    key1, key2 = key_pair(name)
    with psycopg.connect(dsn, autocommit=True) as look:
        rows = look.execute(
            "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND classid::bigint = %s"
            " AND objid::bigint = %s",
            (key1 & 0xFFFFFFFF, key2 & 0xFFFFFFFF),
        ).fetchall()
    return [row[0] for row in rows]


def end_session(dsn: str, name: str) -> None:
    (pid,) = holders(dsn, name)
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute("SELECT pg_terminate_backend(%s)", (pid,))


# --- while leading ---------------------------------------------------------------------------------------------------


def test_the_lock_is_held_while_the_command_runs_and_free_when_it_has_ended(start: Start, dsn: str, name: str) -> None:
    process = start("cat", spoken_to=True)
    process.stdin.write(b"ready\n")  # type: ignore[union-attr]
    read_until(process.stdout, b"ready\n")
    assert len(holders(dsn, name)) == 1
    assert ended(process) == (0, "", "")
    assert holders(dsn, name) == []


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -15 $$", 143)])
def test_the_exit_code_is_the_commands_own(start: Start, script: str, code: int) -> None:
    assert ended(start(*sh(script))) == (code, "", "")


def test_the_command_sees_the_lock_and_the_node_in_its_environment(start: Start, name: str) -> None:
    process = start(*sh("echo $PGLEADERLOCK_NAME $PGLEADERLOCK_KEY1 $PGLEADERLOCK_KEY2 $PGLEADERLOCK_NODE"))
    key1, key2 = key_pair(name)
    assert ended(process)[1] == f"{name} {key1} {key2} {os.uname().nodename}/{process.pid}\n"


def test_a_lock_given_by_its_keys_is_named_by_them(dsn: str) -> None:
    keys = ("--key1", "11", "--key2", "-12")
    assert command("exec", "--dsn", dsn, *keys, "printenv", "PGLEADERLOCK_NAME").out == "11/-12\n"


def test_the_lock_is_not_given_back_before_the_last_process_of_the_group_has_gone(
    start: Start, dsn: str, name: str, tmp_path: Path
) -> None:
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    # The command ends at once; its child is told to end, and takes its time.
    process = start(
        *sh(f"""
            (trap 'echo told; read -r _ <{fifo}; exit' TERM; echo ready; while :; do sleep 0.1; done) &
            read -r _; exit 5
        """),
        options=("--grace", f"{PATIENCE_S:g}"),
        spoken_to=True,
    )
    read_until(process.stdout, b"ready\n")
    process.stdin.close()  # type: ignore[union-attr]
    read_until(process.stdout, b"told\n")
    assert len(holders(dsn, name)) == 1
    fifo.write_text("go\n")
    read_until(process.stdout, None)
    assert process.wait(PATIENCE_S) == 5
    assert holders(dsn, name) == []


# --- not leading -----------------------------------------------------------------------------------------------------


def test_one_try_that_is_not_won_exits_75_runs_nothing_and_says_who_leads(start: Start, dsn: str, name: str) -> None:
    leader = start(*sh("echo leads; read -r _"), spoken_to=True)
    read_until(leader.stdout, b"leads\n")
    (pid,) = holders(dsn, name)
    code, out, err = ended(start("echo", "ran"))
    assert (code, out) == (75, "")
    assert err.startswith(f"error: not won: {name} is held by")
    assert f"pid {pid}" in err
    assert f"/{leader.pid}" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("options", [(), ("--standby-wait", "20")], ids=["trying-again", "waiting-at-the-server"])
def test_with_wait_it_runs_as_soon_as_the_leader_has_gone(start: Start, options: tuple[str, ...]) -> None:
    leader = start(*sh("echo leads; read -r _"), spoken_to=True)
    read_until(leader.stdout, b"leads\n")
    second = start("echo", "ran", options=("--wait", f"{PATIENCE_S:g}", "--log-level", "info", *options))
    read_until(second.stderr, b"to=follower" if not options else b"to=acquiring")
    leader.stdin.close()  # type: ignore[union-attr]
    assert ended(second)[:2] == (0, "ran\n")


def test_a_wait_that_is_over_exits_75_and_runs_nothing(start: Start) -> None:
    leader = start(*sh("echo leads; read -r _"), spoken_to=True)
    read_until(leader.stdout, b"leads\n")
    code, out, err = ended(start("echo", "ran", options=("--wait", "500ms", "--standby-wait", "20")))
    assert (code, out) == (75, "")
    assert "waited 0.5 s" in err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_that_comes_before_the_command_ends_the_wait(start: Start, signum: signal.Signals) -> None:
    leader = start(*sh("echo leads; read -r _"), spoken_to=True)
    read_until(leader.stdout, b"leads\n")
    second = start("echo", "ran", options=("--wait", "1h", "--log-level", "info"))
    read_until(second.stderr, b"to=follower")
    second.send_signal(signum)
    assert ended(second)[:2] == (128 + signum, "")


# --- the database ----------------------------------------------------------------------------------------------------


def test_the_end_of_the_command_is_not_reported_as_a_failure(start: Start) -> None:
    assert ended(start("/bin/sh", "-c", "exit 3")) == (3, "", "")


NOWHERE = "host=127.0.0.1 port=1"


def test_a_database_error_ends_one_try_at_once_with_one_line(start: Start) -> None:
    code, out, err = ended(start("echo", "ran", on=NOWHERE))
    assert (code, out) == (2, "")
    assert err.startswith("error: cannot connect")
    assert err.count("\n") == 1


def test_with_wait_a_database_error_is_retried_until_the_wait_is_over(start: Start) -> None:
    code, out, err = ended(start("echo", "ran", on=NOWHERE, options=("--wait", "500ms")))
    assert (code, out) == (2, "")
    assert err.startswith("warning: cannot connect")
    assert err.splitlines()[-1].startswith("error: cannot connect")


def test_with_wait_it_runs_once_the_database_is_there(start: Start, throwaway_postgres: StartServer) -> None:
    server = throwaway_postgres()
    server.stop()
    process = start("echo", "ran", on=server.dsn, options=("--wait", f"{PATIENCE_S:g}"))
    read_until(process.stderr, b"warning: cannot connect")
    server.start()
    assert ended(process)[:2] == (0, "ran\n")


def test_what_no_waiting_can_mend_ends_at_once_despite_wait(start: Start, dsn: str) -> None:
    code, out, err = ended(start("echo", "ran", on=f"{dsn} password=wrong", options=("--wait", "1h")))
    assert (code, out) == (2, "")
    assert "password authentication failed" in err


# --- the command cannot run ------------------------------------------------------------------------------------------


def test_a_command_that_cannot_run_is_refused_before_competing(start: Start, tmp_path: Path) -> None:
    plain_file = tmp_path / "file"
    plain_file.touch(0o644)
    # Nobody listens there: to compete would be exit code 2.
    assert ended(start("no-such-command-anywhere", on=NOWHERE))[0] == 127
    assert ended(start(str(plain_file), on=NOWHERE))[0] == 126


def test_a_command_that_the_kernel_refuses_gives_the_lock_back(
    start: Start, dsn: str, name: str, tmp_path: Path
) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    code, _, err = ended(start(str(script)))
    assert code == 126
    assert "interpreter" in err
    assert holders(dsn, name) == []


# --- signals ---------------------------------------------------------------------------------------------------------

SIGNALS = ["INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "WINCH"]


def test_signals_are_passed_on_each_time_they_come(start: Start) -> None:
    script = """
        import os, signal, sys
        def tell(number, _):  # not by print: a signal may come while it is still in the print of the one before
            os.write(1, (signal.Signals(number).name + "\\n").encode())
        for name in sys.argv[1:]:
            signal.signal(getattr(signal, "SIG" + name), tell)
        os.write(1, b"ready\\n")
        while sys.stdin.readline():
            pass
    """
    process = start(sys.executable, "-c", textwrap.dedent(script), *SIGNALS, spoken_to=True)
    read_until(process.stdout, b"ready\n")
    for signal_name in [*SIGNALS, "TERM", "INT"]:
        process.send_signal(getattr(signal, f"SIG{signal_name}"))
        read_until(process.stdout, f"SIG{signal_name}\n".encode())
    assert ended(process)[0] == 0


def test_a_command_ended_by_a_signal_that_was_passed_on_exits_128_plus_n(start: Start) -> None:
    process = start(*sh("echo ready; exec sleep 600"))
    read_until(process.stdout, b"ready\n")
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (143, "", "")


def test_a_signal_that_comes_while_the_command_is_being_started_reaches_it(dsn: str, name: str) -> None:
    program = """
        import os, signal, sys
        from pgleaderlock.cli import main
        from pgleaderlock.cli.exec import supervise
        start = supervise.Supervised.start
        async def start_late(*command):
            os.kill(os.getpid(), signal.SIGUSR1)
            return await start(*command)
        supervise.Supervised.start = start_late
        main(sys.argv[1:])
    """
    argv = ["exec", "--dsn", dsn, "--name", name, "--", "sleep", "600"]
    with started([sys.executable, "-c", textwrap.dedent(program), *argv], {}) as late:
        assert late.end() == 128 + signal.SIGUSR1


def test_what_our_parent_wants_ignored_stays_ignored(start: Start) -> None:
    process = start(
        *sh("echo ready; read -r _; kill -HUP $$; echo lives"),
        spoken_to=True,
        behind=(*sh("trap '' HUP; exec \"$@\""), "sh"),
    )
    read_until(process.stdout, b"ready\n")
    process.send_signal(signal.SIGHUP)
    assert ended(process)[:2] == (0, "lives\n")


# --- loss ------------------------------------------------------------------------------------------------------------


def test_on_loss_the_group_is_told_to_end_and_exec_exits_76(start: Start, dsn: str, name: str) -> None:
    process = start(*sh("trap 'echo told; exit 0' TERM; echo ran; while :; do sleep 600 & wait $!; done"))
    read_until(process.stdout, b"ran\n")
    end_session(dsn, name)
    # Once: the lock is free again, and the command must not be started a second time.
    code, out, err = ended(process)
    assert (code, out) == (76, "told\n")
    assert err.splitlines()[-1].startswith(f"error: lost leadership of {name}, so the command was stopped: ")


def test_on_loss_whoever_does_not_end_within_the_grace_is_killed_before_exec_exits(
    start: Start, dsn: str, name: str
) -> None:
    process = start(*sh(STUBBORN), options=("--grace", "200ms"))
    read_until(process.stdout, b"parent\n")
    end_session(dsn, name)
    read_until(process.stderr, b"error: lost leadership")
    assert process.wait(PATIENCE_S) == 76
    # Both held this pipe: it has ended, so they have.
    os.set_blocking(process.stdout.fileno(), False)  # type: ignore[union-attr]
    with contextlib.suppress(BlockingIOError):
        while os.read(process.stdout.fileno(), 4096):  # type: ignore[union-attr]
            pass
        return
    pytest.fail("a process of the group has outlived exec")


def test_a_restart_of_the_database_is_a_loss(start: Start, throwaway_postgres: StartServer) -> None:
    server = throwaway_postgres()
    process = start(*sh("echo ran; exec sleep 600"), on=server.dsn)
    read_until(process.stdout, b"ran\n")
    server.restart()
    assert ended(process)[:2] == (76, "")


async def test_a_cut_connection_stops_the_command_before_the_server_lets_a_successor_in(
    start: Start, dsn: str, name: str, proxy: Proxy
) -> None:
    options = ("--health-interval", "300ms", "--health-timeout", "300ms", "--session-lease", "1h", "--grace", "1s")
    process = start(*sh("echo ran; exec sleep 600"), on=proxy.dsn_for(dsn), options=options)
    await asyncio.to_thread(read_until, process.stdout, b"ran\n")
    proxy.cut()
    code, _, err = await asyncio.to_thread(ended, process)
    assert code == 76
    assert "did not answer" in err
    # The server has noticed nothing: to it we are still the leader.
    assert len(holders(dsn, name)) == 1


def test_a_loss_while_the_command_is_being_started_is_a_loss_and_starts_nothing(dsn: str, name: str) -> None:
    program = """
        import asyncio, sys
        from pgleaderlock.cli import main
        from pgleaderlock.cli.exec import supervise
        async def start_never(*command):
            print("starting", flush=True)
            await asyncio.Event().wait()
        supervise.Supervised.start = start_never
        main(sys.argv[1:])
    """
    argv = [sys.executable, "-c", textwrap.dedent(program), "exec", "--dsn", dsn, "--name", name, "--", "true"]
    with started(argv, {}) as never:
        never.until("starting\n", "out")
        end_session(dsn, name)
        assert (never.end(), never.out) == (76, "starting\n")


def test_an_exit_of_the_command_counts_although_the_lock_is_lost_while_its_children_end(
    start: Start, dsn: str, name: str
) -> None:
    process = start(
        *sh("(trap 'echo told' TERM; echo ready; while :; do sleep 0.1; done) & read -r _; exit 5"),
        options=("--grace", f"{PATIENCE_S:g}"),
        spoken_to=True,
    )
    read_until(process.stdout, b"ready\n")
    process.stdin.close()  # type: ignore[union-attr]
    read_until(process.stdout, b"told\n")
    end_session(dsn, name)
    assert ended(process)[0] == 5


# --- death of the supervisor -----------------------------------------------------------------------------------------


def test_a_killed_exec_takes_the_whole_group_with_it(start: Start) -> None:
    process = start(*sh(STUBBORN))
    read_until(process.stdout, b"parent\n")
    process.kill()
    read_until(process.stdout, None)


# --- usage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ((), False),
        (("--grace", "5s"), False),
        (("--grace", "6s"), True),
        (("--health-interval", "1s"), True),
        (("--health-interval", "1s", "--session-lease", "5s"), False),
    ],
)
def test_a_grace_longer_than_the_margin_of_the_lease_is_warned_of(
    start: Start, options: tuple[str, ...], warned: bool
) -> None:
    code, _, err = ended(start("true", options=options))
    assert code == 0
    assert err.startswith("warning: --grace") is warned


def test_bad_usage_exits_2_and_runs_nothing(start: Start, dsn: str) -> None:
    for options in (("--grace", "soon"), ("--wait", "-1"), ("--embedded", "--dsn", dsn), ("--session-lease", "1s")):
        code, out, err = ended(start("echo", "ran", options=options))
        assert (code, out) == (2, ""), options
        assert "rror: " in err


def test_without_a_command_it_is_a_usage_error(start: Start) -> None:
    assert ended(start())[0] == 2


@pytest.mark.parametrize("command_name", ["exec", "demo"])
def test_every_option_is_in_the_documentation(command_name: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    section = text.split(f"\n## {command_name}\n")[1].split("\n## ")[0]
    shared = text.split("\n## Options of several commands\n")[1].split("\n## ")[0]
    listed = re.findall(r"--[a-z0-9-]+", command(command_name, "--help").out)
    assert listed
    assert [option for option in set(listed) - {"--help"} if f"`{option}`" not in section + shared] == []
