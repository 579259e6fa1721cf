"""What every store of the lock server does, whatever it keeps locks in: the rules of `pgleaderlock.server.store`."""

import asyncio
import random
import re
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pgleaderlock.server.store import (
    Acquire,
    Granted,
    Held,
    KeyReused,
    LockView,
    NotReleased,
    NotRenewed,
    Operation,
    Release,
    Released,
    Renew,
    Renewed,
    Store,
    StoreError,
    StoreFull,
    Sweep,
)
from support.counts import count
from support.store_model import Model
from support.stores import (
    PATIENCE_S,
    STORES,
    OpenPlace,
    Place,
    acquired,
    held,
    release_of,
    renew_of,
    until_waiting,
    waited,
)


@pytest.fixture(params=sorted(STORES))
def open_place(request: pytest.FixtureRequest) -> OpenPlace:
    return STORES[request.param](request)


@pytest.fixture
async def place(open_place: OpenPlace) -> AsyncIterator[Place]:
    async with open_place() as opened:
        yield opened


@pytest.fixture
def store(place: Place) -> Store:
    """For tests that do not open it again."""
    return place.store


def waiting(store: Store, acquire: Acquire, wait_ms: int = 600_000) -> "asyncio.Task[Granted | Held | StoreFull]":
    return asyncio.create_task(waited(store, acquire, wait_ms))


async def answer(task: Awaitable[Any]) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        return await task


def wrong_ones(lease: Granted) -> list[tuple[str, str, str, int]]:
    """Lock, owner, lease and token, each in turn not that of the lease."""
    right = (lease.lock_name, lease.owner_id, lease.lease_id, lease.fencing_token)
    wrong = ("another", "mallory", "0" * 32, lease.fencing_token + 1)
    one_wrong: list[Any] = [(*right[:at], wrong[at], *right[at + 1 :]) for at in range(4)]
    return [*one_wrong, (*right[:3], lease.fencing_token - 1)]


# --- Which store it is


async def test_a_store_keeps_its_identity_and_another_one_has_another(open_place: OpenPlace, tmp_path: Path) -> None:
    async with open_place() as place:
        identity = place.store.found.store_id
        assert re.fullmatch("[0-9a-f]{16}", identity)
        await place.reopen()
        assert place.store.found.store_id == identity
    for file in tmp_path.iterdir():  # noqa: ASYNC240 - of the store in a file; the other has its own database
        file.unlink()
    async with open_place() as other:
        assert other.store.found.store_id != identity


# --- S1: one good lease at a time


async def test_a_lock_that_nobody_ever_took_is_free_with_token_and_version_0(store: Store) -> None:
    assert await store.get("job") == LockView("job", False, None, None, 0, None, 0)


async def test_a_grant_is_what_the_lock_shows(store: Store) -> None:
    lease = await acquired(store, "job")
    seen = await store.get("job")
    assert (seen.held, seen.owner_id, seen.lease_id) == (True, "alice", lease.lease_id)
    assert (seen.fencing_token, seen.lease_expiry_ms) == (lease.fencing_token, lease.lease_expiry_ms)
    assert seen.version > 0


async def test_a_held_lock_is_refused_with_its_owner_and_the_time_that_is_left(store: Store) -> None:
    lease = await acquired(store, "job", ttl_ms=30_000)
    refusal = await held(store, "job")
    assert (refusal.lock_name, refusal.current_owner_id) == ("job", "alice")
    assert refusal.current_expiry_ms == lease.lease_expiry_ms
    assert 0 < refusal.remaining_ms <= 30_000


async def test_the_owner_too_is_refused_without_a_key(store: Store) -> None:
    await acquired(store, "job", "alice")
    await held(store, "job", "alice")


async def test_of_many_who_acquire_at_once_one_is_granted(store: Store) -> None:
    got = await asyncio.gather(*(store.submit([Acquire("job", f"owner-{n}", 30_000)]) for n in range(50)))
    assert sorted(type(outcome).__name__ for (outcome,) in got) == ["Granted", *["Held"] * 49]


async def test_locks_of_different_names_do_not_know_each_other(store: Store) -> None:
    names = ["job", "Job", "job ", "jöb", "job/1", "job%", "job'", "x" * 200, "\U0001f512"]
    leases = [await acquired(store, name) for name in names]
    assert [lease.fencing_token for lease in leases] == [1] * len(names)
    assert len({lease.lease_id for lease in leases}) == len(names)


# --- S2: tokens rise for ever


async def test_each_grant_has_a_higher_token_whatever_ended_the_lease_before(place: Place) -> None:
    tokens = []
    for end in ("release", "expiry", "sweep", "break", "reopen and expiry"):
        lease = await acquired(place.store, "job", ttl_ms=10_000)
        tokens.append(lease.fencing_token)
        if end == "release":
            assert await place.store.submit([release_of(lease)]) == [Released()]
        elif end == "break":
            await place.store.break_lock("job", "admin")
        else:
            if end.startswith("reopen"):
                await place.reopen()
            await place.pass_ms(15_000)
            if end == "sweep":
                await place.store.sweep()
    tokens.append((await acquired(place.store, "job")).fencing_token)
    assert tokens == sorted(set(tokens))
    assert (await place.store.get("job")).fencing_token == tokens[-1]


async def test_the_view_of_a_free_lock_shows_the_highest_token_that_was_granted(store: Store) -> None:
    lease = await acquired(store, "job")
    await store.submit([release_of(lease)])
    seen = await store.get("job")
    assert (seen.held, seen.owner_id, seen.lease_id, seen.lease_expiry_ms) == (False, None, None, None)
    assert seen.fencing_token == lease.fencing_token


async def test_what_was_granted_is_there_after_a_restart(place: Place) -> None:
    lease = await acquired(place.store, "job")
    before = await place.store.get("job")
    await place.reopen()
    after = await place.store.get("job")
    assert (after.owner_id, after.lease_id, after.version) == (before.owner_id, before.lease_id, before.version)
    await held(place.store, "job")
    assert isinstance((await place.store.submit([renew_of(lease)]))[0], Renewed)


async def test_the_version_changes_with_every_change_and_never_goes_back(place: Place) -> None:
    versions = [(await place.store.get("job")).version]

    async def note() -> None:
        versions.append((await place.store.get("job")).version)

    lease = await acquired(place.store, "job", ttl_ms=10_000)
    await note()
    await place.store.submit([renew_of(lease, 10_000)])
    await note()
    await place.store.submit([release_of(lease)])
    await note()
    await acquired(place.store, "job", ttl_ms=10_000)
    await note()
    await place.pass_ms(15_000)
    await place.store.sweep()
    await note()
    await acquired(place.store, "job")
    await note()
    await place.store.break_lock("job", "admin")
    await note()
    assert versions == sorted(set(versions))


# --- S3: only the holder of a good lease renews and releases


async def test_a_renewal_extends_from_now_be_it_more_or_less(place: Place) -> None:
    lease = await acquired(place.store, "job", ttl_ms=20_000)
    await place.pass_ms(10_000)
    assert isinstance((await place.store.submit([renew_of(lease, 30_000)]))[0], Renewed)
    await place.pass_ms(25_000)
    await held(place.store, "job")
    assert isinstance((await place.store.submit([renew_of(lease, 5_000)]))[0], Renewed)
    assert (await held(place.store, "job")).remaining_ms <= 5_000
    await place.pass_ms(10_000)
    await acquired(place.store, "job", "bob")


async def test_a_renewal_tells_when_the_lease_ends_now(store: Store) -> None:
    lease = await acquired(store, "job", ttl_ms=10_000)
    (renewed,) = await store.submit([renew_of(lease, 600_000)])
    assert isinstance(renewed, Renewed)
    assert renewed.lease_expiry_ms == (await store.get("job")).lease_expiry_ms
    assert renewed.lease_expiry_ms - lease.lease_expiry_ms > 500_000


async def test_a_renewal_that_does_not_match_changes_nothing(store: Store) -> None:
    lease = await acquired(store, "job")
    before = await store.get("job")
    for wrong in wrong_ones(lease):
        assert await store.submit([Renew(*wrong, 60_000)]) == [NotRenewed()]
    assert await store.get("job") == before


async def test_a_release_that_does_not_match_changes_nothing(store: Store) -> None:
    lease = await acquired(store, "job")
    before = await store.get("job")
    for wrong in wrong_ones(lease):
        assert await store.submit([Release(*wrong)]) == [NotReleased()]
    assert await store.get("job") == before


async def test_a_released_lease_is_neither_renewed_nor_released_again(store: Store) -> None:
    lease = await acquired(store, "job")
    assert await store.submit([release_of(lease)]) == [Released()]
    assert await store.submit([release_of(lease), renew_of(lease)]) == [NotReleased(), NotRenewed()]


async def test_a_stale_holder_cannot_touch_the_lease_of_the_next(place: Place) -> None:
    stale = await acquired(place.store, "job", ttl_ms=10_000)
    await place.pass_ms(15_000)
    await acquired(place.store, "job", "bob")
    before = await place.store.get("job")
    assert await place.store.submit([renew_of(stale), release_of(stale)]) == [NotRenewed(), NotReleased()]
    assert await place.store.get("job") == before


# --- L1: expiry


@pytest.mark.parametrize("swept", [False, True], ids=["unswept", "swept"])
async def test_an_expired_lease_is_no_obstacle_and_no_lease(place: Place, swept: bool) -> None:
    lease = await acquired(place.store, "job", ttl_ms=10_000)
    await place.pass_ms(15_000)
    if swept:
        await place.store.sweep()
    seen = await place.store.get("job")
    assert (seen.held, seen.owner_id, seen.lease_id, seen.lease_expiry_ms) == (False, None, None, None)
    assert await place.store.submit([renew_of(lease), release_of(lease)]) == [NotRenewed(), NotReleased()]
    assert (await acquired(place.store, "job", "bob")).fencing_token == lease.fencing_token + 1


async def test_the_sweep_counts_what_it_clears_and_what_is_good(place: Place) -> None:
    for number in range(5):
        await acquired(place.store, f"short-{number}", ttl_ms=10_000)
    for number in range(3):
        await acquired(place.store, f"long-{number}", ttl_ms=600_000)
    await place.store.submit([release_of(await acquired(place.store, "released"))])
    assert await place.store.sweep() == Sweep(expired=0, held=8)
    await place.pass_ms(15_000)
    assert await place.store.sweep() == Sweep(expired=5, held=3)
    assert await place.store.sweep() == Sweep(expired=0, held=3)


# --- The same request again


async def test_a_repeated_acquire_with_its_key_is_given_the_same_lease(place: Place) -> None:
    acquire = Acquire("job", "alice", 30_000, "key-1")
    (first,) = await place.store.submit([acquire])
    before = await place.store.get("job")
    (again,) = await place.store.submit([acquire])
    assert isinstance(first, Granted)
    assert not first.replayed
    assert isinstance(again, Granted)
    assert again == msgspec.structs.replace(first, replayed=True, remaining_ms=again.remaining_ms)
    assert await place.store.get("job") == before
    await place.reopen()
    (later,) = await place.store.submit([acquire])
    assert isinstance(later, Granted)
    assert (later.lease_id, later.fencing_token, later.replayed) == (first.lease_id, first.fencing_token, True)


async def test_many_repeats_at_once_are_one_grant(store: Store) -> None:
    got = await asyncio.gather(*(store.submit([Acquire("job", "alice", 30_000, "key-1")]) for _ in range(20)))
    leases = [outcome for (outcome,) in got if isinstance(outcome, Granted)]
    assert len(leases) == 20
    assert len({lease.lease_id for lease in leases}) == 1
    assert sum(not lease.replayed for lease in leases) == 1


@pytest.mark.parametrize("other", [("alice", "key-2"), ("bob", "key-2"), ("alice", None)], ids=str)
async def test_another_key_is_refused(store: Store, other: tuple[str, str | None]) -> None:
    await store.submit([Acquire("job", "alice", 30_000, "key-1")])
    (outcome,) = await store.submit([Acquire("job", other[0], 30_000, other[1])])
    assert isinstance(outcome, Held)


OTHER_BODIES = {
    "ttl_ms": Acquire("job", "alice", 60_000, "key-1"),
    "owner_id": Acquire("job", "bob", 30_000, "key-1"),
    "lock": Acquire("other job", "alice", 30_000, "key-1"),
}


@pytest.mark.parametrize("wait_ms", [0, 600_000], ids=["at once", "waiting"])
@pytest.mark.parametrize("field", sorted(OTHER_BODIES))
async def test_a_key_repeated_with_another_body_is_given_nothing(store: Store, field: str, wait_ms: int) -> None:
    first = Acquire("job", "alice", 30_000, "key-1")
    (lease,) = await store.submit([first])
    before = await store.get("job")
    assert await answer(store.submit([OTHER_BODIES[field]], wait_ms)) == [KeyReused(field)]
    assert await store.get("job") == before
    assert not (await store.get("other job")).held
    (again,) = await store.submit([first])
    assert isinstance(lease, Granted)
    assert isinstance(again, Granted)
    assert again.lease_id == lease.lease_id


async def test_a_renewal_does_not_change_what_the_key_stands_for(store: Store) -> None:
    acquire = Acquire("job", "alice", 30_000, "key-1")
    (lease,) = await store.submit([acquire])
    assert isinstance(lease, Granted)
    await store.submit([renew_of(lease, 90_000)])
    (again,) = await store.submit([acquire])
    assert isinstance(again, Granted)
    assert (again.lease_id, again.ttl_ms) == (lease.lease_id, 30_000)
    assert 30_000 < again.remaining_ms <= 90_000
    assert await store.submit([msgspec.structs.replace(acquire, ttl_ms=90_000)]) == [KeyReused("ttl_ms")]


async def test_a_key_may_be_used_for_something_else_once_its_lease_has_ended(place: Place) -> None:
    (lease,) = await place.store.submit([Acquire("job", "alice", 10_000, "key-1")])
    assert isinstance(lease, Granted)
    await place.store.submit([release_of(lease)])
    for other in OTHER_BODIES.values():
        (outcome,) = await place.store.submit([msgspec.structs.replace(other, ttl_ms=10_000)])
        assert isinstance(outcome, Granted)
        assert not outcome.replayed
        await place.pass_ms(15_000)


async def test_a_key_whose_lease_ends_earlier_in_the_list_is_not_reused(store: Store) -> None:
    """Who waits is given the lock; that the key was alice's does not matter any more."""
    (lease,) = await store.submit([Acquire("job", "alice", 30_000, "key-1")])
    assert isinstance(lease, Granted)
    task = waiting(store, Acquire("job", "waits", 30_000))
    await until_waiting(store, "job", 1)
    outcomes = await store.submit([release_of(lease), Acquire("job", "bob", 30_000, "key-1")])
    assert [type(outcome) for outcome in outcomes] == [Released, Held]
    assert isinstance(await answer(task), Granted)


@pytest.mark.parametrize("wait_ms", [0, 600_000], ids=["at once", "waiting"])
async def test_a_lease_is_given_again_although_its_key_was_granted_another_lock_after_a_restart(
    place: Place, wait_ms: int
) -> None:
    acquire = Acquire("job", "alice", 30_000, "key-1")
    (first,) = await place.store.submit([acquire])
    await place.reopen()  # from here on, the store does not know the key of another lock
    (other,) = await place.store.submit([OTHER_BODIES["lock"]])
    assert isinstance(first, Granted)
    assert isinstance(other, Granted)
    (again,) = await answer(place.store.submit([acquire], wait_ms))
    assert isinstance(again, Granted)
    assert (again.lease_id, again.replayed) == (first.lease_id, True)
    assert await answer(place.store.submit([Acquire("third job", "alice", 30_000, "key-1")])) == [KeyReused("lock")]


async def test_of_two_locks_in_one_list_a_key_is_for_the_first(store: Store) -> None:
    one, two = await store.submit([Acquire("one", "alice", 30_000, "key"), Acquire("two", "alice", 30_000, "key")])
    assert isinstance(one, Granted)
    assert two == KeyReused("lock")
    assert not (await store.get("two")).held


@pytest.mark.parametrize("field", ["owner_id", "ttl_ms"])
async def test_a_waiter_with_the_key_of_another_waiter_but_another_body_gets_nothing(store: Store, field: str) -> None:
    lease = await acquired(store, "job", "carol")
    first = waiting(store, Acquire("job", "alice", 30_000, "key-1"))
    await until_waiting(store, "job", 1)
    second = store.submit([OTHER_BODIES[field]], 600_000)
    await store.submit([release_of(lease)])
    assert (await answer(first)).owner_id == "alice"
    assert await answer(second) == [KeyReused(field)]
    await until_waiting(store, "job", 0)


async def test_a_grant_tells_how_long_it_was_asked_for_and_how_long_it_is_still_good(place: Place) -> None:
    acquire = Acquire("job", "alice", 30_000, "key-1")
    (first,) = await place.store.submit([acquire])
    await place.pass_ms(20_000)
    (again,) = await place.store.submit([acquire])
    assert isinstance(first, Granted)
    assert isinstance(again, Granted)
    assert first.ttl_ms == again.ttl_ms == 30_000
    assert 10_000 < first.remaining_ms <= 30_000
    assert 0 < again.remaining_ms <= 10_000


async def test_a_renewal_tells_how_long_the_lease_is_good_now(store: Store) -> None:
    lease = await acquired(store, "job")
    (renewed,) = await store.submit([renew_of(lease, 70_000)])
    assert isinstance(renewed, Renewed)
    assert renewed.ttl_ms == 70_000


async def test_a_lease_that_has_ended_is_not_given_again(place: Place) -> None:
    acquire = Acquire("job", "alice", 10_000, "key-1")
    tokens = []
    for end in ("release", "expiry", "break", "none"):
        (lease,) = await place.store.submit([acquire])
        assert isinstance(lease, Granted)
        assert not lease.replayed
        tokens.append(lease.fencing_token)
        if end == "release":
            await place.store.submit([release_of(lease)])
        elif end == "expiry":
            await place.pass_ms(15_000)
        elif end == "break":
            await place.store.break_lock("job", "admin")
    assert tokens == [1, 2, 3, 4]


# --- Many operations, one transaction


async def test_each_operation_of_a_list_has_its_outcome_in_order(store: Store) -> None:
    lease = await acquired(store, "taken")
    stale = msgspec.structs.replace(lease, fencing_token=99)
    operations: list[Operation] = [
        Acquire("new", "bob", 30_000), Acquire("taken", "bob", 30_000), renew_of(lease), renew_of(stale),
        release_of(stale), release_of(lease), Acquire("taken", "bob", 30_000), Acquire("taken", "carol", 30_000),
    ]  # fmt: skip
    outcomes = await store.submit(operations)
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds == [Granted, Held, Renewed, NotRenewed, NotReleased, Released, Granted, Held]
    assert isinstance(outcomes[6], Granted)
    assert outcomes[6].fencing_token == lease.fencing_token + 1


async def test_a_list_with_nothing_in_it_has_no_outcomes(store: Store) -> None:
    assert await store.submit([]) == []


async def test_five_hundred_operations_are_one_list(store: Store) -> None:
    outcomes = await store.submit([Acquire(f"job-{number}", "alice", 30_000) for number in range(500)])
    leases = [outcome for outcome in outcomes if isinstance(outcome, Granted)]
    assert [lease.lock_name for lease in leases] == [f"job-{number}" for number in range(500)]
    assert await store.submit([renew_of(lease) for lease in leases]) == [
        Renewed(seen.lease_expiry_ms or 0, 30_000) for seen in [await store.get(lease.lock_name) for lease in leases]
    ]


async def test_a_list_that_fails_changes_nothing_and_harms_nobody_else(store: Store) -> None:
    lease = await acquired(store, "kept")
    unspeakable = Acquire("\ud800", "alice", 30_000)  # half a character: no database can write it
    outcomes = await asyncio.gather(
        store.submit([Acquire("before", "alice", 30_000)]),
        store.submit([Acquire("within", "alice", 30_000), release_of(lease), unspeakable]),
        store.submit([unspeakable]),
        store.submit([Acquire("after", "alice", 30_000)]),
        return_exceptions=True,
    )
    assert [isinstance(outcome, Exception) for outcome in outcomes] == [False, True, True, False]
    seen = [(await store.get(name)).held for name in ("before", "within", "kept", "after")]
    assert seen == [True, False, True, True]
    assert (await store.get("within")).fencing_token == 0
    assert (await store.sweep()).held == 3


# --- Waiting


async def test_a_free_lock_is_granted_to_a_waiter_at_once(store: Store) -> None:
    lease = await answer(waited(store, Acquire("job", "alice", 30_000), 600_000))
    assert isinstance(lease, Granted)
    assert (lease.fencing_token, lease.replayed) == (1, False)
    assert (await store.get("job")).lease_id == lease.lease_id


async def test_waiters_are_served_in_the_order_in_which_they_came(store: Store) -> None:
    lease = await acquired(store, "job")
    tasks = []
    for number in range(200):
        tasks.append(waiting(store, Acquire("job", f"waiter-{number}", 30_000)))
        await until_waiting(store, "job", number + 1)
    for number, task in enumerate(tasks):
        assert await store.submit([release_of(lease)]) == [Released()]
        lease = await answer(task)
        assert (lease.owner_id, lease.fencing_token) == (f"waiter-{number}", number + 2)
    assert (await store.get("job")).waiters == 0


async def test_waiters_that_come_in_quick_succession_are_served_in_the_order_in_which_they_came(store: Store) -> None:
    lease = await acquired(store, "job", ttl_ms=600_000)
    tasks = []
    for number in range(200):
        tasks.append(waiting(store, Acquire("job", f"waiter-{number}", 30_000)))
        await asyncio.sleep(0.002 if number % 3 else 0)  # nobody waits for it to have its place
    await until_waiting(store, "job", 200)
    served = []
    left = set(tasks)
    while left:
        await store.submit([release_of(lease)])
        (first,), left = await asyncio.wait(left, timeout=PATIENCE_S, return_when="FIRST_COMPLETED")
        lease = await answer(first)
        served.append(lease.owner_id)
    assert served == [f"waiter-{number}" for number in range(200)]


async def test_a_waiter_is_granted_the_lock_when_the_lease_expires(place: Place) -> None:
    await acquired(place.store, "job", ttl_ms=10_000)
    task = waiting(place.store, Acquire("job", "bob", 30_000))
    await until_waiting(place.store, "job", 1)
    await place.pass_ms(15_000)
    lease = await answer(task)
    assert (lease.owner_id, lease.fencing_token) == ("bob", 2)


async def test_a_waiter_is_not_granted_a_lock_that_was_renewed(place: Place) -> None:
    lease = await acquired(place.store, "job", ttl_ms=10_000)
    task = waiting(place.store, Acquire("job", "bob", 30_000))
    await until_waiting(place.store, "job", 1)
    await place.store.submit([renew_of(lease, 40_000)])
    await place.pass_ms(20_000)
    assert isinstance((await place.store.submit([renew_of(lease, 10_000)]))[0], Renewed)
    assert (await place.store.get("job")).waiters == 1
    await place.pass_ms(15_000)
    assert (await answer(task)).owner_id == "bob"


async def test_a_waiter_is_granted_the_lock_when_it_is_broken(store: Store) -> None:
    await acquired(store, "job")
    task = waiting(store, Acquire("job", "bob", 30_000))
    await until_waiting(store, "job", 1)
    broken = await store.break_lock("job", "admin")
    assert broken.was.owner_id == "alice"
    assert (await answer(task)).fencing_token == 2


async def test_one_who_waited_longer_than_the_ttl_has_a_lease_that_is_good(place: Place) -> None:
    lease = await acquired(place.store, "job", ttl_ms=60_000)
    task = waiting(place.store, Acquire("job", "bob", 20_000))
    await until_waiting(place.store, "job", 1)
    await place.pass_ms(50_000)
    await place.store.submit([release_of(lease)])
    got = await answer(task)
    assert 50_000 <= got.waited_ms < 65_000
    await place.pass_ms(10_000)
    assert isinstance((await place.store.submit([renew_of(got)]))[0], Renewed)


async def test_one_whose_time_is_up_is_refused_and_stands_in_nobodys_way(place: Place) -> None:
    lease = await acquired(place.store, "job", ttl_ms=600_000)
    impatient = waiting(place.store, Acquire("job", "bob", 30_000), 10_000)
    await until_waiting(place.store, "job", 1)
    patient = waiting(place.store, Acquire("job", "carol", 30_000))
    await until_waiting(place.store, "job", 2)
    await place.pass_ms(15_000)
    refusal = await answer(impatient)
    assert isinstance(refusal, Held)
    assert refusal.current_owner_id == "alice"
    await place.store.submit([release_of(lease)])
    assert (await answer(patient)).owner_id == "carol"


async def test_one_who_does_not_want_to_wait_is_refused_at_once(store: Store) -> None:
    await acquired(store, "job")
    assert isinstance(await answer(waited(store, Acquire("job", "bob", 30_000), 0)), Held)
    assert (await store.get("job")).waiters == 0


async def test_one_who_has_gone_stands_in_nobodys_way(store: Store) -> None:
    lease = await acquired(store, "job")
    gone = waiting(store, Acquire("job", "bob", 30_000))
    await until_waiting(store, "job", 1)
    patient = waiting(store, Acquire("job", "carol", 30_000))
    await until_waiting(store, "job", 2)
    gone.cancel()
    await until_waiting(store, "job", 1)
    await store.submit([release_of(lease)])
    got = await answer(patient)
    assert (got.owner_id, got.fencing_token) == ("carol", 2)


async def test_one_who_goes_while_the_lock_is_granted_leaves_no_lease_behind(store: Store) -> None:
    for number in range(20):
        name = f"job-{number}"
        lease = await acquired(store, name)
        gone = store.submit([Acquire(name, "bob", 600_000)], 600_000)
        await until_waiting(store, name, 1)
        released = store.submit([release_of(lease)])
        for _ in range(number % 5):
            await asyncio.sleep(0)
        gone.cancel()
        await released
        await asyncio.wait([gone])
        if gone.cancelled():
            async with asyncio.timeout(PATIENCE_S):
                while (await store.get(name)).held:
                    await asyncio.sleep(0.001)


async def test_one_who_goes_at_once_leaves_neither_lease_nor_ticket_behind(store: Store) -> None:
    lease = await acquired(store, "held")
    for name in ("free", "held"):
        gone = waiting(store, Acquire(name, "bob", 600_000))
        await asyncio.sleep(0)  # it has just asked
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
    await store.submit([release_of(lease)])
    for name in ("free", "held"):
        async with asyncio.timeout(PATIENCE_S):
            while (seen := await store.get(name)).held or seen.waiters:
                await asyncio.sleep(0.001)


async def test_nobody_overtakes_a_waiter(store: Store) -> None:
    lease = await acquired(store, "job")
    task = waiting(store, Acquire("job", "bob", 30_000))
    await until_waiting(store, "job", 1)
    released, overtaker = await store.submit([release_of(lease), Acquire("job", "alice", 30_000)])
    assert released == Released()
    assert isinstance(overtaker, Held)
    assert (await answer(task)).fencing_token == 2


async def test_a_waiter_that_repeats_its_grant_is_given_it_at_once(store: Store) -> None:
    acquire = Acquire("job", "alice", 30_000, "key-1")
    (first,) = await store.submit([acquire])
    assert isinstance(first, Granted)
    again = await answer(waited(store, acquire, 600_000))
    assert (again.lease_id, again.fencing_token, again.replayed) == (first.lease_id, first.fencing_token, True)


async def test_two_who_wait_with_one_key_are_one_grant(store: Store) -> None:
    lease = await acquired(store, "job")
    tasks = []
    for number in range(2):
        tasks.append(waiting(store, Acquire("job", "bob", 30_000, "key-1")))
        await until_waiting(store, "job", number + 1)
    await store.submit([release_of(lease)])
    one, two = [await answer(task) for task in tasks]
    assert one.lease_id == two.lease_id
    assert (one.replayed, two.replayed) == (False, True)


# --- Force, limits, and what people look at


async def test_a_break_ends_the_lease_and_tells_what_it_was(store: Store) -> None:
    lease = await acquired(store, "job")
    before = await store.get("job")
    assert (await store.break_lock("job", "admin")).was == before
    seen = await store.get("job")
    assert (seen.held, seen.fencing_token) == (False, lease.fencing_token)
    assert await store.submit([renew_of(lease), release_of(lease)]) == [NotRenewed(), NotReleased()]
    assert (await acquired(store, "job", "bob")).fencing_token == lease.fencing_token + 1


async def test_a_free_or_unknown_lock_can_be_broken_too(store: Store) -> None:
    assert not (await store.break_lock("unknown", "admin")).was.held
    assert (await acquired(store, "unknown")).fencing_token >= 1


async def test_a_full_store_refuses_new_names_only(open_place: OpenPlace) -> None:
    async with open_place(locks_max=2) as place:
        lease = await acquired(place.store, "one")
        await acquired(place.store, "two")
        assert await place.store.submit([Acquire("three", "alice", 30_000)]) == [StoreFull(2)]
        assert await answer(waited(place.store, Acquire("three", "alice", 30_000), 1_000)) == StoreFull(2)
        assert isinstance((await place.store.submit([renew_of(lease)]))[0], Renewed)
        assert await place.store.submit([release_of(lease)]) == [Released()]
        assert (await acquired(place.store, "one", "bob")).fencing_token == 2
        await place.reopen()
        assert await place.store.submit([Acquire("three", "alice", 30_000)]) == [StoreFull(2)]


async def test_a_list_has_every_lock_once_in_the_order_of_code_points(store: Store) -> None:
    names = ["b", "a", "B", "ab", "a%", "a_", "ä", "z", "a/1", "\U0001f512", "\uffff"]
    for name in names:
        await acquired(store, name)
    found: list[str] = []
    cursor = None
    while True:
        page = await store.list_locks("", cursor, 2)
        assert len(page.locks) <= 2
        found += [lock.lock_name for lock in page.locks]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert found == sorted(names)


@pytest.mark.parametrize("prefix", ["", "a", "a%", "a_", "a/", "ä", "\U0001f512", "none"])
async def test_a_list_has_those_that_start_with_the_prefix(store: Store, prefix: str) -> None:
    names = ["a", "a%", "a%b", "a_", "a_b", "a/1", "ab", "b", "A", "ä", "äb", "\U0001f512", "\U0001f512x"]
    await store.submit([Acquire(name, "alice", 30_000) for name in names])
    page = await store.list_locks(prefix, None, 100)
    assert [lock.lock_name for lock in page.locks] == sorted(name for name in names if name.startswith(prefix))
    assert page.next_cursor is None


@pytest.mark.parametrize(("cursor", "names"), [("a", ["b", "b1", "b2"]), ("b1", ["b2"]), ("b2", []), ("c", [])])
async def test_a_list_is_bounded_by_prefix_and_cursor(store: Store, cursor: str, names: list[str]) -> None:
    await store.submit([Acquire(name, "alice", 30_000) for name in ("a", "a1", "b", "b1", "b2", "c", "c1")])
    page = await store.list_locks("b", cursor, 100)
    assert [lock.lock_name for lock in page.locks] == names


async def test_a_list_shows_each_lock_as_it_is(place: Place) -> None:
    await acquired(place.store, "expired", ttl_ms=10_000)
    await place.pass_ms(15_000)
    await acquired(place.store, "held")
    await place.store.submit([release_of(await acquired(place.store, "released"))])
    page = await place.store.list_locks("", None, 100)
    assert page.locks == [await place.store.get(name) for name in ("expired", "held", "released")]
    assert [lock.held for lock in page.locks] == [False, True, False]


# --- Opening and closing


async def test_a_store_that_works_passes_its_check(store: Store) -> None:
    await store.check()


async def test_closing_wakes_every_waiter(store: Store) -> None:
    await acquired(store, "job")
    tasks = [waiting(store, Acquire("job", f"owner-{number}", 30_000)) for number in range(5)]
    await until_waiting(store, "job", 5)
    await store.close()
    for task in tasks:
        assert isinstance(await answer(task), Held)


async def test_closing_again_is_harmless_and_a_closed_store_says_so(store: Store) -> None:
    await store.close()
    await store.close()
    for use in (
        store.submit([Acquire("job", "alice", 30_000)]), waited(store, Acquire("job", "alice", 30_000), 1_000),
        store.get("job"), store.list_locks("", None, 10), store.break_lock("job", "admin"), store.sweep(),
        store.check(),
    ):  # fmt: skip
        with pytest.raises(StoreError):
            await use


async def test_what_was_begun_before_the_close_is_finished(place: Place) -> None:
    tasks = [place.store.submit([Acquire(f"job-{n}", "alice", 600_000)]) for n in range(100)]
    await asyncio.sleep(0)  # each has handed over its operation
    await place.reopen()
    for task in tasks:
        (outcome,) = await answer(task)
        assert isinstance(outcome, Granted)
        assert (await place.store.get(outcome.lock_name)).lease_id == outcome.lease_id


# --- All of it together


class Story:
    """A random sequence of everything, on few locks and few owners, compared with the model at every step."""

    def __init__(self, place: Place, seed: int) -> None:
        self.place = place
        self.model = Model()
        self.chance = random.Random(seed)
        self.leases: list[Granted] = []
        self.tasks: dict[tuple[str, str], asyncio.Task[Granted | Held | StoreFull]] = {}
        self.versions: dict[str, int] = {}
        self.number = 0

    async def step(self) -> None:
        steps = [self.apply] * 12 + [self.wait] * 3 + [self.go] * 2 + [self.pass_time] * 4
        await self.chance.choice([*steps, self.force, self.sweep, self.restart])()
        for name in ("a", "b", "c"):
            seen = await self.place.store.get(name)
            self.model.check(seen)
            assert seen.version >= self.versions.get(name, 0)
            self.versions[name] = seen.version

    def acquire(self) -> Acquire:
        self.number += 1
        name = self.chance.choice("abc")
        key = self.chance.choice([None, f"key-{name}", f"key-{self.number}"])
        owner = self.chance.choice(["alice", "bob", f"owner-{self.number}"])
        return Acquire(name, owner, self.ttl_ms(), key)

    def ttl_ms(self) -> int:
        return self.chance.choice([150_000, 350_000, 5_950_000])  # half a step of time is left for a slow machine

    def operation(self) -> Operation:
        kind = self.chance.randrange(4)
        if kind < 2 or not self.leases:
            return self.acquire()
        lease = self.chance.choice(self.leases[-6:])
        if self.chance.random() < 0.2:
            lease = msgspec.structs.replace(lease, fencing_token=lease.fencing_token + self.chance.choice([-1, 1]))
        return renew_of(lease, self.ttl_ms()) if kind == 2 else release_of(lease)

    async def apply(self) -> None:
        operations = [self.operation() for _ in range(self.chance.choice([1, 1, 1, 2, 4]))]
        outcomes = await self.place.store.submit(operations)
        self.leases += [outcome for outcome in outcomes if isinstance(outcome, Granted)]
        await self.granted(self.model.apply(operations, outcomes))

    async def granted(self, turns: dict[str, Acquire]) -> None:
        """Those whose turn it is by the model have been granted the lock by the store."""
        for name, acquire in turns.items():
            lease = await answer(self.tasks.pop((name, acquire.owner_id)))
            self.model.grant(acquire, lease)
            self.leases.append(lease)

    async def wait(self) -> None:
        # No key, and an owner of its own: what two with one key are given has a test of its own.
        acquire = msgspec.structs.replace(self.acquire(), owner_id=f"waiter-{self.number}", idempotency_key=None)
        task = waiting(self.place.store, acquire, wait_ms=6_000_000)
        if self.model.good(acquire.lock_name):
            self.model.lock(acquire.lock_name).line.append(acquire)
            self.tasks[acquire.lock_name, acquire.owner_id] = task
            await until_waiting(self.place.store, acquire.lock_name, len(self.model.lock(acquire.lock_name).line))
        else:
            lease = await answer(task)
            self.model.grant(acquire, lease)
            self.leases.append(lease)

    async def go(self) -> None:
        if self.tasks:
            name, owner_id = self.chance.choice(sorted(self.tasks))
            task = self.tasks.pop((name, owner_id))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            line = self.model.lock(name).line
            line[:] = [acquire for acquire in line if acquire.owner_id != owner_id]
            await until_waiting(self.place.store, name, len(line))

    async def pass_time(self) -> None:
        passed_ms = self.chance.choice([100_000, 200_000])
        await self.place.pass_ms(passed_ms)
        await self.granted(self.model.passed(passed_ms))

    async def force(self) -> None:
        name = self.chance.choice("abc")
        was = (await self.place.store.break_lock(name, "admin")).was
        assert was.held == self.model.good(name)
        self.model.free(name)
        await self.granted(self.model.serve({name}))

    async def sweep(self) -> None:
        swept = await self.place.store.sweep()
        assert (swept.expired, swept.held) == self.model.swept()

    async def restart(self) -> None:
        if not self.tasks:
            await self.place.reopen()
            self.model.restarted(extends_leases=self.place.restart_extends_leases)

    async def end(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


@pytest.mark.parametrize("seed", range(count(8, 200)))
async def test_whatever_happens_is_what_the_model_says(place: Place, seed: int) -> None:
    story = Story(place, seed)
    try:
        for _ in range(150):
            await story.step()
    finally:
        await story.end()
