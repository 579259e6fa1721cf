"""The one exception tree of pgleaderlock.

Every error that this library raises on purpose is a `PgLeaderLockError`, and its text says what to do next.
`ConnectionError` and `DatabaseError` shadow well-known names on purpose (they are part of the public contract), so they
are reached as `pgleaderlock.errors.ConnectionError` and are not exported from the package itself.

This module imports nothing, and no text built here may ever contain a secret of a DSN.
"""

__all__ = [
    "ConfigurationError",
    "ConnectionError",
    "CoordinationError",
    "DatabaseError",
    "FenceLost",
    "LeaseLost",
    "LockError",
    "LockHeld",
    "LockNotAcquired",
    "LockServerError",
    "LockServerRefused",
    "LockServerUnreachable",
    "NotFenced",
    "NotLeader",
    "PgLeaderLockError",
    "SchemaError",
    "ShutdownError",
    "StaleEpoch",
    "UnsafeSessionError",
]


class PgLeaderLockError(Exception):
    """Base of everything that pgleaderlock raises."""


class ConfigurationError(PgLeaderLockError, ValueError):
    """A setting is wrong, or two settings contradict each other. Found before anything is opened."""


class ConnectionError(PgLeaderLockError):
    """The database cannot be reached, or the session with it has ended."""


class UnsafeSessionError(ConnectionError):
    """The session works, but a lock on it would not exclude other sessions, so none is taken.

    `reason` is one word for programs: `pooler`, `standby`, `version` or `settings`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class LockError(PgLeaderLockError):
    """The lock could not be taken or released as requested."""


class CoordinationError(PgLeaderLockError):
    """One-shot leadership was not obtained, or not kept: `LockNotAcquired` or `DatabaseError`."""


class LockNotAcquired(CoordinationError):
    """Another session leads. This is not a failure: exit, wait, or continue without leadership.

    `holder_pid` and `holder_application_name` identify that session, as far as this database role may see it.
    `subscription_name` is an alias of `name`, for code that coordinates subscriptions.
    """

    def __init__(self, name: str, *, holder_pid: int | None = None, holder_application_name: str | None = None) -> None:
        self.name = name
        self.holder_pid = holder_pid
        self.holder_application_name = holder_application_name
        who = "another session"
        if holder_pid is not None:
            who = f"backend {holder_pid}" + (f" ({holder_application_name})" if holder_application_name else "")
        super().__init__(f"leadership of {name!r} is held by {who}")

    @property
    def subscription_name(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are pickled with their `args`, but this constructor takes other arguments than the text.
        state = {"holder_pid": self.holder_pid, "holder_application_name": self.holder_application_name}
        return type(self), (self.name,), state


class DatabaseError(CoordinationError):
    """The database failed, or the session is not fit for a lock; the cause is chained where there is one."""


class SchemaError(PgLeaderLockError):
    """The ledger's tables are missing, too old or too new for this library, or this role may not use them."""


class NotLeader(PgLeaderLockError):
    """This node must not act now. `reason` is one word for programs.

    `never_led`, `lost`, `late_heartbeat`, `waiting` (for the predecessor's deadline), `draining`, `vetoed`, `disabled`,
    or `epoch_changed` from `ensure_epoch`. `epoch` is that of the term that may not act; None if there is no term.
    """

    def __init__(self, role: str, reason: str, message: str, *, epoch: int | None = None) -> None:
        super().__init__(message)
        self.role = role
        self.reason = reason
        self.epoch = epoch

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.role, self.reason, str(self)), {"epoch": self.epoch}


class StaleEpoch(PgLeaderLockError):
    """A fenced write was refused: its epoch is no longer the current one. Nothing of it was committed."""


class NotFenced(PgLeaderLockError):
    """A write to a fenced table came without a fence in its transaction."""


class FenceLost(PgLeaderLockError):
    """The fenced transaction ended before the block did: everything written after that was not fenced."""


class ShutdownError(PgLeaderLockError):
    """A shutdown did not end within its timeout; the connection was cut to free the lock."""


class LockHeld(LockError):
    """Another owner has a valid lease of a lock server's lock, or it is another waiter's turn. Try again later.

    `current_owner_id` is that owner, `recommended_retry_s` when to try again; `reason` is `HELD`, or `BUSY_RETRY` if
    the server's store was only contended.
    """

    def __init__(
        self,
        lock_name: str,
        *,
        current_owner_id: str | None = None,
        current_expiry_ms: int | None = None,
        recommended_retry_s: float = 0.0,
        reason: str = "HELD",
    ) -> None:
        self.lock_name = lock_name
        self.current_owner_id = current_owner_id
        self.current_expiry_ms = current_expiry_ms
        self.recommended_retry_s = recommended_retry_s
        self.reason = reason
        who = f"held by {current_owner_id!r}" if current_owner_id else "not to be had now"
        super().__init__(f"lock {lock_name!r} is {who} ({reason}); try again in {recommended_retry_s:g} s")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.lock_name,), vars(self)


class LeaseLost(LockError):
    """A lease of the lock server is no longer valid: stop what it protects. `reason` is one word for programs.

    `not_owner` (the server said so: the lease has expired, was broken, or another owner has the lock), `deadline` (no
    renewal was acknowledged in time, so another owner may have the lock), `released`, or `forked` (the lease belongs to
    the parent process).
    """

    def __init__(self, lock_name: str, reason: str, message: str) -> None:
        super().__init__(message)
        self.lock_name = lock_name
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.lock_name, self.reason, str(self))


class LockServerError(PgLeaderLockError):
    """The lock server did not carry out the request: one of the two errors below, or an invalid response."""


class LockServerUnreachable(LockServerError):
    """No lock server answered. The request may have been carried out anyway. `retry_after_s` is set if a server sent
    one."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class LockServerRefused(LockServerError):
    """The lock server refused the request, with HTTP `status` 4xx. Nothing was changed. `retry_after_s` is set if the
    server sent one."""

    def __init__(self, status: int, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.status, str(self)), {"retry_after_s": self.retry_after_s}
