"""The application `pgleaderlock.contrib.django`, for INSTALLED_APPS. It has no models: `pgleaderlock migrate` creates
the ledger."""

from django.apps import AppConfig

__all__ = ["PgLeaderLockConfig"]


class PgLeaderLockConfig(AppConfig):
    name = "pgleaderlock.contrib.django"
    label = "pgleaderlock"
    verbose_name = "pgleaderlock"
