"""`manage.py run_leader`: leads the works of `settings.PGLEADERLOCK`, until SIGTERM or Ctrl-C."""

import contextlib
import signal
import sys
import threading
from typing import Any, get_args

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections
from django.utils.module_loading import import_string

from pgleaderlock._lock.work import OnFailure
from pgleaderlock.contrib._web import SHUTDOWN_S, Work, Works
from pgleaderlock.contrib.django import election, setting
from pgleaderlock.errors import PgLeaderLockError
from pgleaderlock.models import LeaderToken

__all__ = ["Command"]


class Command(BaseCommand):
    help = "Compete for the roles of PGLEADERLOCK['WORKS'], and run the work of each while this process leads it."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("roles", nargs="*", metavar="ROLE", help="only these of PGLEADERLOCK['WORKS']")
        parser.add_argument("--using", help="the alias of DATABASES; default: PGLEADERLOCK['USING']")
        parser.add_argument(
            "--on-failure",
            choices=get_args(OnFailure),
            default="restart",
            help="what follows when a work raises: restart (default) or step_down, after a delay; raise ends all",
        )
        parser.add_argument(
            "--shutdown-timeout",
            type=float,
            default=SHUTDOWN_S,
            metavar="SECONDS",
            help=f"how long the end waits for works; default: {SHUTDOWN_S:g}",
        )

    def handle(self, *_: Any, roles: list[str], using: str | None, on_failure: OnFailure, **options: Any) -> None:
        configured: dict[str, str | Work] = setting("WORKS") or {}
        unknown = sorted(set(roles) - set(configured))
        if unknown or not configured:
            raise CommandError(
                f"PGLEADERLOCK['WORKS'] does not name a work for {unknown[0] if unknown else 'any role'}"
            )
        works = {role: _own_connections(_imported(configured[role])) for role in roles or configured}
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            leading = Works(election(list(works), using), works, on_failure=on_failure)
            leading.start()
            try:
                with contextlib.suppress(KeyboardInterrupt):
                    leading.wait()
            finally:
                leading.shutdown(options["shutdown_timeout"])
        except PgLeaderLockError as error:
            raise CommandError(str(error)) from error
        if leading.error is not None:
            raise CommandError(f"a work has failed: {leading.error!r}") from leading.error


def _imported(work: str | Work) -> Work:
    found: Work = import_string(work) if isinstance(work, str) else work
    return found


def _own_connections(work: Work) -> Work:
    """Close the thread's database connections before and after a term, as Django does at the end of a request."""

    def run(token: LeaderToken, stop: threading.Event) -> object:
        connections.close_all()
        try:
            return work(token, stop)
        finally:
            connections.close_all()

    return run
