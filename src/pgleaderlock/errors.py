"""The one exception tree of pgleaderlock.

Every error that this library raises on purpose is a `PgLeaderLockError`, and its text says what to do
next. `ConnectionError` shadows a builtin on purpose (the name is part of the public contract), so it is
reached as `pgleaderlock.errors.ConnectionError` and is not exported from the package itself.

This module imports nothing, and no text built here may ever contain a secret of a DSN.
"""

__all__ = [
    "ConfigurationError",
    "ConnectionError",
    "LockError",
    "PgLeaderLockError",
    "ShutdownError",
    "UnsafeSessionError",
]


class PgLeaderLockError(Exception):
    """Base of everything that pgleaderlock raises."""


class ConfigurationError(PgLeaderLockError, ValueError):
    """A setting is wrong, or two settings contradict each other. Found before anything is opened."""


class ConnectionError(PgLeaderLockError):
    """The database cannot be reached, or the session with it has ended."""


class UnsafeSessionError(ConnectionError):
    """The session works, but a lock taken on it would not exclude anybody, so none is taken.

    `reason` is one word for programs: `pooler`, `standby`, `version` or `settings`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class LockError(PgLeaderLockError):
    """The lock could not be taken or given back as asked."""


class ShutdownError(PgLeaderLockError):
    """A shutdown did not end in the time it was given; the connection was cut to free the lock."""
