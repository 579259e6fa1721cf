"""The doors of job frameworks from the inside: what is sent and run when leadership comes and goes."""

import signal
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import dramatiq
import pytest
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.base import STATE_RUNNING
from dramatiq.brokers.stub import StubBroker

import pgleaderlock.contrib.celery as celery_door
from pgleaderlock import ConfigurationError, LockNotAcquired, LockState, sync
from pgleaderlock.contrib.apscheduler import LOOK_S, LeaderOnly
from pgleaderlock.contrib.dramatiq import Periodic, one_at_a_time
from pgleaderlock.testing.sync import FakeLock

WAIT_S = 30.0


# --- One run at a time


def test_a_run_is_skipped_or_refused_while_another_lasts(dsn: str) -> None:
    ran: list[str] = []
    skipping = one_at_a_time("job", dsn=dsn)(ran.append)
    raising = one_at_a_time("job", dsn=dsn, otherwise="raise")(ran.append)
    with sync.acquire_leadership(dsn, "job"):
        skipping("not")
        with pytest.raises(LockNotAcquired):
            raising("not")
    skipping("once")
    raising("twice")
    assert ran == ["once", "twice"]


def test_what_the_function_returns_and_raises_is_passed_on(dsn: str) -> None:
    @one_at_a_time("job", dsn=dsn)
    def work(error: Exception | None) -> str:
        """The documentation."""
        if error is not None:
            raise error
        return "done"

    assert work(None) == "done"
    assert (work.__name__, work.__doc__) == ("work", "The documentation.")
    with pytest.raises(LockNotAcquired):  # not taken for its own lock's
        work(LockNotAcquired("another lock"))
    assert work(None) == "done"


def test_a_wrong_use_is_refused_at_once() -> None:
    async def late() -> None:
        """Async."""

    unusable: Any = late
    with pytest.raises(ConfigurationError, match="the name of the lock"):
        one_at_a_time(unusable)
    with pytest.raises(ConfigurationError, match="otherwise"):
        one_at_a_time("job", otherwise=unusable)
    with pytest.raises(ConfigurationError, match="is async"):
        one_at_a_time("job")(late)
    with pytest.raises(ConfigurationError, match="every"):
        Periodic(FakeLock.for_name("", "periodic")).every(0)


def test_a_celery_task_takes_the_dsn_of_its_app(dsn: str) -> None:
    from celery import Celery

    app = Celery("here", set_as_current=True)
    try:

        @app.task(name="job")
        @celery_door.one_at_a_time("job")
        def task() -> str:
            return "ran"

        app.conf.pgleaderlock_dsn = dsn
        assert task.apply().get() == "ran"
        with sync.acquire_leadership(dsn, "job"):
            assert task.apply().get() is None
        app.conf.pgleaderlock_dsn = 7
        with pytest.raises(ConfigurationError, match="pgleaderlock_dsn"):
            task.apply(throw=True)
    finally:
        app.close()


# --- Schedulers


class Scheduler(LeaderOnly, BackgroundScheduler):
    """Jobs in memory."""


def test_jobs_run_in_each_term_of_the_process() -> None:
    lock, ran = FakeLock.for_name("", "jobs"), threading.Semaphore(0)
    scheduler = Scheduler(leader_lock=lock)
    scheduler.add_job(ran.release, "interval", seconds=0.01, misfire_grace_time=60)
    scheduler.start()
    try:
        for _ in range(2):
            lock.win()
            assert ran.acquire(timeout=WAIT_S)
            lock.lose()
            while ran.acquire(blocking=False):
                pass
    finally:
        scheduler.shutdown()
    assert lock.state is LockState.STOPPED


def test_a_scheduler_that_does_not_lead_leaves_what_is_due_where_it_is() -> None:
    lock = FakeLock.for_name("", "jobs")
    scheduler = Scheduler(leader_lock=lock)
    due = datetime.now(UTC) - timedelta(seconds=1)
    job = scheduler.add_job(print, "interval", days=1, next_run_time=due, misfire_grace_time=60)
    scheduler.start(paused=True)
    try:
        scheduler.state = STATE_RUNNING  # as after `resume`, without its thread
        assert scheduler._process_jobs() == LOOK_S
        assert scheduler.get_job(job.id).next_run_time == due
        lock.win()
        scheduler._process_jobs()
        assert scheduler.get_job(job.id).next_run_time > due
    finally:
        scheduler.shutdown()


def test_messages_are_sent_in_each_term_of_the_worker() -> None:
    lock, sent = FakeLock.for_name("", "periodic"), threading.Semaphore(0)
    broker = StubBroker()
    periodic = Periodic(lock)
    broker.add_middleware(periodic)

    @periodic.every(0.01)
    @dramatiq.actor(broker=broker)
    def poll() -> None:
        sent.release()

    worker = dramatiq.Worker(broker, worker_timeout=10)
    worker.start()
    try:
        for _ in range(2):
            lock.win()
            assert sent.acquire(timeout=WAIT_S)
            lock.lose()
            broker.join(poll.queue_name, timeout=int(WAIT_S * 1000))
            while sent.acquire(blocking=False):
                pass
    finally:
        worker.stop()
        broker.close()
    assert lock.state is LockState.STOPPED


def test_a_worker_that_is_told_to_end_gives_the_lock_up_before_it_has_noticed() -> None:
    lock, told, released = FakeLock.for_name("", "periodic"), threading.Event(), threading.Event()
    lock.on_released(released.set)
    broker = StubBroker()
    periodic = Periodic(lock)
    broker.add_middleware(periodic)
    periodic.every(60)(dramatiq.actor(broker=broker)(print))
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())  # as Dramatiq's worker process does
    worker = dramatiq.Worker(broker, worker_timeout=10)
    worker.start()
    try:
        lock.win()
        signal.raise_signal(signal.SIGTERM)
        assert told.is_set()
        assert released.wait(WAIT_S)
    finally:
        worker.stop()
        broker.close()
        signal.signal(signal.SIGTERM, before)


def test_a_celery_beat_that_follows_goes_on_in_its_schedule_and_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from celery import Celery
    from celery.beat import Scheduler as InMemory

    class Beat(celery_door.LeaderOnly, InMemory):
        """Says what it would send."""

        def apply_async(self, entry: Any, producer: Any = None, advance: bool = True, **_: Any) -> None:
            sent.append(entry.name)

    sent: list[str] = []
    monkeypatch.setattr(celery_door, "LeaderLock", FakeLock)
    app = Celery("here", broker="memory://", set_as_current=False)
    app.conf.pgleaderlock_dsn = ""
    beat = Beat(app)
    beat.update_from_dict({"poll": {"task": "poll", "schedule": 0.0}})
    try:
        lock = beat.leader_lock
        assert isinstance(lock, FakeLock)
        entry = beat.schedule["poll"]
        beat.tick()
        assert (sent, beat.schedule["poll"].total_run_count) == ([], entry.total_run_count + 1)
        lock.win()
        beat.tick()
        assert sent == ["poll"]
        lock.late()
        beat.tick()
        assert sent == ["poll"]
    finally:
        beat.close()
        app.close()
    assert lock.state is LockState.STOPPED
