"""`pgleaderlock serve`: where its settings come from, what it refuses to do, and what it says then."""

import dataclasses
import json
import re
import signal
import socket
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from conftest import StartServer
from pgleaderlock._http.access import Tokens
from pgleaderlock._http.server import ServingLimits, Tls
from pgleaderlock.cli.serve import _settings, serve
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.server.run import ServerSettings
from pgleaderlock.server.service import ServiceLimits
from support.lockserver import TOKEN_FILE, acquire, certificate, is_answered_200, lock_server, postgres_url
from support.program import command, running

SECRET = "s3cret-Pa55"


def listening_at(*args: str, env: dict[str, str] | None = None) -> str:
    with running("serve", *args, env=env) as server:
        server.until("\n", "out")
        return server.out


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/locks.db"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    path.write_text(TOKEN_FILE)
    path.chmod(0o600)
    return path


# --- What it finds


def test_damage_of_the_log_is_told_by_check_by_the_log_and_by_a_metric(tmp_path: Path, store: str) -> None:
    done = command("serve", "--check", "--store", store)
    assert (done.code, done.out) == (2, "")
    assert "there is no store" in done.err
    with lock_server(tmp_path) as server:
        acquire(server, "job")
        done = command("serve", "--check", "--store", store)
        assert done.code == 2
        assert "in use by another lock server" in done.err
    kept = [tmp_path / name for name in ("locks.db", "locks.db-wal", "locks.db-mark")]
    before = [path.read_bytes() for path in kept]
    (tmp_path / "locks.db-owner").unlink()
    done = command("serve", "--check", "--store", store)  # that one was killed
    assert done.code == 0
    assert [path.read_bytes() for path in kept] == before
    assert (tmp_path / "locks.db-owner").exists(), "the claim is all that it leaves"
    assert "is sound; the last run did not end in order" in done.out
    log = tmp_path / "locks.db-wal"
    data = bytearray(log.read_bytes())
    data[100] ^= 1
    log.write_bytes(data)
    for _ in range(2):  # it changes nothing
        done = command("serve", "--check", "--store", store)
        assert done.code == 1
        assert "is damaged" in done.out
        assert "pages of the log" in done.out
    with lock_server(tmp_path) as server:
        server.program.until("store_damaged", "err")
        shown = server.ask("GET", "/metrics").body.decode()
        assert "lock_store_damaged 1.0" in shown
        assert "lock_store_unclean 1.0" in shown
        server.program.signal(signal.SIGTERM)
        assert server.program.end() == 0
    done = command("serve", "--check", "--store", store)
    assert done.code == 0
    assert "ended in order" in done.out


# --- Where it listens


def test_it_listens_on_this_machine_only_and_says_where(store: str) -> None:
    said = listening_at("--port", "0", "--store", store)
    assert re.fullmatch(r"listening on http://127\.0\.0\.1:\d+ \(store sqlite:///.*, without tokens, .*\)\n", said)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "no-such-name.invalid"])
def test_beyond_this_machine_it_wants_tokens(store: str, host: str) -> None:
    done = command("serve", "--store", store, "--host", host, "--port", "0")
    assert done.code == 2
    assert "--token-file is needed" in done.err
    assert "Traceback" not in done.err


def test_with_tokens_it_serves_other_machines(store: str, token_file: Path) -> None:
    said = listening_at("--store", store, "--host", "0.0.0.0", "--port", "0", "--token-file", str(token_file))
    assert said.startswith("listening on http://0.0.0.0:")
    assert "with tokens" in said


def test_ipv6_is_shown_in_brackets(store: str) -> None:
    assert listening_at("--store", store, "--host", "::1", "--port", "0").startswith("listening on http://[::1]:")


def test_a_port_in_use_is_said_and_not_shared(tmp_path: Path) -> None:
    # With SO_REUSEPORT it would listen beside the other one, and each would get some of the requests.
    with lock_server(tmp_path) as first:
        done = command("serve", "--store", f"sqlite:///{tmp_path}/other.db", "--port", str(first.port))
    assert done.code == 2
    assert "another program uses this port" in done.err
    assert done.out == ""


def test_it_serves_https(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "served")
    with lock_server(tmp_path, "--tls-cert", str(cert), "--tls-key", str(key)) as server:
        assert server.url.startswith("https://")
        with server.over_tls(cert) as connection:
            assert is_answered_200(connection, "/healthz")


def test_two_servers_on_one_postgresql_share_their_locks(tmp_path: Path, throwaway_postgres: StartServer) -> None:
    dsn = throwaway_postgres().dsn
    url = postgres_url(dsn)
    with lock_server(tmp_path, store=url) as one, lock_server(tmp_path, store=url) as other:
        assert acquire(one, "shared").status == 200
        assert acquire(other, "shared", "w2").status == 409
        assert (one.stop(), other.stop()) == (0, 0)
        assert ":***@127.0.0.1" in one.program.out, "the password is not shown"
        assert str(conninfo_to_dict(dsn)["password"]) not in one.program.out + one.program.err


# --- What it refuses


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--store", "locks.db"], "--store must be sqlite:///"),
        (["--store", "sqlite://locks.db"], "sqlite:///locks.db"),
        (["--store", f"mysql://u:{SECRET}@h/db"], "--store must be"),
        (["--store", "sqlite:////no/such/folder/locks.db"], "/no/such/folder"),
        (["--token-file", "/no/such/tokens"], "cannot be read"),
        (["--tls-cert", "/no/such/cert"], "belong together"),
        (["--tls-cert", "/no/such/cert", "--tls-key", "/no/such/key"], "cannot be used"),
        (["--config", "/no/such/config"], "cannot be read"),
        (["--port", "70000"], "70000"),
        (["--max-connections", "100000000"], "file descriptors"),
        (["--store", "sqlite:///:memory:"], "have to outlive the server"),
        (["--allowed-host", "http://locks.example"], "give the name alone"),
        (["--max-wait", "90s"], "60s at most"),
        (["--max-waiters", "8", "--max-connections", "8"], "leaves no connection"),
        (["--host", "192.0.2.1", "--token-file", "{tokens}"], "does not have that address"),
    ],
)
def test_what_cannot_work_is_one_line_with_the_remedy(args: list[str], said: str, store: str, token_file: Path) -> None:
    given = [arg.replace("{tokens}", str(token_file)) for arg in args]
    done = command("serve", "--port", "0", *([] if "--store" in given else ["--store", store]), *given)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert "Traceback" not in done.err
    assert SECRET not in done.err


@pytest.mark.parametrize("missing", ["httptools", "apsw"])
def test_without_its_extra_it_says_what_to_install(missing: str, store: str) -> None:
    hide = (
        "import importlib.util as u; real = u.find_spec; "
        f"u.find_spec = lambda name, *rest: None if name == {missing!r} else real(name, *rest)"
    )
    with running("serve", "--store", store, "--port", "0", code=hide) as program:
        assert program.end() == 2
    assert program.err == f"error: the lock server needs {missing}: pip install 'pgleaderlock[server]'\n"


def test_a_signal_ends_it_while_its_database_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://u:{SECRET}@127.0.0.1:{silent.getsockname()[1]}/db?connect_timeout=600&sslmode=disable"
        with running("serve", "--port", "0", "--store", url) as server:
            asking, _ = silent.accept()
            with asking:
                server.signal(signal.SIGTERM)
                assert server.end() == 0
        assert SECRET not in server.err + server.out


# --- Where settings come from


def test_an_option_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    def store(name: str) -> str:
        return f"sqlite:///{tmp_path}/{name}.db"

    config = tmp_path / "serve.toml"
    config.write_text(f'store = "{store("file")}"\nport = 0\n')
    env = {"PGLEADERLOCK_SERVE_STORE": store("environment")}
    from_file = ["--config", str(config)]
    assert "file.db" in listening_at(*from_file)
    assert "environment.db" in listening_at(*from_file, env=env)
    assert "option.db" in listening_at(*from_file, "--store", store("option"), env=env)
    assert "file.db" in listening_at(env={"PGLEADERLOCK_SERVE_CONFIG": str(config)})


def test_every_option_can_be_in_the_file(tmp_path: Path, token_file: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text(
        f"""
store = "sqlite:///{tmp_path}/locks.db"
host = "127.0.0.1"
port = 0
token_file = "{token_file}"
allowed_host = ["locks.example", "other.example"]
max_connections = 10
max_connections_per_address = 5
max_waiters = 8
max_waiters_share = 5
max_wait = "5s"
max_locks = 10
strict_names = true
sweep_interval = "500ms"
header_timeout = 5
body_timeout = 2.5
dsn = "postgresql://nobody@127.0.0.1:1/none"
namespace = "team"
channel = "team"
access_log = true
log_format = "json"
log_level = "debug"
"""
    )
    written = set(re.findall(r"^(\w+) =", config.read_text(), re.MULTILINE))
    assert written | {"config", "check", "import_go", "tls_cert", "tls_key"} == {option.name for option in serve.params}
    with running("serve", "--config", str(config)) as server:
        server.until("\n", "out")
        port = int(re.findall(r":(\d+) ", server.out)[0])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: other.example\r\nX-Request-ID: r-7\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        server.until('"event": "request"')
    (line,) = [json.loads(line) for line in server.err.splitlines() if '"event": "request"' in line]
    assert (line["method"], line["path"], line["status"], line["request_id"]) == ("GET", "/healthz", 200, "r-7")


def test_every_option_arrives_in_the_settings(tmp_path: Path) -> None:
    given = {
        "--host": "127.0.0.7",
        "--port": "7427",
        "--token-file": f"{tmp_path}/tokens.toml",
        "--allowed-host": "locks.example",
        "--tls-cert": f"{tmp_path}/cert.pem",
        "--tls-key": f"{tmp_path}/key.pem",
        "--max-connections": "101",
        "--max-connections-per-address": "11",
        "--max-waiters": "31",
        "--max-waiters-share": "7",
        "--max-wait": "41s",
        "--sweep-interval": "500ms",
        "--header-timeout": "13s",
        "--body-timeout": "17s",
    }
    elsewhere = {"config", "store", "import_go", "max_locks", "dsn", "namespace", "channel"} | {
        "check", "log_format", "log_level"
    }  # fmt: skip
    flags = ["--access-log", "--strict-names"]
    assert {option.opts[0] for option in serve.params if option.name not in elsewhere} == {*given, *flags}
    context = serve.make_context("serve", [*(word for pair in given.items() for word in pair), *flags])
    expected = ServerSettings(
        host="127.0.0.7",
        port=7427,
        token_file=tmp_path / "tokens.toml",
        allowed_hosts=("locks.example",),
        tls=Tls(tmp_path / "cert.pem", tmp_path / "key.pem"),
        body_timeout_s=17.0,
        access_log=True,
        serving=ServingLimits(connections_max=101, connections_per_address_max=11, header_timeout_s=13.0),
        service=ServiceLimits(
            waiters_max=31, waiters_share=7, wait_ms_max=41_000, sweep_interval_s=0.5, strict_names=True
        ),
    )
    assert _settings(context.params) == expected
    for part, default in (
        (expected, ServerSettings()),
        (expected.serving, ServingLimits()),
        (expected.service, ServiceLimits()),
    ):
        for each in dataclasses.fields(part):
            if each.name != "header_bytes_max":  # which no option sets
                assert getattr(part, each.name) != getattr(default, each.name), "a default proves nothing"


def test_every_variable_of_serve_that_the_pages_name_exists() -> None:
    known = {option.envvar for option in serve.params}
    for page in (Path(__file__).parents[2] / "docs").glob("*.md"):
        named = set(re.findall(r"PGLEADERLOCK_SERVE_[A-Z_]+[A-Z]", page.read_text()))
        assert named <= known, page


@pytest.mark.parametrize(("connections", "waiters"), [("1024", 512), ("2000", 512), ("100", 50), ("1", 1)])
def test_half_of_the_connections_may_wait_if_nothing_is_said(connections: str, waiters: int) -> None:
    context = serve.make_context("serve", ["--max-connections", connections])
    limits = _settings(context.params).service
    assert (limits.waiters_max, limits.waiters_share) == (waiters, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('store = "x"\n\nprot = 1\n', "line 3: unknown setting 'prot': did you mean port?"),
        ("nonsense = 1\n", "line 1: unknown setting 'nonsense': known are"),
        ("[server]\nport = 1\n", "line 1: unknown setting 'server'"),
        ('allowed_host = "one"\n', "line 1: allowed_host takes a list"),
        ("port = [1]\n", "line 1: port takes one value"),
        ("access_log = 1\n", "line 1: access_log is true or false"),
        ("port = \n", "not TOML"),
        ('port = "many"\n', "many"),
        ('sweep_interval = "-1s"\n', "is not a duration"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    config = tmp_path / "serve.toml"
    config.write_text(text)
    done = command("serve", "--config", str(config))
    assert (done.code, done.out) == (2, "")
    assert said in " ".join(done.err.split())


# --- The token file


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "one [[token]] section"),
        ("token = 1", "one [[token]] section"),
        ("[token]\nname = 'a'", "one [[token]] section"),
        ("other = 1\n" + TOKEN_FILE, "and nothing else"),
        ("[[token]]\nname = 'a'\ntoken = 'short'", "shorter than 16"),
        ("[[token]]\nname = 'a'\ntoken = 'with a blank in it 12345'", "must be letters"),
        ("[[token]]\ntoken = 'long-enough-for-a-token'", "name must be"),
        ("[[token]]\nname = 'a'\ntoken = 'long-enough-for-a-token'\nadmn = true", "unknown key 'admn'"),
        ("[[token]]\nname = 'a'\ntoken = 'long-enough-for-a-token'\nadmin = 'yes'", "true or false"),
        ("[[token]]\nname = 'a'\ntoken = 'long-enough-for-a-token'\nprefix = 1", "prefix must be"),
        ("[[token]]\nname = 'a'\ntoken = 'long-enough-for-a-token'\n" * 2, "one token twice"),
        ("[[token]", "not TOML"),
    ],
)
def test_a_mistake_in_the_token_file_is_named_and_no_token_is_repeated(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match=re.escape(said)) as caught:
        Tokens(path)
    assert "long-enough" not in str(caught.value)
    assert "with a blank" not in str(caught.value)


def test_a_token_file_that_others_can_read_is_warned_about(tmp_path: Path, store: str, token_file: Path) -> None:
    token_file.chmod(0o644)
    with running("serve", "--store", store, "--port", "0", "--token-file", str(token_file)) as server:
        server.until("token_file_readable_by_others")
        server.until("listening on", "out")
    token_file.chmod(0o600)
    with running("serve", "--store", store, "--port", "0", "--token-file", str(token_file)) as server:
        server.until("server_started")
    assert "readable_by_others" not in server.err
