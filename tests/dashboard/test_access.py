"""Who may look: each path without a token, with a wrong one, by a session, and by a session that has ended."""

import re
import time
from collections.abc import Iterator
from html import unescape
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode

import pytest

from pgleaderlock._http.access import Caller, Tokens
from pgleaderlock._http.answers import Refusal
from pgleaderlock.dashboard import logins
from pgleaderlock.dashboard.app import _cookie
from pgleaderlock.dashboard.logins import Login, Logins, check_same_origin, cookie_name
from support.dashboards import Book, dashboard, json_of, ledger, opened, token_file
from support.lockserver import ADMIN_TOKEN, PLAIN_TOKEN, PREFIX_TOKEN, LockServerProcess, Reply, acquire, lock_server

PINGS_OFTEN = "from pgleaderlock.dashboard import feed; feed.PING_S = 0.05"
SECRET_ROLE = "secret-role"
SECRET_NODE = "secret-node"
SECRET_LOCK = "secret-lock"
SECRETS = (SECRET_ROLE, SECRET_NODE, SECRET_LOCK)

# By hand, so that a new one is thought about.
PAGES = ["/", "/history", f"/history?role={SECRET_ROLE}", "/events", "/incidents", "/slots", "/nodes"]
DATA = [
    "/v1/leaders",
    f"/v1/leaders/{SECRET_ROLE}/terms",
    "/v1/leaders/unknown/terms",
    "/v1/events",
    "/v1/incidents",
    "/v1/slots",
    "/v1/nodes",
    "/v1/nothing",
    "/v1/",
]
LOCK_PAGES = ["/locks", f"/locks?prefix={SECRET_LOCK}"]
LOCK_DATA = ["/v1/locks", f"/v1/locks/{SECRET_LOCK}", "/metrics"]
OPEN = ["/healthz", "/readyz", "/openapi.json", "/sign-in", "/static/app.js", "/static/style.css"]


@pytest.fixture(scope="module")
def book() -> Iterator[Book]:
    with ledger() as written:
        session = written.session(SECRET_NODE)
        written.led(SECRET_ROLE, session)
        written.term(SECRET_ROLE, 1, session, SECRET_NODE, "-9 min", "-6 min", "lost")
        written.term(SECRET_ROLE, 2, session, SECRET_NODE, "-5 min")
        written.slot(SECRET_ROLE, "s", SECRET_NODE)
        written.event("acquired", SECRET_ROLE, SECRET_NODE)
        yield written


@pytest.fixture(scope="module")
def alone(book: Book, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockServerProcess]:
    """A dashboard with tokens."""
    with dashboard(book.reader, tokens=token_file(tmp_path_factory.mktemp("alone"))) as running:
        yield running


@pytest.fixture(scope="module")
def mounted(book: Book, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockServerProcess]:
    """A lock server with tokens."""
    with lock_server(tmp_path_factory.mktemp("mounted"), "--dsn", book.reader, tokens=True) as running:
        assert acquire(running, SECRET_LOCK).status == 200
        yield running


@pytest.fixture(params=["alone", "mounted"])
def server(request: pytest.FixtureRequest) -> LockServerProcess:
    running = request.getfixturevalue(request.param)
    assert isinstance(running, LockServerProcess)
    return running


def bare(server: LockServerProcess, method: str, path: str, body: bytes | None = None, /, **headers: str) -> Reply:
    """A request with nothing but what is said here."""
    connection = HTTPConnection(server.host, server.port, timeout=30)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    reply = Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    connection.close()
    return reply


def sign_in(server: LockServerProcess, token: str, to: str = "", **headers: str) -> Reply:
    form = {"Content_Type": "application/x-www-form-urlencoded", **headers}
    fields = {"token": token, **({"to": to} if to else {})}
    return bare(server, "POST", "/sign-in", urlencode(fields).encode(), **form)


def cookie_of(reply: Reply) -> str:
    assert (reply.status, reply.headers["location"]) == (303, "/")
    return reply.headers["set-cookie"].partition(";")[0]


@pytest.mark.parametrize("path", ["/history?role=a%26b&node=n", "/events", "/nodes"])
def test_a_sign_in_leads_to_where_one_wanted_to_go(server: LockServerProcess, path: str) -> None:
    asked = bare(server, "GET", path)
    assert asked.status == 303
    form = bare(server, "GET", asked.headers["location"]).body.decode()
    (to,) = re.findall(r'<input type="hidden" name="to" value="(.*?)">', form)
    assert unescape(to) == path
    again = sign_in(server, "wrong-token-000000000000", unescape(to))
    assert again.status == 403
    assert to in again.body.decode(), "a mistyped token does not lose the way"
    done = sign_in(server, PLAIN_TOKEN, unescape(to))
    assert (done.status, done.headers["location"]) == (303, path)


@pytest.mark.parametrize(
    "to",
    [
        "https://evil.example/",
        "//evil.example",
        "/\\evil.example",
        "/nowhere",
        "/v1/events",
        "/events\r\nX: 1",
        "events",
        "/events?a b",
        "/sign-out",
        "/events?" + "x" * 2000,
        "/eventsé",
        "javascript:alert(1)",
    ],
)
def test_a_sign_in_leads_to_pages_of_this_server_only(alone: LockServerProcess, to: str) -> None:
    done = sign_in(alone, PLAIN_TOKEN, to)
    assert (done.status, done.headers["location"]) == (303, "/")
    form = bare(alone, "GET", "/sign-in?" + urlencode({"to": to}))
    assert form.status == 200
    assert 'name="to"' not in form.body.decode()


def test_a_path_that_does_not_exist_is_a_page_for_browsers_and_json_for_programs(server: LockServerProcess) -> None:
    cookie = cookie_of(sign_in(server, PLAIN_TOKEN))
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8", "Cookie": cookie}
    page = bare(server, "GET", "/histroy<b>", **browser)
    assert (page.status, page.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert b"There is no such page" in page.body
    assert b'href="/"' in page.body
    assert b"<b>" not in page.body
    assert page.headers["content-security-policy"]
    program = bare(server, "GET", "/histroy", Authorization=f"Bearer {PLAIN_TOKEN}")
    assert (program.status, program.headers["content-type"]) == (404, "application/json")
    assert bare(server, "GET", "/v1/nothing", **browser).headers["content-type"] == "application/json"
    stranger = bare(server, "GET", "/histroy", Accept="text/html")
    assert (stranger.status, stranger.headers["location"]) == (303, "/sign-in")


def tells_nothing(reply: Reply) -> bool:
    said = reply.body.decode() + "".join(reply.headers.values())
    return not any(secret in said for secret in SECRETS)


WRONG = [
    {},
    {"Authorization": ""},
    {"Authorization": "Bearer wrong-token-000000000000"},
    {"Authorization": f"Basic {ADMIN_TOKEN}"},
    {"Cookie": "pgleaderlock_session_PORT="},
    {"Cookie": "pgleaderlock_session_PORT=AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"},
    {"Cookie": f"pgleaderlock_session_PORT={ADMIN_TOKEN}"},
]


@pytest.mark.parametrize("headers", WRONG, ids=lambda headers: next(iter(headers.values()), "nothing")[:12] or "empty")
def test_without_a_token_no_path_tells_anything(server: LockServerProcess, headers: dict[str, str]) -> None:
    headers = {name: value.replace("PORT", str(server.port)) for name, value in headers.items()}
    for path in DATA + LOCK_DATA:  # the latter are nothing on a dashboard that stands alone, which is not told either
        for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            reply = bare(server, method, path, **headers)
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer"), (method, path)
            assert tells_nothing(reply)
    streamed = bare(server, "GET", "/v1/events", Accept="text/event-stream", **headers)
    assert streamed.status == 401
    for path in PAGES + LOCK_PAGES:
        reply = bare(server, "GET", path, **headers)
        # Back to where they wanted to go, in their own words.
        to = "" if path == "/" else "?" + urlencode({"to": path})
        assert (reply.status, reply.headers["location"]) == (303, f"/sign-in{to}"), path
        assert tells_nothing(Reply(reply.status, {**reply.headers, "location": ""}, reply.body))
        assert bare(server, "POST", path, **headers).status == 405
    for path in OPEN:
        reply = bare(server, "GET", path, **headers)
        assert reply.status == 200, path
        assert tells_nothing(reply)


def test_with_a_token_or_a_session_every_path_answers(server: LockServerProcess) -> None:
    cookie = cookie_of(sign_in(server, PLAIN_TOKEN))
    for headers in ({"Authorization": f"Bearer {PLAIN_TOKEN}"}, {"Cookie": f"other=1; {cookie}; more=2"}):
        for path in (*PAGES, *DATA[:2], "/v1/events", "/v1/incidents", "/v1/slots", "/v1/nodes"):
            reply = bare(server, "GET", path, **headers)
            assert reply.status == 200, path
            assert SECRET_NODE in reply.body.decode(), path
        assert bare(server, "GET", "/v1/leaders/unknown/terms", **headers).status == 404


def test_a_session_looks_at_locks_and_changes_none(mounted: LockServerProcess) -> None:
    cookie = cookie_of(sign_in(mounted, ADMIN_TOKEN))
    for path in (*LOCK_PAGES, *LOCK_DATA[:2]):
        reply = bare(mounted, "GET", path, Cookie=cookie)
        assert reply.status == 200
        assert SECRET_LOCK in reply.body.decode()
    json = {"Content_Type": "application/json", "Cookie": cookie}
    for path in (f"/v1/locks/{SECRET_LOCK}/break", f"/v1/locks/{SECRET_LOCK}/acquire", "/v1/batch"):
        assert bare(mounted, "POST", path, b"{}", **json).status == 401, path
    assert bare(mounted, "GET", "/metrics", Cookie=cookie).status == 401
    assert bare(mounted, "GET", "/v1/locks", Cookie=cookie, Authorization="Bearer wrong-token-00000").status == 401


def test_a_limited_token_sees_its_locks_and_no_leaders(mounted: LockServerProcess) -> None:
    acquire(mounted, "team%2Fjob")
    cookie = cookie_of(sign_in(mounted, PREFIX_TOKEN))
    for headers in ({"Cookie": cookie}, {"Authorization": f"Bearer {PREFIX_TOKEN}"}):
        for path in (*DATA[:2], "/v1/events", "/v1/nodes"):
            reply = bare(mounted, "GET", path, **headers)
            assert reply.status == 403, path
            assert tells_nothing(reply)
        assert bare(mounted, "GET", "/v1/events", Accept="text/event-stream", **headers).status == 403
        for path in PAGES[1:]:
            page = bare(mounted, "GET", path, **headers)
            assert (page.status, "limited to some locks" in page.body.decode()) == (403, True)
            assert tells_nothing(page)
        assert bare(mounted, "GET", "/", **headers).headers["location"] == "/locks"
        page = bare(mounted, "GET", "/locks", **headers)
        assert (page.status, "team/job" in page.body.decode(), tells_nothing(page)) == (200, True, True)
        assert bare(mounted, "GET", f"/locks?prefix={SECRET_LOCK}", **headers).status == 403


def test_a_limited_token_is_told_so_where_there_are_no_locks_and_can_sign_out(alone: LockServerProcess) -> None:
    cookie = cookie_of(sign_in(alone, PREFIX_TOKEN))
    for path in PAGES:
        page = bare(alone, "GET", path, Cookie=cookie)
        assert (page.status, page.headers["content-type"]) == (403, "text/html; charset=utf-8")
        assert "This token is limited to some locks" in page.body.decode()
        assert '<form method="post" action="/sign-out">' in page.body.decode()
        assert tells_nothing(page)


def test_two_servers_of_one_host_keep_their_sessions_apart(
    alone: LockServerProcess, mounted: LockServerProcess
) -> None:
    # A browser has one jar for all ports of a host, and gives each server everything that is in it.
    jar = dict(cookie_of(sign_in(server, PLAIN_TOKEN)).split("=", 1) for server in (alone, mounted))
    assert set(jar) == {f"pgleaderlock_session_{server.port}" for server in (alone, mounted)}
    sent = "; ".join(f"{name}={value}" for name, value in jar.items())
    for server in (alone, mounted):
        assert bare(server, "GET", "/v1/leaders", Cookie=sent).status == 200


def test_the_cookie_has_no_port_in_its_name_where_the_address_has_none() -> None:
    for host, name in ((b"locks.example", ""), (b"locks.example:7421", "_7421"), (b"[::1]", ""), (b"[::1]:80", "_80")):
        assert cookie_name({b"host": host}) == f"pgleaderlock_session{name}"


def test_signing_in_again_ends_the_session_before(server: LockServerProcess) -> None:
    old = cookie_of(sign_in(server, PLAIN_TOKEN))
    refused = sign_in(server, "wrong-token-0000000000000", Cookie=old)
    assert (refused.status, bare(server, "GET", "/v1/leaders", Cookie=old).status) == (403, 200)
    new = cookie_of(sign_in(server, ADMIN_TOKEN, Cookie=old))
    assert [bare(server, "GET", "/v1/leaders", Cookie=cookie).status for cookie in (old, new)] == [401, 200]


def test_after_the_sign_out_the_cookie_is_worth_nothing(server: LockServerProcess) -> None:
    cookie = cookie_of(sign_in(server, PLAIN_TOKEN))
    assert bare(server, "GET", "/v1/leaders", Cookie=cookie).status == 200
    evil = bare(server, "POST", "/sign-out", Cookie=cookie, Origin="http://evil.example")
    assert evil.status == 403
    assert bare(server, "GET", "/v1/leaders", Cookie=cookie).status == 200
    left = bare(server, "POST", "/sign-out", Cookie=cookie)
    assert (left.status, left.headers["location"]) == (303, "/sign-in")
    assert re.match(r"pgleaderlock_session_\d+=;.*Max-Age=0", left.headers["set-cookie"])
    assert bare(server, "GET", "/v1/leaders", Cookie=cookie).status == 401


def test_the_cookie_is_out_of_reach_for_scripts_and_other_sites(server: LockServerProcess) -> None:
    set_cookie = sign_in(server, PLAIN_TOKEN).headers["set-cookie"]
    name_and_value, *attributes = set_cookie.split("; ")
    assert attributes == ["Path=/", "Max-Age=43200", "HttpOnly", "SameSite=Strict"]
    assert PLAIN_TOKEN not in name_and_value
    assert sign_in(server, PLAIN_TOKEN).headers["set-cookie"] != set_cookie
    # A proxy in front speaks TLS: the browser says so.
    behind = sign_in(server, PLAIN_TOKEN, Host="localhost", Origin="https://localhost")
    assert behind.headers["set-cookie"].endswith("; Secure")
    assert _cookie("secret", 1, {"scheme": "https"}, {}).endswith(b"; Secure"), "TLS of our own"


@pytest.mark.parametrize("token", ["", "wrong-token-0000000000000", PLAIN_TOKEN[:-1], PLAIN_TOKEN + "x", "\u2603" * 20])
def test_a_wrong_token_opens_no_session(server: LockServerProcess, token: str) -> None:
    reply = sign_in(server, token)
    assert (reply.status, "set-cookie" in reply.headers) == (403, False)
    assert reply.headers["content-type"].startswith("text/html")


def test_what_is_no_sign_in_form_is_refused(server: LockServerProcess) -> None:
    form = {"Content_Type": "application/x-www-form-urlencoded"}
    assert bare(server, "POST", "/sign-in", b"{}", Content_Type="application/json").status == 415
    assert bare(server, "POST", "/sign-in", b"token=" + b"x" * 5000, **form).status == 413
    for body in (b"\xff", b"a=1&b=2&c=3&d=4&e=5", f"name={PLAIN_TOKEN}".encode()):
        assert bare(server, "POST", "/sign-in", body, **form).status == 403
    for origin in ("http://evil.example", "null", "http://localhost:1", "https://localhost:1", "file://localhost"):
        reply = sign_in(server, PLAIN_TOKEN, Host="localhost", Origin=origin)
        assert (reply.status, "set-cookie" in reply.headers) == (403, False), origin
    assert sign_in(server, PLAIN_TOKEN, Sec_Fetch_Site="cross-site").status == 403
    assert sign_in(server, PLAIN_TOKEN, Host="evil.example").status == 403
    cookie_of(sign_in(server, PLAIN_TOKEN, Host="localhost:7421", Origin="http://localhost:7421"))


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        (b"http://localhost:7421", b"localhost:7421", True),
        (b"http://LOCALHOST", b"localhost", True),
        (b"http://[::1]:7421", b"[::1]:7421", True),
        (b"https://locks.example", b"locks.example", True),
        (b"https://locks.example", b"locks.example:443", True),
        (b"http://locks.example", b"locks.example:443", False),
        (b"http://locks.example.evil", b"locks.example", False),
        (b"http://evil.example", b"locks.example", False),
        (b"null", b"locks.example", False),
        (b"", b"", False),
        (b"http://", b"", False),
        (b"http://localhost:x", b"localhost:x", False),
        (b"http://\xff", b"\xff", False),
    ],
)
def test_an_origin_is_ours_by_host_and_port(origin: bytes, host: bytes, same: bool) -> None:
    headers = {b"origin": origin, b"host": host}
    if same:
        check_same_origin(headers)
    else:
        with pytest.raises(Refusal):
            check_same_origin(headers)


def tokens_of(folder: Path, *names: str) -> Tokens:
    """A token file in which everybody's token is the name, sixteen times."""
    path = folder / "names.toml"
    path.write_text("".join(f'[[token]]\nname = "{name}"\ntoken = "{name * 16}"\n' for name in names))
    path.chmod(0o600)
    return Tokens(path)


def header_of(name: str) -> bytes:
    return f"Bearer {name * 16}".encode()


def test_sessions_end_and_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logins, "LOGINS_MAX", 3)
    tokens = tokens_of(tmp_path, *"01234")
    found = Logins()

    def session(secret: str) -> Login | None:
        return found.find({b"cookie": f"a=b; {logins.COOKIE}={secret}".encode()})

    secrets = [found.open(Caller(name), header_of(name), tokens) for name in "01234"]
    assert [session(secret) is not None for secret in secrets] == [False, False, True, True, True]
    last = session(secrets[-1])
    assert last is not None
    assert last.caller.name == "4"
    found.close({b"cookie": f"{logins.COOKIE}={secrets[-1]}".encode()})
    assert (session(secrets[-1]), last.over) == (None, True)
    monkeypatch.setattr(time, "monotonic", lambda: 1e12)
    assert [session(secret) for secret in secrets] == [None] * 5
    assert session(found.open(Caller("0"), header_of("0"), tokens)) is not None
    assert len(found._logins) == 1, "those that have ended are gone"


def test_whoever_signs_in_again_and_again_signs_nobody_else_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logins, "LOGINS_MAX", 8)
    monkeypatch.setattr(logins, "LOGINS_EACH_MAX", 3)
    tokens = tokens_of(tmp_path, "other", "busy")
    found = Logins()
    other = found.open(Caller("other"), header_of("other"), tokens)
    own = [found.open(Caller("busy"), header_of("busy"), tokens) for _ in range(20)]
    lasts = [found.find({b"cookie": f"{logins.COOKIE}={secret}".encode()}) is not None for secret in (other, *own)]
    assert lasts == [True, *[False] * 17, True, True, True]


def test_without_tokens_there_is_nothing_to_sign_in_to(book: Book, tmp_path: Path) -> None:
    with dashboard(book.reader) as server:
        for method in ("GET", "POST"):
            reply = bare(server, method, "/sign-in")
            assert (reply.status, reply.headers["location"]) == (303, "/")
        assert bare(server, "GET", "/").status == 200
        assert json_of(server.ask("GET", "/v1/leaders"))["leaders"][0]["role"] == SECRET_ROLE


def test_a_stream_ends_with_the_session_that_it_was_opened_with(book: Book, tmp_path: Path) -> None:
    with dashboard(book.reader, tokens=token_file(tmp_path), code=PINGS_OFTEN) as server:
        cookie = cookie_of(sign_in(server, PLAIN_TOKEN))
        with opened(server, Cookie=cookie) as stream:
            stream.until("leaders")
            bare(server, "POST", "/sign-out", Cookie=cookie)
            with pytest.raises(AssertionError, match="has ended"):
                stream.until("never")


@pytest.mark.parametrize("change", ["another token", "another prefix"])
def test_a_session_ends_with_its_token_and_its_stream_too(book: Book, tmp_path: Path, change: str) -> None:
    tokens = token_file(tmp_path)
    with dashboard(book.reader, tokens=tokens, code=PINGS_OFTEN) as server:
        cookie, other = (cookie_of(sign_in(server, token)) for token in (PLAIN_TOKEN, ADMIN_TOKEN))
        with opened(server, Cookie=cookie) as stream:
            stream.until("leaders")
            assert bare(server, "GET", "/v1/leaders", Cookie=cookie).status == 200
            with_prefix = f'{PLAIN_TOKEN}"\nprefix = "x/'
            new = "another-token-than-before" if change == "another token" else with_prefix
            before = tokens.read_text()
            tokens.write_text(before.replace(PLAIN_TOKEN, new))
            server.reload()
            assert bare(server, "GET", "/v1/leaders", Cookie=cookie).status == 401
            assert bare(server, "GET", "/v1/leaders", Cookie=other).status == 200
            with pytest.raises(AssertionError, match="has ended"):
                stream.until("never")
            tokens.write_text(before)
            server.reload(times=2)
            assert bare(server, "GET", "/v1/leaders", Cookie=cookie).status == 401, "it has ended for good"


def test_a_stream_ends_with_the_token_that_it_was_opened_with(book: Book, tmp_path: Path) -> None:
    tokens = token_file(tmp_path)
    with (
        dashboard(book.reader, tokens=tokens, code=PINGS_OFTEN) as server,
        opened(server, Authorization=f"Bearer {PLAIN_TOKEN}") as stream,
        opened(server, Authorization=f"Bearer {ADMIN_TOKEN}") as other,
    ):
        stream.until("leaders")
        other.until("leaders")
        tokens.write_text(tokens.read_text().replace(PLAIN_TOKEN, "another-token-than-before"))
        server.reload()
        with pytest.raises(AssertionError, match="has ended"):
            stream.until("never")
        book.event("acquired", SECRET_ROLE, SECRET_NODE)
        other.until("event", "events")


def test_refused_sign_ins_do_not_flood_the_log(book: Book, tmp_path: Path) -> None:
    with dashboard(book.reader, tokens=token_file(tmp_path)) as server:
        for _ in range(40):
            sign_in(server, "wrong-token-0000000000000")
        assert server.stop() == 0
        assert 1 <= server.program.err.count("sign_in_refused") < 20


def test_no_token_and_no_cookie_is_logged(book: Book, tmp_path: Path) -> None:
    with dashboard(book.reader, "--access-log", "--log-level", "debug", tokens=token_file(tmp_path)) as server:
        cookie = cookie_of(sign_in(server, PLAIN_TOKEN))
        sign_in(server, "wrong-token-0000000000000")
        bare(server, "GET", "/v1/leaders", Cookie=cookie)
        server.program.until("path=/v1/leaders")
        server.program.until("signed_in name=worker client=127.0.0.1")
        server.program.until("sign_in_refused client=127.0.0.1")
        assert server.stop() == 0
        said = server.program.err
    for secret in (PLAIN_TOKEN, "wrong-token", cookie.partition("=")[2]):
        assert secret not in said
