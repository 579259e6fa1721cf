"""`pgleaderlock lock`: each command as a process against a real server."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pgleaderlock.cli.output import EXIT_LOST, EXIT_NO, EXIT_NOT_WON, EXIT_OK, EXIT_USAGE
from pgleaderlock.client import LockClient
from support.lockserver import ADMIN_TOKEN, PLAIN_TOKEN, PREFIX_TOKEN, LockServerProcess, lock_server
from support.program import PATIENCE_S, Done, command, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockServerProcess]:
    with lock_server(tmp_path_factory.mktemp("locks"), tokens=True) as started:
        yield started


@pytest.fixture
def env(server: LockServerProcess) -> dict[str, str]:
    return {"PGLEADERLOCK_SERVER": server.url, "PGLEADERLOCK_TOKEN": PLAIN_TOKEN}


@pytest.fixture
def client(server: LockServerProcess) -> Iterator[LockClient]:
    """Somebody else, and an admin."""
    with LockClient(server.url, token=ADMIN_TOKEN, owner_id="somebody-else") as opened:
        yield opened


@pytest.fixture
def name() -> str:
    return f"cli/{uuid.uuid4().hex}"


def lock(*args: str, env: Mapping[str, str]) -> Done:
    return command("lock", *args, env=env)


def test_a_lease_is_taken_renewed_and_released_by_what_acquire_has_printed(
    env: dict[str, str], name: str, tmp_path: Path
) -> None:
    taken = lock("acquire", name, "--ttl", "60s", "--owner", "me", "--json", env=env)
    assert taken.code == EXIT_OK, taken.err
    lease = json.loads(taken.out)
    assert (lease["acquired"], lease["owner_id"], lease["fencing_token"]) == (True, "me", 1)
    file = tmp_path / "lease.json"
    file.write_text(taken.out)
    assert lock("renew", "--lease", str(file), "--ttl", "5m", env=env).code == EXIT_OK
    proof = ["--owner", "me", "--lease-id", lease["lease_id"], "--fencing-token", "1"]
    assert lock("renew", name, *proof, env=env).code == EXIT_OK
    assert lock("release", "--lease", str(file), env=env).code == EXIT_OK
    assert lock("release", "--lease", str(file), env=env).code == EXIT_NO
    assert lock("renew", "--lease", str(file), env=env).code == EXIT_LOST


def test_a_held_lock_is_75_and_says_by_whom(env: dict[str, str], client: LockClient, name: str) -> None:
    client.acquire(name, 60.0)
    plain = lock("acquire", name, env=env)
    assert plain.code == EXIT_NOT_WON
    assert "somebody-else" in plain.out
    said = json.loads(lock("acquire", name, "--json", env=env).out)
    assert (said["acquired"], said["current_owner_id"], said["reason"]) == (False, "somebody-else", "HELD")


def test_acquire_waits_for_its_turn(env: dict[str, str], client: LockClient, name: str) -> None:
    lease = client.acquire(name, 60.0)
    with running("lock", "acquire", name, "--wait", "60s", env=env) as program:
        while client.get(name).waiters == 0:
            assert program.process.poll() is None
        client.release(lease)
        assert program.end() == EXIT_OK
    assert "acquired" in program.out


def test_get_list_and_break_show_what_is_there(
    env: dict[str, str], client: LockClient, name: str, tmp_path: Path
) -> None:
    assert lock("get", name, env=env).code == EXIT_NO
    lease = client.acquire(name, 60.0)
    shown = lock("get", name, env=env)
    assert (shown.code, "somebody-else" in shown.out) == (EXIT_OK, True)
    listed = lock("list", "--prefix", name, "--json", env=env)
    assert [each["lock_name"] for each in json.loads(listed.out)["locks"]] == [name]
    assert lock("break", name, env=env).code == EXIT_USAGE  # not with this token
    assert client.get(name).held
    token_file = tmp_path / "token"
    token_file.write_text(ADMIN_TOKEN + "\n")
    broken = lock("break", name, "--token-file", str(token_file), env=env)
    assert (broken.code, "somebody-else" in broken.out) == (EXIT_OK, True)
    assert not client.get(name).held
    again = lock("break", name, "--token-file", str(token_file), env=env)
    assert (again.code, again.out) == (EXIT_OK, f"not broken: {name} was free\n")
    as_json = json.loads(lock("break", name, "--token-file", str(token_file), "--json", env=env).out)
    assert (as_json["broken"], as_json["was"]["held"]) == (False, False)
    assert "no locks" in lock("list", "--prefix", name, "--held", env=env).out
    assert lease.fencing_token == 1


def test_a_list_fits_into_sixty_columns_and_shows_no_control_characters(
    env: dict[str, str], client: LockClient, name: str
) -> None:
    client.acquire(f"{name}/" + "long-" * 20, 60.0)
    client.acquire(f"{name}/\u202e", 60.0)
    shown = lock("list", "--prefix", name, env={**env, "COLUMNS": "60"})
    assert shown.code == EXIT_OK
    assert max(map(len, shown.out.splitlines())) <= 60
    assert "\u202e" not in shown.out


@pytest.mark.parametrize(
    ("args", "extra", "said"),
    [
        (["get", "x"], {"PGLEADERLOCK_SERVER": ""}, "use --server http://host:7420, or set PGLEADERLOCK_SERVER"),
        (["get", "x"], {"PGLEADERLOCK_SERVER": "http://127.0.0.1:7420/path"}, "no path"),
        (["get", "x"], {"PGLEADERLOCK_SERVER": "http://127.0.0.1:0"}, "real port"),
        (["get", "x"], {"PGLEADERLOCK_SERVER": "http://127.0.0.1:1"}, "http://127.0.0.1:1: cannot connect"),
        (["get", "x"], {"PGLEADERLOCK_TOKEN": "unknown-token-of-nobody"}, "--token-file FILE"),
        (["release", "--lease", "/does/not/exist"], {}, "cannot be read: No such file or directory"),
        (["get", "x"], {"PGLEADERLOCK_SERVER": "ftp://x"}, "http://host:port"),
        (["get", "x"], {"PGLEADERLOCK_SERVER": "http://127.0.0.1:1"}, "no lock server has answered"),
        (["get", "x"], {"PGLEADERLOCK_TOKEN": "unknown-token-of-nobody"}, "401"),
        (["get", "x", "--token-file", "/does/not/exist"], {}, "--token-file"),
        (["acquire", "x", "--ttl", "11m"], {}, "ttl_s"),
        (["renew", "x"], {}, "which lease?"),
        (["release", "--lease", "/dev/null"], {}, "lock acquire --json"),
        (["exec", "x", "--ttl", "2s", "--grace", "2s", "--", "true"], {}, "--grace"),
        (["exec", "x"], {}, "COMMAND"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_wrong_is_2_and_one_sentence_without_the_token(
    env: dict[str, str], args: list[str], extra: dict[str, str], said: str
) -> None:
    done = lock(*args, env={**env, **extra})
    assert done.code == EXIT_USAGE
    assert said in done.err
    assert "Traceback" not in done.err
    assert PLAIN_TOKEN not in done.out + done.err


@pytest.mark.parametrize(
    ("args", "token", "says"),
    [
        (["get", "elsewhere/x"], PREFIX_TOKEN, "give a name that begins so, or another token: --token-file FILE"),
        (["acquire", "elsewhere/x"], PREFIX_TOKEN, "give a name that begins so, or another token: --token-file FILE"),
        (["exec", "elsewhere/x", "--", "true"], PREFIX_TOKEN, "give a name that begins so, or another token"),
        (["list"], PREFIX_TOKEN, "give --prefix with that beginning, or another token: --token-file FILE"),
        (["break", "x"], PLAIN_TOKEN, "give an admin's token: --token-file FILE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_a_token_does_not_allow_is_told_with_the_options_that_help(
    env: dict[str, str], args: list[str], token: str, says: str
) -> None:
    done = lock(*args, env={**env, "PGLEADERLOCK_TOKEN": token})
    assert done.code == EXIT_USAGE
    assert says in done.err
    assert token not in done.err


# -- exec -------------------------------------------------------------------------------------------------------------


def test_a_command_runs_with_the_token_of_its_lease_and_its_exit_code_is_ours(
    env: dict[str, str], client: LockClient, name: str
) -> None:
    said = "$PGLEADERLOCK_LOCK_NAME $PGLEADERLOCK_FENCING_TOKEN $PGLEADERLOCK_OWNER_ID [$PGLEADERLOCK_TOKEN]"
    done = lock("exec", name, "--owner", "me", "--", "sh", "-c", f'echo "{said} $1"; exit 7', "sh", "--", env=env)
    assert (done.code, done.out) == (7, f"{name} 1 me [] --\n"), done.err
    assert not client.get(name).held


def test_a_command_is_not_run_while_somebody_else_holds_the_lock(
    env: dict[str, str], client: LockClient, name: str, tmp_path: Path
) -> None:
    client.acquire(name, 60.0)
    done = lock("exec", name, "--", "touch", str(tmp_path / "ran"), env=env)
    assert done.code == EXIT_NOT_WON
    assert "somebody-else" in done.err
    assert not (tmp_path / "ran").exists()


def test_a_command_starts_when_its_turn_comes(env: dict[str, str], client: LockClient, name: str) -> None:
    lease = client.acquire(name, 60.0)
    with running("lock", "exec", name, "--wait", "60s", "--", "echo", "mine", env=env) as program:
        while client.get(name).waiters == 0:
            assert program.process.poll() is None
        client.release(lease)
        assert program.end() == EXIT_OK
    assert program.out == "mine\n"


def test_a_lease_is_renewed_while_the_command_runs_longer_than_it(
    env: dict[str, str], client: LockClient, name: str
) -> None:
    with running("lock", "exec", name, "--ttl", "2s", "--", "sh", "-c", "echo on; exec sleep 600", env=env) as program:
        program.until("on", "out")
        token = client.get(name).fencing_token
        version = client.get(name).version
        while client.get(name).version < version + 4:  # four renewals are more than one ttl
            assert program.process.poll() is None, program.err
            time.sleep(0.02)
        assert (client.get(name).held, client.get(name).fencing_token) == (True, token)


def test_a_broken_lease_stops_the_command_with_its_whole_group(
    env: dict[str, str], client: LockClient, name: str, tmp_path: Path
) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/pid; trap 'echo told' TERM; echo on; while :; do wait; done"
    with running("lock", "exec", name, "--ttl", "1s", "--", "sh", "-c", script, env=env) as program:
        program.until("on", "out")
        client.break_lock(name)
        assert program.end() == EXIT_LOST
    assert "told" in program.out
    assert "lost" in program.err
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_a_frozen_server_stops_the_command_before_its_lease_ends(tmp_path: Path, name: str) -> None:
    """The command notes the time of its end; by the clock that leases are counted on, that is before the deadline."""
    noted = tmp_path / "noted"
    code = f"""
import signal, sys, time
def end(*_):
    open({str(noted)!r}, "w").write(str(time.clock_gettime(time.CLOCK_BOOTTIME)))
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("on", flush=True)
signal.pause()
"""
    hook = """
import pgleaderlock.cli.exec.one_run as module
given = module._keep_and_run
async def keep_and_run(client, lease, run):
    try:
        await given(client, lease, run)
    finally:
        print("deadline", lease.deadline, flush=True)
module._keep_and_run = keep_and_run
"""
    with lock_server(tmp_path) as own:
        env = {"PGLEADERLOCK_SERVER": own.url}
        args = ("lock", "exec", name, "--ttl", "2s", "--timeout", "1s", "--", sys.executable, "-c", code)
        with running(*args, env=env, code=hook) as program:
            program.until("on", "out")
            own.program.signal(signal.SIGSTOP)
            try:
                assert program.end() == EXIT_LOST
            finally:
                own.program.signal(signal.SIGCONT)
    deadline = float(program.out.split("deadline ")[1])
    assert float(noted.read_text()) < deadline


def test_signals_are_the_commands_and_the_lock_is_released_after_it(
    env: dict[str, str], client: LockClient, name: str
) -> None:
    script = "trap 'echo got it; exit 3' USR1; echo on; while :; do sleep 0.01; done"
    with running("lock", "exec", name, "--", "sh", "-c", script, env=env) as program:
        program.until("on", "out")
        program.signal(signal.SIGUSR1)
        assert program.end() == 3
    assert "got it" in program.out
    assert not client.get(name).held


def test_a_signal_while_waiting_ends_the_wait_and_leaves_no_waiter(
    env: dict[str, str], client: LockClient, name: str
) -> None:
    client.acquire(name, 60.0)
    with running("lock", "exec", name, "--wait", "60s", "--", "true", env=env) as program:
        while client.get(name).waiters == 0:
            assert program.process.poll() is None
        program.signal(signal.SIGTERM)
        assert program.end() == 128 + signal.SIGTERM
    deadline = time.monotonic() + PATIENCE_S
    while client.get(name).waiters:
        assert time.monotonic() < deadline


def test_a_command_that_cannot_run_takes_no_lock(env: dict[str, str], client: LockClient, name: str) -> None:
    assert lock("exec", name, "--", "no-such-program-here", env=env).code == 127
    assert client.get(name).fencing_token == 0


def test_a_lock_of_one_command_excludes_another_command(env: dict[str, str], name: str) -> None:
    with running("lock", "exec", name, "--", "sh", "-c", "echo on; exec sleep 600", env=env) as program:
        program.until("on", "out")
        assert lock("exec", name, "--", "true", env=env).code == EXIT_NOT_WON
        os.kill(program.process.pid, signal.SIGTERM)
        assert program.end() == 128 + signal.SIGTERM
    assert lock("exec", name, "--", "true", env=env).code == EXIT_OK


def test_help_needs_no_server() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pgleaderlock", "lock", "exec", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == EXIT_OK
    assert "PGLEADERLOCK_FENCING_TOKEN" in done.stdout
