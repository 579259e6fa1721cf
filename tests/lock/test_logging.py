"""The log: one logger, one line an event, the same fields in the text and in `extra=`."""

import logging
from collections.abc import Iterator

import pytest

from pgleaderlock import FixedInterval, LeaderLock
from pgleaderlock._base.logging import Seldom, get_logger
from support.fakes import FakeClock, FakeDatabase, Recorder, captured_log, fake_lock, leading, until


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    with captured_log() as found:
        yield found


def _one(records: list[logging.LogRecord], event: str) -> logging.LogRecord:
    (found,) = [record for record in records if getattr(record, "event", None) == event]
    return found


async def test_the_messages_have_the_form_of_the_specification(records: list[logging.LogRecord]) -> None:
    database, clock = FakeDatabase(), FakeClock()
    database.script("try", (False,), (False,))
    lock = fake_lock(database, clock, retry_strategy=FixedInterval(2))
    recorder = Recorder(lock)
    async with lock:
        for failures in (1, 2):
            await recorder.seen("on_acquire_failed", failures)
            await clock.somebody_sleeps()
            clock.advance(2)
        assert await lock.wait_for_leadership()
        database.script("probe", OSError("connection closed"))
        await clock.somebody_sleeps()
        clock.advance(5)
        await recorder.seen("on_lost")
    texts = [record.getMessage() for record in records]
    assert {record.name for record in records} == {"pgleaderlock"}
    assert texts[0] == "state_change from=stopped to=follower key1=7 key2=11"
    assert "state_change from=follower to=acquiring key1=7 key2=11" in texts
    assert "lock_acquired attempt=3 key1=7 key2=11" in texts
    assert 'health_check_failed error="the statement failed: connection closed" key1=7 key2=11' in texts
    assert _one(records, "health_check_failed").levelno == logging.WARNING
    assert _one(records, "lock_acquired").levelno == logging.INFO


async def test_every_field_of_the_text_is_in_extra_too(records: list[logging.LogRecord]) -> None:
    async with leading(FakeDatabase(), FakeClock()):
        pass
    acquired = vars(_one(records, "lock_acquired"))
    assert (acquired["attempt"], acquired["key1"], acquired["key2"]) == (1, 7, 11)
    change = vars(next(record for record in records if vars(record)["event"] == "state_change"))
    assert (change["from_"], change["to"]) == ("stopped", "follower")


async def test_a_recovery_within_grace_is_only_a_log_notice(records: list[logging.LogRecord]) -> None:
    database, clock = FakeDatabase(), FakeClock()
    async with leading(database, clock, reconnect_grace_s=30) as lock:
        recorder = Recorder(lock)
        database.script("probe", OSError("gone"))
        await clock.somebody_sleeps()
        clock.advance(5)
        await recorder.seen("leader>reconnecting")
        await clock.somebody_sleeps()
        clock.advance(1)
        await recorder.seen("reconnecting>leader")
        assert recorder.calls == ["leader>reconnecting", "reconnecting>leader"]
    assert _one(records, "leadership_recovered").getMessage() == "leadership_recovered key1=7 key2=11"


async def test_a_named_lock_says_its_name(records: list[logging.LogRecord]) -> None:
    database = FakeDatabase()
    lock = LeaderLock.for_name("", "the billing", connect_fn=database.connect)
    async with lock:
        assert await lock.wait_for_leadership()
    record = _one(records, "lock_acquired")
    assert record.getMessage().endswith('lock="the billing"')
    assert vars(record)["lock"] == "the billing"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain", "plain"),
        ("", '""'),
        ("two words", '"two words"'),
        ("a=b", '"a=b"'),
        ('say "x"', '"say \\"x\\""'),
        ("back\\slash here", '"back\\\\slash here"'),
        ("first line\nsecond\r\n\tline\n", '"first line second line"'),
        ("one\u2028two\x85three", '"one two three"'),
        ("100%s %d", '"100%s %d"'),
        (1.5, "1.5"),
        (2.0, "2"),
        (0.12345, "0.123"),
        (100.0, "100"),
        (None, "None"),
        (7, "7"),
        (ValueError("no\nsuch thing"), '"no such thing"'),
    ],
    ids=repr,
)
def test_a_value_is_shown_on_one_line_and_quoted_where_it_must_be(
    records: list[logging.LogRecord], value: object, shown: str
) -> None:
    get_logger("pgleaderlock").info("event", field=value)
    assert records[-1].getMessage() == f"event field={shown}"
    assert vars(records[-1])["field"] == value


@pytest.mark.parametrize("reserved", ["name", "args", "msg", "message", "module", "process", "asctime", "taskName"])
def test_a_field_with_a_name_that_logging_needs_does_no_harm(records: list[logging.LogRecord], reserved: str) -> None:
    get_logger("pgleaderlock").info("event", **{reserved: "mine"})
    assert records[-1].getMessage() == f"event {reserved}=mine"
    assert vars(records[-1])[f"{reserved}_"] == "mine"
    assert records[-1].name == "pgleaderlock"


def test_fields_of_the_event_come_before_those_of_the_lock_and_win(records: list[logging.LogRecord]) -> None:
    get_logger("pgleaderlock").bind(key1=1, attempt=1).bind(key2=2).info("event", attempt=3)
    assert records[-1].getMessage() == "event attempt=3 key1=1 key2=2"
    assert vars(records[-1])["attempt"] == 3


def test_a_binding_leaves_the_original_alone(records: list[logging.LogRecord]) -> None:
    log = get_logger("pgleaderlock")
    log.bind(key1=1)
    log.info("event")
    assert records[-1].getMessage() == "event"


def test_a_message_below_the_level_costs_no_formatting() -> None:
    class Costly:
        def __str__(self) -> str:
            raise AssertionError("formatted for nobody")

    logger = logging.getLogger("pgleaderlock.test_quiet")
    logger.setLevel(logging.WARNING)
    get_logger("pgleaderlock.test_quiet").info("event", field=Costly())


def test_the_record_points_at_the_caller(records: list[logging.LogRecord]) -> None:
    get_logger("pgleaderlock").warning("event")
    assert records[-1].funcName == "test_the_record_points_at_the_caller"


def test_what_is_said_seldom_tells_how_many_were_left_out(
    records: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("pgleaderlock._base.logging.time.monotonic", lambda: now)
    say = Seldom(get_logger("pgleaderlock").warning, interval_s=5)
    for _ in range(1000):
        say("refused", client="a")
    now += 5
    say("refused", client="b")
    now += 5
    say("refused", client="c")
    said = [record.getMessage() for record in records]
    assert said == ["refused client=a", "refused client=b left_out=999", "refused client=c"]


async def test_an_exception_of_a_callback_is_logged_with_its_traceback(records: list[logging.LogRecord]) -> None:
    lock = fake_lock(FakeDatabase(), FakeClock())

    @lock.on_acquired
    def broken() -> None:
        raise RuntimeError("first line\nsecond line")

    async with lock:
        await until(lambda: any(vars(record)["event"] == "callback_failed" for record in records))
    record = _one(records, "callback_failed")
    assert "\n" not in record.getMessage()
    assert 'error="first line second line"' in record.getMessage()
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], RuntimeError)
