"""Django: the election of a DATABASES alias, `fenced` for its transactions, a decorator for commands, and a view.

    INSTALLED_APPS = [..., "pgleaderlock.contrib.django"]
    PGLEADERLOCK = {"WORKS": {"billing": "invoices.work.send"}}     # manage.py run_leader

    def send(token, stop):
        with fenced(token):
            Invoice.objects.create(…)

`pgleaderlock.fence` says what the fence promises and what it does not. Tested with the driver psycopg; psycopg2
provides what is needed, too.
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
"""EX_TEMPFAIL, as in `pgleaderlock exec`: another process leads."""
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
    """The conninfo string of an alias of DATABASES; None means `PGLEADERLOCK["USING"]`, or else `default`."""
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
    """A `pgleaderlock.sync.LeaderElection` in the database of an alias. `PGLEADERLOCK["OPTIONS"]` has its defaults."""
    dsn(using)  # raise now if there is a mistake in the settings

    async def fresh() -> str:
        """Called for each connect: a database wrapper may fetch expiring passwords, which may block."""
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

    Outside of `atomic()`, it opens its own `atomic()`. Inside of one, it joins the transaction, and the fence lasts
    until that ends; an exception that leaves the block rolls the whole `atomic()` block back, even if it is caught
    there. Raises `StaleEpoch`, before the block is entered, if the epoch is no longer the current one, and `FenceLost`
    at the end of the block if the open transaction is not the fenced one.
    """
    block = _DjangoBlock(_postgres(using), token, fence_params(token, idle_timeout_s))
    with fenced_sync(block):
        try:
            yield
        except DatabaseError as error:  # translate the refusal of a fenced table into our own error
            refusal = meaning(error.__cause__) if error.__cause__ is not None else None
            if refusal is None:
                raise
            raise refusal from error


class _DjangoBlock(Block):
    """The target is Django's database wrapper of this thread."""

    def tries(self) -> int:
        """Only our own transaction can be begun again. Without autocommit, the transaction is the caller's, too."""
        self._joins = self.target.in_atomic_block
        return 1 if self._joins or not self.target.get_autocommit() else TRIES_MAX

    def begin(self) -> Any:
        """Join without a savepoint: the fence must not be rolled back alone, and a refusal must roll back
        everything."""
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
    """The state of a role according to the ledger, as JSON: 200 while a node may act for it, otherwise 503.

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
    """The result of a coroutine that never waits, because `_Asks` does not. Django refuses a cursor on an event
    loop."""
    try:
        reading.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("it has waited")
