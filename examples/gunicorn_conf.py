"""gunicorn's hook for `flask_app.py`: a worker competes from its start to its end, with `--preload` and without."""

from typing import Any


# -- shown in docs/frameworks.md
def post_worker_init(worker: Any) -> None:
    """In the worker, after the fork and with the application loaded. When it exits, its roles are released."""
    worker.wsgi.extensions["pgleaderlock"].start()


# -- until here
