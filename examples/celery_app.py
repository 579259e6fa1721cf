"""Celery with any number of beats, of which one sends, and a task that runs once at a time.

    celery -A celery_app worker
    celery -A celery_app beat --schedule /tmp/beat-1 --pidfile= &
    celery -A celery_app beat --schedule /tmp/beat-2 --pidfile= &

Needs PG_DSN, and CELERY_BROKER_URL as Celery does.
"""

import os

# -- shown in docs/jobs.md
from celery import Celery

from pgleaderlock.contrib.celery import one_at_a_time

app = Celery("billing")
app.conf.update(
    pgleaderlock_dsn=os.environ["PG_DSN"],
    beat_scheduler="pgleaderlock.contrib.celery.LeaderScheduler",
    beat_schedule={"invoices": {"task": "send_invoices", "schedule": 1.0}},
)


@app.task(name="send_invoices")
@one_at_a_time("send-invoices")  # a run that takes longer than the schedule is not joined by a second one
def send_invoices() -> str:
    print("invoices sent", flush=True)
    return "sent"


# -- until here
