"""The client against a real lock server: what each method does, for asyncio and for threads."""

import asyncio
import contextlib
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pgleaderlock.client import (
    Acquire,
    AsyncLease,
    AsyncLockClient,
    Lease,
    LeaseLost,
    LeaseState,
    LockClient,
    LockHeld,
    LockServerRefused,
    LockServerUnreachable,
    Release,
    Renew,
    _flows,
)
from pgleaderlock.errors import ConfigurationError
from support.lockserver import LockServerProcess, certificate, lock_server
from support.program import PATIENCE_S


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockServerProcess]:
    """One for this module: each test uses names of its own."""
    with lock_server(tmp_path_factory.mktemp("locks"), tokens=True) as running:
        yield running


@pytest.fixture
async def client(server: LockServerProcess) -> AsyncIterator[AsyncLockClient]:
    async with AsyncLockClient(server.url, token=server.token) as opened:
        yield opened


@pytest.fixture
async def admin(server: LockServerProcess) -> AsyncIterator[AsyncLockClient]:
    async with AsyncLockClient(server.url, token=server.admin_token) as opened:
        yield opened


@pytest.fixture
def blocking(server: LockServerProcess) -> Iterator[LockClient]:
    with LockClient(server.url, token=server.token) as opened:
        yield opened


@pytest.fixture
def name() -> str:
    return f"job/{uuid.uuid4().hex}"


def patience() -> asyncio.Timeout:
    return asyncio.timeout(PATIENCE_S)


# -- one operation after the other ------------------------------------------------------------------------------------


async def test_a_lease_excludes_others_until_it_is_released(client: AsyncLockClient, name: str) -> None:
    lease = await client.acquire(name, 30.0)
    assert lease.valid
    with pytest.raises(LockHeld) as no:
        await client.acquire(name, 30.0)
    assert no.value.current_owner_id == client.owner_id
    assert no.value.recommended_retry_s > 0
    assert await client.release(lease) is True
    assert not lease.valid
    following = await client.acquire(name, 30.0)
    assert following.fencing_token > lease.fencing_token


async def test_releasing_twice_or_after_the_end_is_no_error(client: AsyncLockClient, name: str) -> None:
    lease = await client.acquire(name, 30.0)
    assert await client.release(lease) is True
    assert await client.release(lease) is False
    short = await client.acquire(name, 1.0)
    assert await short.wait_lost() is True
    await client.release(short)
    successor = await client.acquire(name, 30.0, wait_s=5.0)
    await client.release(short)
    assert (await client.get(name)).held, "a stale release has freed somebody else's lock"
    assert successor.valid


async def test_a_lease_knows_its_own_end_without_a_heartbeat(client: AsyncLockClient, name: str) -> None:
    lease = await client.acquire(name, 1.0)
    async with patience():
        assert await lease.wait_lost() is True
    assert lease.lost.is_set()
    assert lease.loss().reason == "deadline"
    with pytest.raises(LeaseLost):
        await client.renew(lease)


async def test_renewing_keeps_a_lease_and_can_change_its_length(client: AsyncLockClient, name: str) -> None:
    lease = await client.acquire(name, 5.0)
    await client.renew(lease, 60.0)
    assert 50 < lease.remaining_s <= 60
    await client.renew(lease, 10.0)
    assert lease.remaining_s <= 10


async def test_a_waiting_acquire_gets_the_lock_when_it_is_released(client: AsyncLockClient, name: str) -> None:
    first = await client.acquire(name, 60.0)
    waiting = asyncio.create_task(client.acquire(name, 5.0, wait_s=PATIENCE_S))
    await until_waiting(client, name)
    await client.release(first)
    async with patience():
        second = await waiting
    assert second.valid
    assert second.fencing_token > first.fencing_token


async def test_who_waited_longer_than_its_ttl_gets_a_lease_that_is_still_good(
    client: AsyncLockClient, name: str
) -> None:
    await client.acquire(name, 3.0)  # never renewed: the waiter gets it when it runs out
    async with patience():
        lease = await client.acquire(name, 2.0, wait_s=PATIENCE_S)
    assert lease.valid
    await client.renew(lease)


async def until_waiting(client: AsyncLockClient, name: str, waiters: int = 1) -> None:
    """Nothing tells when a waiter has arrived: asked again and again."""
    async with patience():
        while (await client.get(name)).waiters != waiters:
            await asyncio.sleep(0.01)


async def test_acquire_with_retry_comes_back_until_the_lock_is_free(client: AsyncLockClient, name: str) -> None:
    await client.acquire(name, 0.3)
    async with patience():
        lease = await client.acquire_with_retry(name, 30.0, max_retries=100, max_total_wait_s=PATIENCE_S)
    assert lease.valid


async def test_acquire_with_retry_gives_up_and_says_who_has_it(client: AsyncLockClient, name: str) -> None:
    await client.acquire(name, 30.0)
    with pytest.raises(LockHeld, match=client.owner_id):
        await client.acquire_with_retry(name, 30.0, max_retries=0)


async def test_a_lock_shows_who_holds_it_and_a_list_goes_through_all_pages(
    client: AsyncLockClient, admin: AsyncLockClient, name: str
) -> None:
    leases = [await client.acquire(f"{name}/{number:02}", 30.0) for number in range(7)]
    found = [info async for info in client.list_locks(f"{name}/", page_size=3)]
    assert [info.lock_name for info in found] == [lease.lock_name for lease in leases]
    assert {info.owner_id for info in found} == {client.owner_id}
    assert (await client.get(leases[0].lock_name)).lease_id is None
    assert (await admin.get(leases[0].lock_name)).lease_id == leases[0].lease_id
    unknown = await client.get(f"{name}/never")
    assert (unknown.held, unknown.fencing_token) == (False, 0)


async def test_a_broken_lock_is_lost_by_its_holder_and_free_for_others(
    client: AsyncLockClient, admin: AsyncLockClient, name: str
) -> None:
    lease = await client.acquire(name, 60.0)
    was = await admin.break_lock(name)
    assert (was.held, was.fencing_token) == (True, lease.fencing_token)
    with pytest.raises(LeaseLost) as lost:
        await client.renew(lease)
    assert lost.value.reason == "not_owner"
    assert lease.lost.is_set()
    assert (await client.acquire(name, 5.0)).fencing_token > lease.fencing_token


async def test_names_of_any_kind_arrive_as_they_are(client: AsyncLockClient, name: str) -> None:
    for each in (f"{name}/ä ö%2F?#&=+", f"{name}/日本", f"{name}/a/../b", f"{name}/%"):
        lease = await client.acquire(each, 5.0)
        assert (await client.get(each)).lock_name == each == lease.lock_name
        assert await client.release(lease)


async def test_a_batch_does_many_things_in_one_call(client: AsyncLockClient, name: str) -> None:
    got = await client.batch([Acquire(f"{name}/1", 20.0), Acquire(f"{name}/2", 20.0), Acquire(f"{name}/1", 20.0)])
    first, second, no = got
    assert isinstance(first, AsyncLease)
    assert isinstance(second, AsyncLease)
    assert isinstance(no, LockHeld)
    before = first.deadline
    assert await client.batch([Renew(first), Release(second), Release(second)]) == [True, True, False]
    assert first.deadline > before
    assert second.state is LeaseState.RELEASED
    with pytest.raises(ConfigurationError):
        await client.batch([])


async def test_a_refusal_says_why(server: LockServerProcess, name: str) -> None:
    async with AsyncLockClient(server.url, token="not-a-token-of-this-server") as stranger:
        with pytest.raises(LockServerRefused, match="token") as no:
            await stranger.acquire(name)
        assert no.value.status == 401
    async with AsyncLockClient(server.url, token=server.prefix_token) as team:
        with pytest.raises(LockServerRefused) as no:
            await team.acquire(name)
        assert no.value.status == 403
        assert (await team.acquire(f"team/{name}", 5.0)).valid


async def test_nobody_at_home_is_said_in_bounded_time(name: str) -> None:
    async with AsyncLockClient(["http://127.0.0.1:1", "http://127.0.0.1:2"]) as client, patience():
        with pytest.raises(LockServerUnreachable, match="cannot connect"):
            await client.acquire(name)


async def test_the_next_address_is_taken_when_one_is_dead(server: LockServerProcess, name: str) -> None:
    async with AsyncLockClient(["http://127.0.0.1:1", server.url], token=server.token) as client:
        lease = await client.acquire(name, 5.0)
        assert await client.release(lease)


# -- the heartbeat and the block --------------------------------------------------------------------------------------


async def test_a_heartbeat_keeps_a_lease_far_beyond_its_ttl(client: AsyncLockClient, name: str) -> None:
    lease = await client.acquire(name, 1.5)
    client.start_heartbeat(lease, 0.2)
    rival = asyncio.create_task(client.acquire(name, 5.0, wait_s=4.0))
    with pytest.raises(LockHeld):  # who waits for two of its ttls does not get it
        await rival
    assert lease.valid
    assert await client.release(lease)


async def test_a_heartbeat_that_is_stopped_lets_the_lease_end(client: AsyncLockClient, name: str) -> None:
    lease = await client.acquire(name, 0.4)
    client.start_heartbeat(lease).stop()
    async with patience():
        assert await lease.wait_lost() is True


async def test_a_lease_lost_by_break_cancels_the_body_and_raises_lease_lost(
    client: AsyncLockClient, admin: AsyncLockClient, name: str
) -> None:
    inside = asyncio.Event()
    seen: list[str] = []

    async def work() -> None:
        async with client.lock(name, 60.0, interval_s=0.05):
            inside.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

    working = asyncio.create_task(work())
    await inside.wait()
    await admin.break_lock(name)
    # Waited for from outside: a timeout here must not be what cancels the body.
    done, _ = await asyncio.wait({working}, timeout=PATIENCE_S)
    assert done, "the body went on without its lease"
    with pytest.raises(LeaseLost) as lost:
        await working
    assert lost.value.reason == "not_owner"
    assert seen == ["cancelled"]
    assert not working.cancelled()


async def test_a_task_is_as_uncancelled_after_a_lost_lease_as_before(
    client: AsyncLockClient, admin: AsyncLockClient, name: str
) -> None:
    task = asyncio.current_task()
    assert task is not None

    async def work() -> None:
        async with client.lock(name, 60.0, interval_s=0.05), patience():
            await admin.break_lock(name)
            await asyncio.Event().wait()

    with pytest.raises(LeaseLost):
        await work()
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_a_body_that_finds_the_loss_itself_is_told_by_what_it_called(
    client: AsyncLockClient, admin: AsyncLockClient, name: str
) -> None:
    task = asyncio.current_task()
    assert task is not None

    async def work() -> None:
        async with client.lock(name, 60.0) as lease:
            await admin.break_lock(name)
            await client.renew(lease)
            pytest.fail("a renewal of a broken lease was acknowledged")

    with pytest.raises(LeaseLost):
        await work()
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # a cancellation that was left behind would show here


async def test_a_body_that_swallows_its_cancellation_is_told_at_its_end(
    client: AsyncLockClient, admin: AsyncLockClient, name: str
) -> None:
    async def work() -> None:
        async with client.lock(name, 60.0, interval_s=0.05):
            await admin.break_lock(name)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(PATIENCE_S)

    with pytest.raises(LeaseLost):
        await work()


async def test_a_cancellation_from_outside_stays_one_and_the_lock_is_released(
    client: AsyncLockClient, name: str
) -> None:
    inside = asyncio.Event()

    async def work() -> None:
        async with client.lock(name, 60.0):
            inside.set()
            await asyncio.Event().wait()

    working = asyncio.create_task(work())
    await inside.wait()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert not (await client.get(name)).held


async def test_the_block_releases_at_its_end_and_lets_its_own_errors_through(
    client: AsyncLockClient, name: str
) -> None:
    async with client.lock(name, 60.0) as lease:
        assert (await client.get(name)).fencing_token == lease.fencing_token
    assert not (await client.get(name)).held
    with pytest.raises(ZeroDivisionError):
        async with client.lock(name, 60.0):
            raise ZeroDivisionError
    assert not (await client.get(name)).held


async def test_work_that_ends_on_a_lease_that_was_gone_is_told(
    client: AsyncLockClient, admin: AsyncLockClient, name: str
) -> None:
    with pytest.raises(LeaseLost):
        async with client.lock(name, 60.0):  # its next heartbeat is far away
            await admin.break_lock(name)


async def test_an_interval_that_does_not_fit_leaves_nothing_held(client: AsyncLockClient, name: str) -> None:
    with pytest.raises(ConfigurationError):
        async with client.lock(name, 5.0, interval_s=6.0):
            pytest.fail("not reached")
    lease = await client.acquire(name, 5.0, wait_s=PATIENCE_S)
    assert lease.valid


async def test_many_leases_of_one_client_are_renewed_in_few_calls(
    client: AsyncLockClient, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    renew_together = _flows.renew_together

    def counting(core, plan, renewals):  # type: ignore[no-untyped-def]
        calls.append(len(renewals))
        return renew_together(core, plan, renewals)

    monkeypatch.setattr(_flows, "renew_together", counting)
    got = []
    for start in range(0, 1000, 500):
        got += await client.batch([Acquire(f"{name}/{n}", 20.0) for n in range(start, start + 500)])
    leases = [lease for lease in got if isinstance(lease, AsyncLease)]
    assert len(leases) == 1000
    before = [lease.deadline for lease in leases]
    for lease in leases:
        client.start_heartbeat(lease, 0.2)
    async with patience():
        while not all(lease.deadline > old for lease, old in zip(leases, before, strict=True)):
            await asyncio.sleep(0.01)
    assert sum(calls[:4]) >= 1000, "two calls; on a busy machine not all of them are due at the same moment"
    assert all(lease.valid for lease in leases)


# -- cancelled at any moment ------------------------------------------------------------------------------------------


async def test_an_acquire_cancelled_at_any_moment_leaves_nothing_held(server: LockServerProcess, name: str) -> None:
    """Each round lets the event loop turn once more before it cancels, and the later ones wait a little longer: so it
    goes through every await of an acquire, from before the send to after the reply."""
    async with AsyncLockClient(server.url, token=server.token) as client:
        for turns in range(60):
            task = asyncio.create_task(client.acquire(f"{name}/{turns}", 60.0))
            for _ in range(turns):
                await asyncio.sleep(0)
            if turns > 30:
                await asyncio.sleep((turns - 30) / 10_000)
            task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(outcome, AsyncLease):
                await client.release(outcome)
        while client._background:
            await asyncio.wait(client._background)
        tokens = [(await client.get(f"{name}/{turns}")) for turns in range(60)]
    assert any(info.fencing_token > 0 for info in tokens), "no round came as far as the server"
    assert [info.lock_name for info in tokens if info.held] == []


async def test_a_waiting_acquire_that_is_cancelled_stands_in_nobodys_way(client: AsyncLockClient, name: str) -> None:
    first = await client.acquire(name, 60.0)
    gone = asyncio.create_task(client.acquire(name, 60.0, wait_s=60.0))
    await until_waiting(client, name)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    await until_waiting(client, name, 0)
    await client.release(first)
    async with patience():
        assert (await client.acquire(name, 5.0, wait_s=PATIENCE_S)).valid


async def test_waiting_for_locks_never_keeps_renewals_and_releases_waiting(
    server: LockServerProcess, name: str
) -> None:
    async with AsyncLockClient(server.url, token=server.token, connections_max=4) as client, patience():
        lease = await client.acquire(name, 60.0)
        waiting = [asyncio.create_task(client.acquire(name, 60.0, wait_s=60.0)) for _ in range(8)]
        await until_waiting(client, name, 2)  # two of its four connections may wait
        await client.renew(lease)
        assert await client.release(lease)
        first, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert first.pop().result().valid
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


# -- for threads ------------------------------------------------------------------------------------------------------


def test_the_blocking_client_does_the_same(blocking: LockClient, name: str) -> None:
    lease = blocking.acquire(name, 30.0)
    with pytest.raises(LockHeld):
        blocking.acquire(name, 30.0)
    blocking.renew(lease, 60.0)
    assert lease.remaining_s > 50
    assert blocking.get(name).held
    assert [info.lock_name for info in blocking.list_locks(name)] == [name]
    assert blocking.release(lease) is True
    assert blocking.release(lease) is False
    got = blocking.batch([Acquire(f"{name}/1"), Acquire(f"{name}/1")])
    assert isinstance(got[0], Lease)
    assert isinstance(got[1], LockHeld)
    with pytest.raises(LockServerRefused):
        blocking.break_lock(name)  # its token is no admin's


def test_a_blocked_thread_gets_the_lock_when_another_one_releases_it(blocking: LockClient, name: str) -> None:
    first = blocking.acquire(name, 60.0)
    got: list[Lease] = []
    thread = threading.Thread(target=lambda: got.append(blocking.acquire(name, 5.0, wait_s=PATIENCE_S)))
    thread.start()
    blocking.release(first)
    thread.join(PATIENCE_S)
    assert [lease.valid for lease in got] == [True]
    assert got[0].fencing_token > first.fencing_token


def test_a_heartbeat_thread_keeps_a_lease_and_tells_of_its_loss(
    server: LockServerProcess, blocking: LockClient, name: str
) -> None:
    def work(admin: LockClient) -> None:
        with blocking.lock(name, 1.5, interval_s=0.2) as lease:
            with pytest.raises(LockHeld):
                admin.acquire(name, 5.0, wait_s=3.0)
            lease.raise_if_lost()
            admin.break_lock(name)
            assert lease.lost.wait(PATIENCE_S)
            lease.raise_if_lost()

    with LockClient(server.url, token=server.admin_token) as admin, pytest.raises(LeaseLost) as lost:
        work(admin)
    assert lost.value.reason == "not_owner"


def test_the_blocking_block_releases_and_raises_what_its_body_raises(blocking: LockClient, name: str) -> None:
    with blocking.lock(name, 60.0):
        assert blocking.get(name).held
    assert not blocking.get(name).held
    with pytest.raises(ZeroDivisionError), blocking.lock(name, 60.0):
        raise ZeroDivisionError
    assert not blocking.get(name).held


def test_a_late_heartbeat_thread_after_release_reports_no_loss(blocking: LockClient, name: str) -> None:
    for number in range(20):
        lease = blocking.acquire(f"{name}/{number}", 5.0)
        blocking.start_heartbeat(lease, 0.001)
        assert blocking.release(lease)
        assert not lease.lost.is_set()
        assert lease.state is LeaseState.RELEASED


def test_both_kinds_of_clients_exclude_each_other(server: LockServerProcess, blocking: LockClient, name: str) -> None:
    blocking.acquire(name, 30.0)

    async def other() -> None:
        async with AsyncLockClient(server.url, token=server.token) as client:
            with pytest.raises(LockHeld):
                await client.acquire(name, 5.0)

    asyncio.run(other())


def test_tls_is_spoken_to_https_addresses(tmp_path: Path, name: str) -> None:
    import ssl

    cert, key = certificate(tmp_path, "served")
    with lock_server(tmp_path, "--tls-cert", str(cert), "--tls-key", str(key)) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(cert))
        with LockClient(server.url, ssl_context=context) as client, client.lock(name, 5.0) as lease:
            client.renew(lease)

        async def other() -> None:
            async with AsyncLockClient(server.url, ssl_context=context) as client:
                assert (await client.acquire(name, 5.0)).valid
            async with AsyncLockClient(server.url) as client:
                with pytest.raises(LockServerUnreachable, match="certificate"):
                    await client.get(name)

        asyncio.run(other())
