"""Where users import from: these paths and names stay, wherever the code behind them lives."""

import importlib
import subprocess
import sys

import pytest

PATHS = {
    "pgleaderlock": (
        "Callback ConfigurationError CoordinationError DecorrelatedJitter ElectionObserver ErrorCallback"
        " ExponentialBackoff FenceLost FixedInterval LeaderElection LeaderGate LeaderLock LeaderStateChanged"
        " LeaderToken LeadershipGuard LockError LockNotAcquired LockState NotFenced NotLeader Once PgLeaderLockError"
        " RetryContext RetryStrategy SchemaError ShutdownError StaleEpoch StateChangeCallback UnsafeSessionError"
        " acquire_leadership acquire_leadership_blocking acquire_leadership_with_retry fenced key_pair"
        " key_pair_from_bigint once"
    ),
    "pgleaderlock.alerts": "Alert default_alerts from_rule merged rules_yaml",
    "pgleaderlock.balance": "Held Move choose fair_share moves_needed next_move plan",
    "pgleaderlock.cli": "main",
    "pgleaderlock.client": (
        "Acquire AsyncHeartbeat AsyncLease AsyncLockClient Heartbeat Lease LeaseLost LeaseState LockClient LockHeld"
        " LockInfo LockServerError LockServerRefused LockServerUnreachable Release Renew"
    ),
    "pgleaderlock.config": (
        "AlertRule Config ConfigFileError FileUnreadable Origin Problem RoleSettings Setting Value find_file"
        " format_duration json_schema parse_duration_s"
    ),
    "pgleaderlock.contrib.apscheduler": "LeaderOnly",
    "pgleaderlock.contrib.celery": "LeaderOnly LeaderScheduler one_at_a_time",
    "pgleaderlock.contrib.dramatiq": "Periodic one_at_a_time",
    "pgleaderlock.contrib.django": "dsn election fenced leader_command leader_view",
    "pgleaderlock.contrib.fastapi": "leader_lifespan leader_required leader_route",
    "pgleaderlock.contrib.flask": "Leadership",
    "pgleaderlock.contrib.sqlalchemy": "fenced",
    "pgleaderlock.election": "LeaderElection",
    "pgleaderlock.embedded": "EmbeddedError EmbeddedPostgres EmbeddedUnavailable find_binaries",
    "pgleaderlock.errors": (
        "ConfigurationError ConnectionError CoordinationError DatabaseError FenceLost LeaseLost LockError LockHeld"
        " LockNotAcquired LockServerError LockServerRefused LockServerUnreachable NotFenced NotLeader PgLeaderLockError"
        " SchemaError ShutdownError StaleEpoch UnsafeSessionError"
    ),
    "pgleaderlock.fence": "fenced",
    "pgleaderlock.gate": "LeaderGate",
    "pgleaderlock.guard": (
        "LeadershipGuard acquire_leadership acquire_leadership_blocking acquire_leadership_with_retry"
    ),
    "pgleaderlock.history": (
        "Event EventFeed NodeView Reader RequestView RoleView Term all_roles all_terms as_json events namespaces nodes"
        " request role roles terms"
    ),
    "pgleaderlock.keys": "DEFAULT_NAMESPACE KeyPair bigint_from_key_pair key_pair key_pair_from_bigint",
    "pgleaderlock.ledger": "Beat Bump Identity Ledger Look Member Request Settled",
    "pgleaderlock.lock": "LeaderLock",
    "pgleaderlock.metrics": "CONTENT_TYPE ElectionMetrics GATE_REASONS",
    "pgleaderlock.migrate": "LEDGER_VERSION advance_epoch check_schema migrate pending sql",
    "pgleaderlock.models": "LeaderStateChanged LeaderToken LockState RetryContext",
    "pgleaderlock.observer": "AttemptResult ElectionObserver LossReason",
    "pgleaderlock.probes": "ProbeServer",
    "pgleaderlock.retry": "DecorrelatedJitter ExponentialBackoff FixedInterval RetryStrategy",
    "pgleaderlock.server.store": (
        "Acquire Granted Held LockView Release Renew Reply Store StoreBusy StoreError StoreFull"
    ),
    "pgleaderlock.slots": "OnSlotFailure Once once slot_namespace",
    "pgleaderlock.sync": "LeaderElection LeaderGate LeaderLock LeadershipGuard acquire_leadership "
    "acquire_leadership_blocking acquire_leadership_with_retry advisory_lock leader_only once",
    "pgleaderlock.testing": "FakeDatabase FakeElection FakeLock ManualClock",
    "pgleaderlock.testing.sync": "FakeElection FakeLock",
}


@pytest.mark.parametrize("path", PATHS)
def test_a_documented_path_has_its_names(path: str) -> None:
    module = importlib.import_module(path)
    assert [name for name in PATHS[path].split() if not hasattr(module, name)] == []


def test_the_package_exports_nothing_that_is_not_listed_here() -> None:
    listed = set(PATHS["pgleaderlock"].split())
    assert set(importlib.import_module("pgleaderlock").__all__) == listed


def test_the_package_loads_a_name_when_it_is_asked_for() -> None:
    code = (
        "import sys, pgleaderlock\n"
        "assert 'psycopg' not in sys.modules\n"
        "assert pgleaderlock.LeaderLock is __import__('pgleaderlock.lock', fromlist=['x']).LeaderLock\n"
        "assert 'pgleaderlock.election' not in sys.modules\n"
        "assert pgleaderlock.errors.LockError is pgleaderlock.LockError\n"
        "assert set(pgleaderlock.__all__) <= set(dir(pgleaderlock))\n"
        "assert pgleaderlock.__version__\n"
        "from pgleaderlock import *\n"
        "assert LeaderElection is pgleaderlock.LeaderElection\n"
        "try:\n    pgleaderlock.LeaderLokc\n"
        "except AttributeError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "module 'pgleaderlock' has no attribute 'LeaderLokc'\n"), done.stderr
