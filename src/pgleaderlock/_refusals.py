"""What a failed connect or an unfit session is called, and what its text tells the user to do.

Pure. Imports psycopg's error types, `_conninfo`'s scrubbing, `errors` and nothing else. No text made here may contain
a secret of a DSN.
"""

from collections.abc import Mapping

import psycopg

from pgleaderlock._conninfo import scrub
from pgleaderlock.errors import ConnectionError, LockError, PgLeaderLockError, SchemaError, UnsafeSessionError

__all__ = ["connect_error", "pooler_error", "safe_cause", "standby_error", "statement_error"]


def connect_error(error: psycopg.Error, params: Mapping[str, str]) -> ConnectionError:
    text = scrub(str(error), params)
    if "unsupported startup parameter" in text:
        return pooler_error(text)
    if "hot standby" in text:
        return standby_error()
    if "out of shared memory" in text:
        return ConnectionError(f"cannot connect: {lock_table_full(text)}")
    return ConnectionError(f"cannot connect: {text}")


def statement_error(name: str, error: Exception, text: str) -> PgLeaderLockError:
    """What a failed statement is called; `text` is what the server said, without secrets."""
    sqlstate = getattr(error, "sqlstate", None)
    if sqlstate == "53200":  # out_of_memory: for us it is always the shared lock table
        return LockError(lock_table_full(text))
    if sqlstate in ("42P01", "3F000", "42883"):  # undefined table, schema, function
        return SchemaError(f"the ledger is missing or too old ({text}): run `pgleaderlock migrate` on this database")
    if sqlstate == "42501" and name.startswith("ledger_"):  # insufficient_privilege
        return SchemaError(f"this database role may not use the ledger ({text}): see the GRANTs in docs/ledger.md")
    return ConnectionError(f"{name!r} failed: {text}")


def lock_table_full(detail: str) -> str:
    return f"the server's lock table is full ({detail}): raise max_locks_per_transaction, or hold fewer locks"


def safe_cause(error: Exception, params: Mapping[str, str]) -> Exception | None:
    """The original as the cause, unless its text would put a secret into a traceback."""
    text = str(error)
    return error if " ".join(text.split()) == scrub(text, params) else None


def pooler_error(detail: str) -> UnsafeSessionError:
    return UnsafeSessionError(
        "pooler",
        f"there is a connection pooler between us and PostgreSQL ({detail}): connect to PostgreSQL itself, or, if the "
        "pool is in session mode, pass allow_pooler=True",
    )


def standby_error() -> UnsafeSessionError:
    return UnsafeSessionError(
        "standby",
        "this server is a standby, where a lock excludes nobody: connect to the primary, or list all hosts in the DSN",
    )
