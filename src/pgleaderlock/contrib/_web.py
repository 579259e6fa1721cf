"""What the integrations of web frameworks share: the answer of `/leader`, and works that run in threads.

Imports no framework.
"""

import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Protocol, Self

from pgleaderlock._lock.work import OnFailure
from pgleaderlock.election import LeaderInfo
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.models import LeaderToken
from pgleaderlock.sync import LeaderElection

__all__ = ["HEADERS", "Work", "Works", "leader_answer"]

HEADERS = {"Cache-Control": "no-store"}  # an answer is only valid at this moment
SHUTDOWN_S = 10.0

Work = Callable[[LeaderToken, threading.Event], object]


class Gate(Protocol):
    @property
    def shut_because(self) -> str | None: ...

    @property
    def current_epoch(self) -> int | None: ...


class Election(Protocol):
    """The methods that the async and the sync `LeaderElection` share."""

    @property
    def roles(self) -> tuple[str, ...]: ...

    @property
    def node_id(self) -> str: ...

    def gate(self, role: str) -> Gate: ...

    def leader(self, role: str) -> LeaderInfo | None: ...


def leader_answer(election: Election, role: str | None) -> tuple[HTTPStatus, dict[str, object]]:
    """Status and JSON of `/leader?role=…`: 200 while this process may act for the role, or else 503.

    Without `role`, for the only role of the election.
    """
    if role is None:
        if len(election.roles) != 1:
            return HTTPStatus.BAD_REQUEST, {"error": "which role? ask for /leader?role=NAME"}
        role = election.roles[0]
    if role not in election.roles:
        return HTTPStatus.NOT_FOUND, {"error": "this election does not have that role"}
    gate, seen = election.gate(role), election.leader(role)
    reason = gate.shut_because  # read once: body and status must agree
    return HTTPStatus.OK if reason is None else HTTPStatus.SERVICE_UNAVAILABLE, {
        "role": role,
        "is_leader": reason is None,
        "reason": reason,
        "epoch": gate.current_epoch,
        "node": election.node_id,
        "leader": None if seen is None else seen.node_id,
    }


class Works:
    """An election and one thread for each of its works. Call `start` in the process that should lead, after a fork."""

    def __init__(
        self, election: LeaderElection, works: Mapping[str, Work] | None = None, *, on_failure: OnFailure = "restart"
    ) -> None:
        """Check the roles. Nothing is connected before `start`.

        works: by role, a plain function `work(token, stop)` that returns soon after `stop` is set.
        on_failure: what to do when a work raises, as in `LeaderElection.lead`.
        """
        self.election = election
        self._works = dict(works or {})
        self._on_failure = on_failure
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._counting = threading.Lock()
        self._at_work = 0
        self.error: Exception | None = None
        """The exception of the last failed work that was not restarted."""
        unknown = sorted(set(self._works) - set(election.roles))
        if unknown:
            raise ConfigurationError(f"the election has no role {unknown[0]!r}: it has {', '.join(election.roles)}")

    def start(self) -> None:
        """Start to compete. Does nothing if this process does so already. May raise `SchemaError`."""
        if any(thread.is_alive() for thread in self._threads):  # in a forked child, no thread of the parent is alive
            return
        self.election.start()
        self.error, self._at_work = None, len(self._works)
        self._over, self._counting = threading.Event(), threading.Lock()  # in a forked child, the old lock may be held
        self._threads = [
            threading.Thread(target=self._lead, args=(role, work), name=f"pgleaderlock {role}", daemon=True)
            for role, work in self._works.items()
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Return when every work has returned, one has failed without restart, or the election has stopped."""
        if self._threads:
            self._over.wait()

    def shutdown(self, timeout_s: float | None = SHUTDOWN_S) -> None:
        """Set `stop` for every work, wait for their end, release every role, and stop.

        Called from a work, it only makes the request.
        """
        self.election.shutdown(timeout_s)
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join(timeout_s)

    def _lead(self, role: str, work: Work) -> None:
        try:
            self.election.lead(role, work, on_failure=self._on_failure)
        except Exception as error:  # the election has logged it
            self.error = error
        with self._counting:
            self._at_work -= 1
            if self.error is not None or not self._at_work:
                self._over.set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
