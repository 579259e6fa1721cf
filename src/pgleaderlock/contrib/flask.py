"""Flask, and any WSGI application: an election of the worker process, with a thread for each work.

    leadership = Leadership(LeaderElection(dsn, "billing"), {"billing": work})
    leadership.init_app(app)

Flask has no hooks for the start and end of a worker, but the server has: `docs/frameworks.md` shows gunicorn's.
"""

import contextlib
import functools
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, TypeVar

from pgleaderlock.contrib._web import HEADERS, Works, leader_answer
from pgleaderlock.errors import NotLeader

try:
    from flask import Flask, Response, abort, jsonify, request
except ImportError as error:
    raise ImportError(
        "pgleaderlock.contrib.flask needs flask: pip install 'pgleaderlock[flask]'", name=error.name
    ) from error

__all__ = ["Leadership"]

R = TypeVar("R")


class Leadership(Works):
    """An election for the views of an application, and one thread for each work.

    Call `start()` in each worker process, after the fork, and `shutdown()` at its end; or use it as a context manager.
    """

    def init_app(self, app: Flask, path: str = "/leader") -> None:
        """Add a route that answers 200 while this process may act for `?role=…`, otherwise 503, with JSON.

        It sets `app.extensions["pgleaderlock"]` to this object, where the server's hooks find it.
        """
        app.extensions["pgleaderlock"] = self
        app.add_url_rule(path, "pgleaderlock_leader", self._leader)

    def required(self, role: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
        """A decorator for views: pass the term's token as `token=…`, or answer 503.

        The request counts as work in flight, which a drain waits for.
        """
        gate = self.election.gate(role)

        def decorated(view: Callable[..., R]) -> Callable[..., R]:
            @functools.wraps(view)
            def acting_view(*args: Any, **kwargs: Any) -> R:
                with contextlib.ExitStack() as acting:
                    try:
                        token = acting.enter_context(gate.acting())
                    except NotLeader as refusal:
                        abort(HTTPStatus.SERVICE_UNAVAILABLE, str(refusal))
                    return view(*args, token=token, **kwargs)

            return acting_view

        return decorated

    def _leader(self) -> tuple[Response, int, dict[str, str]]:
        status, body = leader_answer(self.election, request.args.get("role"))
        return jsonify(body), status, HEADERS
