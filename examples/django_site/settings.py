"""A site with one application. The database needs a ledger (`pgleaderlock migrate`)."""

import os

SECRET_KEY = os.environ.get("SECRET_KEY", "for examples only")
ALLOWED_HOSTS = ["127.0.0.1"]
ROOT_URLCONF = "urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": os.environ.get("DB_HOST", "127.0.0.1"),
        "PORT": os.environ.get("DB_PORT", "5432"),
        "NAME": os.environ.get("DB_NAME", "app"),
        "USER": os.environ.get("DB_USER", "app"),
        "PASSWORD": os.environ.get("DB_PASSWORD", ""),
    }
}
# -- shown in docs/frameworks.md
INSTALLED_APPS = ["pgleaderlock.contrib.django", "invoices"]
PGLEADERLOCK = {
    "WORKS": {"billing": "invoices.work.send_invoices"},  # what `manage.py run_leader` runs, by role
    "OPTIONS": {"heartbeat_interval_s": float(os.environ.get("HEARTBEAT_S", "3"))},  # those of LeaderElection
}
# -- until here
