"""Flask: every worker serves, and one of them works. Needs PG_DSN, and a ledger (`pgleaderlock migrate`).

gunicorn --config gunicorn_conf.py --workers 4 --preload flask_app:app
"""

import os
import threading

from flask import Flask

from pgleaderlock import LeaderToken
from pgleaderlock.contrib.flask import Leadership
from pgleaderlock.sync import LeaderElection


# -- shown in docs/frameworks.md
def send_invoices(token: LeaderToken, stop: threading.Event) -> None:
    """Runs in a thread of the worker that leads. Return soon after `stop` is set."""
    print(f"leading: epoch {token.epoch}, process {os.getpid()}", flush=True)
    while not stop.wait(1.0):
        ...  # your work, fenced by the token


app = Flask(__name__)
leadership = Leadership(LeaderElection.from_env("billing"), {"billing": send_invoices})
leadership.init_app(app)  # GET /leader: 200 in the worker that leads, 503 in the others


@app.post("/books/close")
@leadership.required("billing")
def close_books(token: LeaderToken) -> dict[str, int]:
    """Only in the worker that leads: the others answer 503."""
    return {"epoch": token.epoch}


# -- until here
