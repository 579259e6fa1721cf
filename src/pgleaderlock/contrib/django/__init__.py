"""Django: the election of a DATABASES alias, `fenced` for its transactions, a decorator for commands, and a view.

    INSTALLED_APPS = [..., "pgleaderlock.contrib.django"]
    PGLEADERLOCK = {"WORKS": {"billing": "invoices.work.send"}}     # manage.py run_leader

    def send(token, stop):
        with fenced(token):
            Invoice.objects.create(…)

What the fence promises and what it does not is said in `pgleaderlock.fence`. Tested with the driver psycopg; psycopg2
has what is needed as well.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

from psycopg.conninfo import make_conninfo
from psycopg.pq import Conninfo

from pgleaderlock import history
from pgleaderlock._base.steps import Steps
from pgleaderlock._pg.statements import statement
from pgleaderlock.contrib._web import HEADERS
from pgleaderlock.errors import ConfigurationError, NotLeader
from pgleaderlock.fence import (
    IDLE_TIMEOUT_S,
    TRIES_MAX,
    Block,
    fence_lost,
    fence_params,
    fenced_sync,
    meaning,
    still_fenced,
)
from pgleaderlock.keys import DEFAULT_NAMESPACE
from pgleaderlock.models import LeaderToken
from pgleaderlock.sync import LeaderElection

try:
    from django.conf import settings
    from django.core.management.base import CommandError
    from django.db import DEFAULT_DB_ALIAS, DatabaseError, Error, connections, transaction
    from django.http import HttpRequest, JsonResponse
except ImportError as error:
    raise ImportError(
        "pgleaderlock.contrib.django needs django: pip install 'pgleaderlock[django]'", name=error.name
    ) from error

__all__ = ["dsn", "election", "fenced", "leader_command", "leader_view"]

EXIT_NOT_WON = 75
"""EX_TEMPFAIL, as of `pgleaderlock exec`: another process leads."""
COMMAND_TIMEOUT_S = 10.0

T = TypeVar("T")
SETTINGS = ("OPTIONS", "USING", "WORKS")


def setting(name: str, default: Any = None) -> Any:
    """One key of `settings.PGLEADERLOCK`."""
    given: Mapping[str, Any] = getattr(settings, "PGLEADERLOCK", {})
    unknown = sorted(set(given) - set(SETTINGS))
    if unknown:
        raise ConfigurationError(f"PGLEADERLOCK has no key {unknown[0]!r}: it has {', '.join(SETTINGS)}")
    return given.get(name, default)


# --- The election


def dsn(using: str | None = None) -> str:
    """The conninfo string of an alias of DATABASES; None: of `PGLEADERLOCK["USING"]`, or else of `default`."""
    connection = _postgres(using or setting("USING", DEFAULT_DB_ALIAS))
    known = {option.keyword.decode() for option in Conninfo.get_defaults()}
    params = {name: value for name, value in connection.get_connection_params().items() if name in known}
    params.pop("client_encoding", None)  # the election sets its own
    role = connection.settings_dict["OPTIONS"].get("assume_role")
    if role:
        escaped = "".join(f"\\{letter}" if letter in "\\ " else letter for letter in role)
        params["options"] = f"{params.get('options', '')} -c role={escaped}".strip()
    return make_conninfo(**params)


def election(roles: str | Iterable[str], using: str | None = None, **options: Any) -> LeaderElection:
    """A `pgleaderlock.sync.LeaderElection` in the database of an alias. `PGLEADERLOCK["OPTIONS"]` are its defaults."""
    dsn(using)  # a mistake in the settings is raised here and now

    async def fresh() -> str:
        """For each connect anew: a database wrapper may have passwords that expire, and wait for them."""
        return await asyncio.to_thread(dsn, using)

    return LeaderElection(fresh, roles, **{**(setting("OPTIONS") or {}), **options})


def _postgres(using: str) -> Any:
    connection = connections[using]
    if connection.vendor != "postgresql":
        raise ConfigurationError(f"DATABASES[{using!r}] is {connection.vendor}: an election needs PostgreSQL")
    return connection


# --- The fence


@contextlib.contextmanager
def fenced(
    token: LeaderToken, using: str = DEFAULT_DB_ALIAS, *, idle_timeout_s: float = IDLE_TIMEOUT_S
) -> Iterator[None]:
    """A block whose writes to this alias are committed only if the token's epoch is current until then.

    Outside of `atomic()` it is an `atomic()` of its own. Inside one it joins the transaction, and the fence lasts until
    that ends; an exception that leaves the block rolls the whole `atomic()` block back, also if it is caught there.
    Raises `StaleEpoch`, before the block is entered, when the epoch is no longer the current one, and `FenceLost` at
    the end of the block when the transaction that is open then is not the one that was fenced.
    """
    block = _DjangoBlock(_postgres(using), token, fence_params(token, idle_timeout_s))
    with fenced_sync(block):
        try:
            yield
        except DatabaseError as error:  # a fenced table has refused: say it in our words
            refusal = meaning(error.__cause__) if error.__cause__ is not None else None
            if refusal is None:
                raise
            raise refusal from error


class _DjangoBlock(Block):
    """The target is Django's database wrapper of this thread."""

    def tries(self) -> int:
        """Only a transaction of our own can be begun again; one without autocommit is the caller's as well."""
        self._joins = self.target.in_atomic_block
        return 1 if self._joins or not self.target.get_autocommit() else TRIES_MAX

    def begin(self) -> Any:
        """Joined without a savepoint: the fence must not be undone alone, and nothing survives a refusal."""
        return transaction.atomic(using=self.target.alias, savepoint=not self._joins)

    def send(self) -> Steps[None]:
        try:
            self._execute("fence", self.params)
        except DatabaseError as error:
            refusal = meaning(error.__cause__, self.token) if error.__cause__ is not None else None
            if refusal is None:
                raise
            raise refusal from error.__cause__
        yield None

    def check(self) -> Steps[None]:
        if self.target.needs_rollback:
            return  # nothing will be committed
        info = self.target.connection.info
        still = still_fenced(info.transaction_status, info.parameter_status("application_name"), self.params)
        if still is None:
            still = str(self.params["mark"]) in (self._execute("fence_marks")[0][0] or "")
        if not still:
            raise fence_lost(self.token)
        yield None

    def _execute(self, name: str, params: Mapping[str, object] | None = None) -> list[Any]:
        with self.target.cursor() as cursor:
            cursor.execute(statement(name).decode(), params)
            return list(cursor.fetchall())


# --- Commands and views


def leader_command(
    role: str, using: str | None = None, *, timeout_s: float = COMMAND_TIMEOUT_S, **options: Any
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """A decorator for `BaseCommand.handle`: runs it as the leader of the role, with `token=…` among its options.

    Another process that runs the same command meanwhile waits `timeout_s` seconds for its turn, then ends with 75.
    """

    def decorated(handle: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(handle)
        def handle_leading(command: Any, *args: Any, **given: Any) -> T:
            with election(role, using, **options) as elected, contextlib.ExitStack() as acting:
                gate = elected.gate(role)
                gate.wait_open(timeout_s)
                try:
                    token = acting.enter_context(gate.acting())
                except NotLeader as refusal:
                    raise CommandError(_not_won(elected, role, refusal), returncode=EXIT_NOT_WON) from refusal
                return handle(command, *args, **{**given, "token": token})

        return handle_leading

    return decorated


def _not_won(elected: LeaderElection, role: str, refusal: NotLeader) -> str:
    if elected.last_error is not None:
        return f"cannot lead {role!r}: {elected.last_error}"
    leader = elected.leader(role)
    return f"{role!r} is led by {leader.node_id}" if leader is not None and leader.node_id else str(refusal)


def leader_view(request: HttpRequest, role: str | None = None) -> JsonResponse:
    """Who leads, by the ledger: 200 while somebody may act for the role, or else 503, with the details as JSON.

    The role comes from the URL pattern, from `?role=…`, or is the only one of `PGLEADERLOCK["WORKS"]`.
    """
    role = role or request.GET.get("role")
    works = setting("WORKS") or {}
    if role is None and len(works) == 1:
        (role,) = works
    if role is None:
        return _json(HTTPStatus.BAD_REQUEST, error="which role? ask for ?role=NAME")
    namespace = (setting("OPTIONS") or {}).get("namespace", DEFAULT_NAMESPACE)
    try:
        view = _at_once(history.role(_Asks(setting("USING", DEFAULT_DB_ALIAS)), namespace, role))
    except Error:
        return _json(HTTPStatus.SERVICE_UNAVAILABLE, error="the ledger cannot be read")
    if view is None:
        return _json(HTTPStatus.NOT_FOUND, error="no process has led that role yet")
    return _json(HTTPStatus.OK if view.state == "acting" else HTTPStatus.SERVICE_UNAVAILABLE, **history.as_json(view))


def _json(status: HTTPStatus, **body: object) -> JsonResponse:
    return JsonResponse(body, status=status, headers=HEADERS)


class _Asks:
    """Reads the ledger over Django's own connection."""

    def __init__(self, using: str) -> None:
        self._connection = _postgres(using)

    async def rows(self, name: str, **params: object) -> list[dict[str, Any]]:
        with self._connection.cursor() as cursor:
            cursor.execute(statement(name).decode(), params)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _at_once(reading: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, since `_Asks` does not. Django refuses a cursor on an event loop."""
    try:
        reading.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("it has waited")
