"""The work of the role `billing`."""

import os
import threading

from invoices.models import Invoice
from pgleaderlock import LeaderToken
from pgleaderlock.contrib.django import fenced


# -- shown in docs/frameworks.md
def send_invoices(token: LeaderToken, stop: threading.Event) -> None:
    """Called in each term, in a thread of its own. Return soon after `stop` is set."""
    print(f"leading: epoch {token.epoch}, process {os.getpid()}", flush=True)
    while not stop.wait(0.1):
        with fenced(token):  # an `atomic()` that commits only while this process is the current leader
            Invoice.objects.create(epoch=token.epoch, process=os.getpid())


# -- until here
