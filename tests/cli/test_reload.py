"""SIGHUP: tokens and certificate are read again, nothing is lost; and what a terminal that is gone means."""

import os
import pty
import signal
import ssl
from pathlib import Path

import pytest

from support.lockserver import (
    PLAIN_TOKEN,
    TOKEN_FILE,
    LockServerProcess,
    acquire,
    certificate,
    is_answered_200,
    lease_of,
    lock_server,
    renews,
)

NEW_TOKEN = "brand-new-token-for-tests-0004"


def refused(server: LockServerProcess, said: str) -> None:
    server.program.signal(signal.SIGHUP)
    server.program.until("reload_failed")
    server.program.until(said)


def status(server: LockServerProcess, token: str) -> int:
    return server.ask("GET", "/v1/locks/job", token=token).status


# --- Tokens


def test_a_new_token_is_known_and_an_old_one_forgotten_and_leases_stay(tmp_path: Path) -> None:
    with lock_server(tmp_path, tokens=True) as server:
        lease = lease_of(acquire(server, "job"))
        (tmp_path / "tokens.toml").write_text(TOKEN_FILE.replace(PLAIN_TOKEN, NEW_TOKEN))
        assert (status(server, PLAIN_TOKEN), status(server, NEW_TOKEN)) == (200, 401), "nobody has asked for it yet"
        server.reload()
        assert (status(server, PLAIN_TOKEN), status(server, NEW_TOKEN)) == (401, 200)
        server.token = NEW_TOKEN
        assert renews(server, "job", lease)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[token]", "is not TOML"),
        ("", "needs one [[token]] section"),
        ("number = " + "9" * 5_000, "is not TOML"),
        ("deep = " + "[" * 5_000, "is not TOML"),
        (None, "is no file that can be read again"),
    ],
)
def test_a_token_file_with_a_mistake_changes_nothing_until_it_is_mended(
    tmp_path: Path, text: str | None, said: str
) -> None:
    path = tmp_path / "tokens.toml"
    with lock_server(tmp_path, tokens=True) as server:
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
        refused(server, said)
        assert status(server, PLAIN_TOKEN) == 200
        path.write_text(TOKEN_FILE.replace(PLAIN_TOKEN, NEW_TOKEN))
        server.reload()
        assert (status(server, PLAIN_TOKEN), status(server, NEW_TOKEN)) == (401, 200)
        assert server.stop() == 0


def test_a_pipe_is_not_read_again_and_nobody_waits_for_it(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    with lock_server(tmp_path, tokens=True) as server:
        path.unlink()
        os.mkfifo(path)
        refused(server, "is no file that can be read again")
        assert status(server, PLAIN_TOKEN) == 200


def test_a_defect_in_a_reload_does_not_end_the_next_one(tmp_path: Path) -> None:
    once = (
        "from pgleaderlock._http.access import Tokens\n"
        "right = Tokens.read_again\n"
        "def wrong(self):\n"
        "    Tokens.read_again = right\n"
        "    raise KeyError('ours')\n"
        "Tokens.read_again = wrong\n"
    )
    with lock_server(tmp_path, tokens=True, code=once) as server:
        refused(server, "KeyError('ours')")
        server.reload()


def test_a_signal_during_the_start_is_obeyed_after_it(tmp_path: Path) -> None:
    early = (
        "import os, signal\n"
        "from pgleaderlock.server.run import LockServer\n"
        "start = LockServer.start\n"
        "async def signalled(self):\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    await start(self)\n"
        "LockServer.start = signalled\n"
    )
    with lock_server(tmp_path, code=early) as server:
        server.program.until("reloaded")
        assert server.ask("GET", "/healthz").status == 200
        assert server.program.err.index("server_started") < server.program.err.index("reloaded")


# --- The certificate


def test_a_new_certificate_is_shown_to_whoever_connects_next(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "served")
    new_cert, new_key = certificate(tmp_path, "new")
    with lock_server(tmp_path, "--tls-cert", str(cert), "--tls-key", str(key)) as server:
        old_cert = cert.rename(tmp_path / "old.pem")
        with server.over_tls(old_cert) as before:
            new_cert.rename(cert)
            new_key.rename(key)
            server.reload()
            with server.over_tls(cert) as after:
                assert is_answered_200(after, "/healthz")
            with pytest.raises(ssl.SSLCertVerificationError):
                server.over_tls(old_cert)
            assert is_answered_200(before, "/healthz"), "who is connected stays so"


def test_a_certificate_that_does_not_fit_its_key_changes_nothing_the_tokens_neither(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "served")
    other_cert, _ = certificate(tmp_path, "other")
    with lock_server(tmp_path, "--tls-cert", str(cert), "--tls-key", str(key), tokens=True) as server:
        right_cert = cert.rename(tmp_path / "right.pem")
        other_cert.rename(cert)
        (tmp_path / "tokens.toml").write_text(TOKEN_FILE.replace(PLAIN_TOKEN, NEW_TOKEN))
        refused(server, "cannot be used")
        with server.over_tls(right_cert) as connection:
            assert is_answered_200(connection, "/v1/locks/job", f"Authorization: Bearer {PLAIN_TOKEN}")


# --- The terminal


@pytest.fixture
def terminal() -> tuple[int, str]:
    """A real one: the descriptor at its far end, and its name."""
    master, slave = pty.openpty()
    name = os.ttyname(slave)
    os.close(slave)
    return master, name


def within(name: str) -> str:
    """Makes it the terminal of a program: a session's first process gets the first one that it opens."""
    return f"import os, signal\nos.setsid()\nos.dup2(os.open({name!r}, os.O_RDWR), 0)\n"


def test_the_end_of_its_terminal_ends_a_server_cleanly_however_often_it_is_told(
    tmp_path: Path, terminal: tuple[int, str]
) -> None:
    master, name = terminal
    with lock_server(tmp_path, code=within(name)) as server:
        os.close(master)
        server.program.until("stopping signal=SIGHUP")
        for _ in range(3):
            server.program.signal(signal.SIGHUP)
        assert server.program.end() == 0


def test_a_server_under_nohup_outlives_its_terminal_and_reads_again(tmp_path: Path, terminal: tuple[int, str]) -> None:
    master, name = terminal
    ignored = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    with lock_server(tmp_path, tokens=True, code=within(name) + ignored) as server:
        os.close(master)
        server.program.until("reloaded")
        assert acquire(server, "job").status == 200


def test_a_second_signal_after_the_end_of_the_terminal_ends_at_once(tmp_path: Path, terminal: tuple[int, str]) -> None:
    master, name = terminal
    stuck = (
        "from pgleaderlock.server.run import LockServer\n"
        "async def stop(self):\n"
        "    import asyncio\n"
        "    await asyncio.Event().wait()\n"
        "LockServer.stop = stop\n"
    )
    with lock_server(tmp_path, code=within(name) + stuck) as server:
        os.close(master)
        server.program.until("stopping signal=SIGHUP")
        server.program.signal(signal.SIGTERM)
        assert server.program.end() == 128 + signal.SIGTERM
