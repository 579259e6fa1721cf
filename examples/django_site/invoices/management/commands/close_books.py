"""`manage.py close_books`, from cron on every host: one at a time, and its writes are fenced."""

import os
from typing import Any

from django.core.management.base import BaseCommand

from invoices.models import Invoice
from pgleaderlock import LeaderToken
from pgleaderlock.contrib.django import fenced, leader_command


# -- shown in docs/frameworks.md
class Command(BaseCommand):
    @leader_command("close_books", timeout_s=10.0)
    def handle(self, *_: Any, token: LeaderToken, **options: Any) -> None:
        with fenced(token):
            Invoice.objects.create(epoch=token.epoch, process=os.getpid())
        self.stdout.write(f"closed: epoch {token.epoch}")


# -- until here
