"""Fixtures for every test: a server per test process, throw-away ones, a breakable network; and no silent skips.

`dsn` is what most tests need. It comes with `nothing_left`, which fails a test that leaves a session or a lock behind.
"""

import contextlib
import gc
import logging
import os
import signal
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from typing import Protocol

import pytest

from pgleaderlock import LeaderElection
from pgleaderlock._election.lease import LeaseLedger
from pgleaderlock._election.ledger import Ledger
from pgleaderlock.embedded import EmbeddedPostgres
from support.elections import ledger_dsns
from support.pgbouncer import PoolMode, pooler
from support.proxy import Proxy
from support.servers import remove_template, throwaway, wait_until_nothing_left

# What runs in the background of a script ignores Ctrl-C, what runs under nohup the end of its terminal; and so would
# every program that a test starts and signals.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# -- no test is skipped in silence ------------------------------------------------------------------------------------


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in {"", "0", "false"}


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    detail = report.longrepr
    return str(detail[2] if isinstance(detail, tuple) else detail).removeprefix("Skipped: ")


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if _in_ci() and report.skipped and not hasattr(report, "wasxfail"):
        report.longrepr = f"Skipped, which in CI is a failure: {_reason(report)}"
        report.outcome = "failed"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI, a test that cannot run is a test that fails."""
    report = yield
    _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a whole file that skips itself."""
    report = yield
    _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected lives until the end: no garbage collection need look at it, neither while it
    grows nor later, and those at the end of a test process, of which pytest makes several, would take seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    """The servers have ended: they belong to fixtures."""
    remove_template()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Elsewhere, what was not tested is said at the end, with what it takes to test it: a skip's reason says that.

    So is what a test that passed has left out, in CI too, since no CI can be asked for it: `record_property`.
    """
    skipped = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    left_out = [
        str(value)
        for report in terminalreporter.stats.get("passed", [])
        for name, value in report.user_properties
        if name == "not_tested"
    ]
    if skipped or left_out:
        terminalreporter.section("NOT TESTED", sep="!", red=True, bold=True)
    for reason, times in skipped.most_common():
        terminalreporter.line(f"{times} skipped: {reason}")
    for reason in left_out:
        terminalreporter.line(f"passed, but {reason}")


# -- what a command that runs in this process leaves behind ------------------------------------------------------------


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """The commands send the library's log to their own output, for the rest of the process."""
    log = logging.getLogger("pgleaderlock")
    before = log.handlers[:], log.propagate, log.level
    yield
    log.handlers, log.propagate = before[0], before[1]
    log.setLevel(before[2])


# -- servers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    """The server of this test process. Do not stop or reconfigure it: take `throwaway_postgres` for that."""
    with throwaway() as server:
        yield server


@pytest.fixture
def nothing_left(postgres: EmbeddedPostgres) -> Iterator[None]:
    """Fails a test after which a client session or an advisory lock is left in the server."""
    yield
    left = wait_until_nothing_left(postgres.dsn)
    if left:
        pytest.fail("left in the server after the test:\n" + "\n".join(left), pytrace=False)


@pytest.fixture
def dsn(postgres: EmbeddedPostgres, nothing_left: None) -> str:
    """The superuser's DSN of this process's server. One database for all tests: use lock names of your own."""
    return postgres.dsn


@pytest.fixture
def superuser(dsn: str) -> str:
    """The database with the ledger, for looks and for an operator's hand."""
    return ledger_dsns(dsn)["superuser"]


@pytest.fixture
def node_dsn(dsn: str) -> str:
    """What nodes connect to it with: a role that has what `migrate --grant-to` gives."""
    return ledger_dsns(dsn)["plain"]


@pytest.fixture
def role() -> str:
    """A name that no other test uses."""
    return f"role-{uuid.uuid4().hex[:12]}"


class StartServer(Protocol):
    """Starts one more server; keyword arguments are PostgreSQL settings."""

    def __call__(self, **settings: str) -> EmbeddedPostgres: ...


@pytest.fixture
def throwaway_postgres() -> Iterator[StartServer]:
    """Starts servers that belong to the test alone, to be stopped, restarted, replicated and promoted."""
    with contextlib.ExitStack() as servers:

        def start(**settings: str) -> EmbeddedPostgres:
            return servers.enter_context(throwaway(settings))

        yield start


# -- between client and server ----------------------------------------------------------------------------------------


@pytest.fixture
async def proxy_to() -> AsyncIterator[Callable[[str], Awaitable[Proxy]]]:
    """Starts proxies: `proxy = await proxy_to(server.dsn)`, then `proxy.dsn_for(server.dsn)`."""
    async with contextlib.AsyncExitStack() as proxies:

        async def start(dsn: str) -> Proxy:
            return await proxies.enter_async_context(Proxy.to(dsn))

        yield start


@pytest.fixture
async def proxy(dsn: str) -> AsyncIterator[Proxy]:
    """A proxy in front of this process's server."""
    async with Proxy.to(dsn) as running:
        yield running


class StartPooler(Protocol):
    """Starts pgbouncer in front of the server of a DSN; gives the DSN through it."""

    def __call__(self, dsn: str, pool_mode: PoolMode, **settings: str) -> str: ...


@pytest.fixture
def pgbouncer(nothing_left: None) -> Iterator[StartPooler]:
    """Starts poolers. They end with the test, before `nothing_left` looks."""
    with contextlib.ExitStack() as poolers:

        def start(dsn: str, pool_mode: PoolMode, **settings: str) -> str:
            return poolers.enter_context(pooler(dsn, pool_mode, settings))

        yield start


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of elections that uses `hold` runs once per way to hold roles, unless it is about sessions.

    `of_sessions` marks what is about them by nature. A lease
    - has no LISTEN: nothing wakes it between its looks and its heartbeats,
    - holds no lock: it excludes by the role's name, neither locks and guards nor a second key of the same name,
    - has no backend: the ledger learns that its process was killed when it has been silent for long,
    - cannot have `standby_wait_s` or `balance`: the constructor refuses them.
    """
    if "hold" in metafunc.fixturenames:
        of_sessions = metafunc.definition.get_closest_marker("of_sessions") is not None
        metafunc.parametrize("hold", ["session"] if of_sessions else ["session", "lease"], indirect=True)


@pytest.fixture
def hold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the elections of this test hold their roles, unless they say so themselves."""
    defaults = LeaderElection.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "hold", request.param)
    return str(request.param)


@pytest.fixture
def ledger_kind(hold: str) -> type[Ledger]:
    """The class of these elections' ledgers, for a test that stands between one and its server."""
    return Ledger if hold == "session" else LeaseLedger
