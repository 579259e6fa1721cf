"""FastAPI and Starlette: an election that runs as long as the application, in each of its workers.

    election = LeaderElection(dsn, "billing")
    app = FastAPI(lifespan=leader_lifespan(election, {"billing": work}), routes=[leader_route(election)])

It needs only Starlette, on which FastAPI is built.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Any

from pgleaderlock._lock.work import OnFailure
from pgleaderlock.contrib._web import HEADERS, SHUTDOWN_S, leader_answer
from pgleaderlock.election import LeaderElection
from pgleaderlock.errors import NotLeader
from pgleaderlock.models import LeaderToken

try:
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route
except ImportError as error:
    raise ImportError(
        "pgleaderlock.contrib.fastapi needs FastAPI or Starlette: pip install 'pgleaderlock[fastapi]'", name=error.name
    ) from error

__all__ = ["leader_lifespan", "leader_required", "leader_route"]

Work = Callable[[LeaderToken], Coroutine[Any, Any, object]]


def leader_lifespan(
    election: LeaderElection,
    works: Mapping[str, Work] | None = None,
    *,
    on_failure: OnFailure = "restart",
    shutdown_timeout_s: float | None = SHUTDOWN_S,
) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """The `lifespan` of an application: competes while it runs, and leads the works.

    Within a lifespan of your own: `async with leader_lifespan(election, works)(app): yield`.

    works: by role, an async function `work(token)`. It is cancelled when the gate shuts.
    on_failure: what to do when a work raises, as in `LeaderElection.lead`.
    shutdown_timeout_s: how long the shutdown waits for requests and works in flight, in seconds.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_app: Any) -> AsyncIterator[None]:
        await election.start()
        leads = [
            asyncio.create_task(election.lead(role, work, on_failure=on_failure), name=f"pgleaderlock {role}")
            for role, work in (works or {}).items()
        ]
        try:
            yield
        finally:
            await election.shutdown(shutdown_timeout_s)
            # `lead` returns when the election has stopped and the work has ended. Exceptions of works were logged.
            await asyncio.wait([asyncio.gather(*leads, return_exceptions=True)], timeout=shutdown_timeout_s)

    return lifespan


def leader_required(election: LeaderElection, role: str) -> Callable[[], AsyncIterator[LeaderToken]]:
    """A dependency that returns the token of the term, or answers 503: `token: LeaderToken = Depends(…)`.

    The request counts as work in flight, which a drain waits for.
    """
    gate = election.gate(role)

    async def token() -> AsyncIterator[LeaderToken]:
        with contextlib.ExitStack() as acting:
            try:
                given = acting.enter_context(gate.acting())
            except NotLeader as refusal:
                raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, str(refusal), headers=HEADERS) from refusal
            yield given

    return token


def leader_route(election: LeaderElection, path: str = "/leader") -> Route:
    """A route that answers 200 while this process may act for `?role=…`, otherwise 503, with the details as JSON."""

    async def leader(request: Request) -> JSONResponse:
        status, body = leader_answer(election, request.query_params.get("role"))
        return JSONResponse(body, status, HEADERS)

    return Route(path, leader)
