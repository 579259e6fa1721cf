"""One exception tree, with the names of the contract."""

import builtins
import pickle

import pytest

import pgleaderlock
from pgleaderlock import errors
from pgleaderlock.errors import (
    ConfigurationError,
    LockError,
    LockNotAcquired,
    PgLeaderLockError,
    ShutdownError,
    UnsafeSessionError,
)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_one_of_ours(name: str) -> None:
    assert issubclass(getattr(errors, name), PgLeaderLockError)
    assert getattr(errors, name).__doc__


def test_the_names_of_the_specification_exist() -> None:
    assert {"PgLeaderLockError", "ConnectionError", "LockError", "ShutdownError"} <= set(errors.__all__)
    assert issubclass(PgLeaderLockError, Exception)


def test_the_kinds_of_errors_are_kept_apart() -> None:
    assert not issubclass(LockError, errors.ConnectionError)
    assert not issubclass(errors.ConnectionError, LockError)
    assert not issubclass(ShutdownError, errors.ConnectionError | LockError)


def test_a_wrong_setting_is_a_value_error_too() -> None:
    assert issubclass(ConfigurationError, ValueError)


def test_an_unsafe_session_is_a_connection_that_cannot_be_used() -> None:
    error = UnsafeSessionError("pooler", "connect to PostgreSQL itself")
    assert isinstance(error, errors.ConnectionError)
    assert (error.reason, str(error)) == ("pooler", "connect to PostgreSQL itself")


def test_the_name_that_shadows_a_builtin_stays_in_its_module() -> None:
    assert not issubclass(errors.ConnectionError, builtins.ConnectionError)
    assert "ConnectionError" not in pgleaderlock.__all__
    assert not hasattr(pgleaderlock, "ConnectionError")


def test_every_public_name_exists() -> None:
    assert sorted(set(pgleaderlock.__all__)) == sorted(pgleaderlock.__all__)
    for name in pgleaderlock.__all__:
        assert hasattr(pgleaderlock, name)


def test_a_lock_that_was_not_acquired_names_its_subscription_pickled_or_not() -> None:
    error = LockNotAcquired("billing", holder_pid=7, holder_application_name="other")
    copy = pickle.loads(pickle.dumps(error))
    for each in (error, copy):
        assert each.subscription_name == each.name == "billing"
        assert (each.holder_pid, each.holder_application_name) == (7, "other")
