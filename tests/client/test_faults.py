"""The client when the network and the server fail: lost replies, cuts, freezes, kills."""

import asyncio
import contextlib
import os
import select
import signal
import socket
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import StartServer
from pgleaderlock.client import (
    AsyncLease,
    AsyncLockClient,
    LeaseLost,
    LeaseState,
    LockClient,
    LockHeld,
    LockServerError,
    LockServerUnreachable,
    Release,
)
from pgleaderlock.client import _flows as flows
from support.counts import count
from support.fakes import captured_log
from support.lockserver import LockServerProcess, lock_server, postgres_url, until
from support.program import PATIENCE_S, command
from support.proxy import Proxy

SHORT_TTL_S = 3.0
"""A lease that is to be lost to time. Shorter ones have ended before a busy machine has delivered their grant."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockServerProcess]:
    """One for this module, never harmed; those that are have a server of their own."""
    with lock_server(tmp_path_factory.mktemp("locks")) as running:
        yield running


# --- Servers that do not share a store


def test_a_client_that_was_answered_by_one_store_refuses_another_and_says_why(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with lock_server(tmp_path / "two") as two:
        with lock_server(tmp_path / "one") as one:
            client = LockClient([one.url, two.url], owner_id="me")
            client.acquire("job", ttl_s=60)
        with (
            captured_log() as records,
            pytest.raises(LockServerUnreachable, match=f"{two.url} has another store.*share a PostgreSQL store"),
        ):
            client.acquire("other", ttl_s=60)
        said = [record.getMessage().split()[0] for record in records]
        assert said.count("another_store") == 1, said
        with LockClient(two.url) as direct:
            assert direct.get("other").fencing_token == 0  # nothing was done there
        with lock_server(tmp_path / "one", port=one.port):
            assert client.acquire("other", ttl_s=60).fencing_token > 0
            client.close()


def test_servers_that_share_a_store_are_one_to_a_client(tmp_path: Path, dsn: str, name: str) -> None:
    shared = postgres_url(dsn)
    with lock_server(tmp_path, store=shared) as two, LockClient([two.url]) as direct:
        with lock_server(tmp_path, store=shared) as one:
            client = LockClient([one.url, two.url], owner_id="me")
            first = client.acquire(name, ttl_s=60)
        with pytest.raises(LockHeld):
            direct.acquire(name, ttl_s=60)
        assert client.release(first)
        assert client.acquire(name, ttl_s=60).fencing_token == first.fencing_token + 1
        client.close()


@pytest.fixture
async def direct(server: LockServerProcess) -> AsyncIterator[AsyncLockClient]:
    """Past the proxy: to look, and to play somebody else."""
    async with AsyncLockClient(server.url, owner_id="somebody else") as opened:
        yield opened


@pytest.fixture
async def proxy(server: LockServerProcess) -> AsyncIterator[Proxy]:
    async with Proxy(server.host, server.port) as running:
        yield running


@pytest.fixture
async def client(proxy: Proxy) -> AsyncIterator[AsyncLockClient]:
    """Through the proxy."""
    async with AsyncLockClient(f"http://127.0.0.1:{proxy.port}", owner_id="me") as opened:
        yield opened
        proxy.heal()


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


def patience() -> asyncio.Timeout:
    return asyncio.timeout(PATIENCE_S)


async def until_held(client: AsyncLockClient, name: str, *, held: bool = True) -> None:
    """Nothing signals what a server has done whose reply is lost: it is asked again and again."""
    async with patience():
        while (await client.get(name)).held is not held:
            await asyncio.sleep(0.002)


# -- lost replies -----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
async def test_an_acquire_whose_reply_is_dropped_is_granted_exactly_once(
    client: AsyncLockClient, direct: AsyncLockClient, proxy: Proxy, name: str
) -> None:
    for number in range(count(50, 1000)):
        lock = f"{name}/{number}"
        proxy.drop_replies()
        acquiring = asyncio.create_task(client.acquire(lock, 60.0))
        await until_held(direct, lock)  # the server has granted it, and its reply is lost
        proxy.heal()
        proxy.reset()
        async with patience():
            lease = await acquiring
        seen = await direct.get(lock)
        assert (lease.fencing_token, seen.fencing_token) == (1, 1), "it was granted twice"
        assert lease.valid
        assert await client.release(lease) is True
        assert (await direct.acquire(lock, 60.0)).fencing_token == 2


async def test_a_retry_after_a_lost_reply_counts_from_its_grant_and_not_from_the_last_send(
    client: AsyncLockClient, direct: AsyncLockClient, proxy: Proxy, name: str
) -> None:
    proxy.drop_replies()
    clock = client._core.clock
    before = clock.now()
    acquiring = asyncio.create_task(client.acquire(name, 60.0))
    await until_held(direct, name)
    granted = clock.now()
    proxy.heal()
    proxy.reset()
    lease = await acquiring
    counted_from = lease.deadline - 60.0 + 0.602
    assert counted_from < granted, "counted from the send whose reply came"
    # The server says in whole milliseconds what was left when the last send had arrived.
    assert counted_from > before - 0.0011 - (clock.now() - granted), "less than the server said"


async def test_a_waiting_acquire_whose_connection_breaks_does_not_wait_for_itself(
    client: AsyncLockClient, direct: AsyncLockClient, proxy: Proxy, name: str
) -> None:
    first = await direct.acquire(name, 60.0)
    waiting = asyncio.create_task(client.acquire(name, 60.0, wait_s=PATIENCE_S))
    async with patience():
        while (await direct.get(name)).waiters == 0:
            await asyncio.sleep(0.002)
        proxy.drop_replies()
        await direct.release(first)
        await until_held(direct, name)  # granted to the waiter, and the reply is lost
        proxy.heal()
        proxy.reset()
        lease = await waiting
    assert lease.valid
    assert lease.fencing_token == first.fencing_token + 1


async def test_a_renewal_whose_reply_is_lost_is_no_loss(
    client: AsyncLockClient, direct: AsyncLockClient, proxy: Proxy, name: str
) -> None:
    async with client.lock(name, 3.0, interval_s=0.1) as lease, patience():
        for _ in range(3):
            version = (await direct.get(name)).version
            proxy.drop_replies()
            while (await direct.get(name)).version == version:  # the server has renewed
                await asyncio.sleep(0.005)
            proxy.heal()
            proxy.reset()
            before = lease.deadline
            while lease.deadline == before:
                await asyncio.sleep(0.005)
    assert lease.state is LeaseState.RELEASED


async def test_a_release_whose_reply_is_lost_has_released(
    client: AsyncLockClient, direct: AsyncLockClient, proxy: Proxy, name: str
) -> None:
    lease = await client.acquire(name, 60.0)
    proxy.drop_replies()
    releasing = asyncio.create_task(client.release(lease))
    await until_held(direct, name, held=False)
    proxy.heal()
    proxy.reset()
    assert await releasing is True


async def test_a_connection_whose_answer_is_unknown_is_closed_and_not_used_again(
    direct: AsyncLockClient, proxy: Proxy, name: str
) -> None:
    async with AsyncLockClient(f"http://127.0.0.1:{proxy.port}", request_timeout_s=0.1) as hasty:
        await hasty.get(name)
        assert proxy.open == 1
        proxy.drop_replies()
        with pytest.raises(LockServerUnreachable, match=r"no response within 0\.1 s"):
            await hasty.get(name)
        await proxy.until(lambda p: p.open == 0)
        proxy.heal()
        await hasty.get(name)


async def test_a_kept_connection_that_was_closed_meanwhile_is_replaced_without_a_word(
    client: AsyncLockClient, proxy: Proxy, name: str
) -> None:
    for end in (proxy.reset, proxy.half_close, proxy.reset):
        lease = await client.acquire(name, 60.0)
        end()
        assert await client.release(lease) is True


async def test_an_acquire_that_is_cancelled_after_its_grant_was_lost_gives_it_back(
    client: AsyncLockClient, direct: AsyncLockClient, proxy: Proxy, name: str
) -> None:
    proxy.drop_replies()
    acquiring = asyncio.create_task(client.acquire(name, 60.0))
    await until_held(direct, name)
    acquiring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acquiring
    proxy.heal()
    await until_held(direct, name, held=False)


async def test_a_release_that_is_cancelled_before_it_arrived_still_happens(
    client: AsyncLockClient, direct: AsyncLockClient, proxy: Proxy, name: str
) -> None:
    lease = await client.acquire(name, 60.0)
    proxy.cut()
    releasing = asyncio.create_task(client.release(lease))
    await asyncio.sleep(0)
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    assert lease.state is LeaseState.RELEASED
    proxy.reset()  # what was on its way is lost
    proxy.heal()
    await until_held(direct, name, held=False)


async def test_an_acquire_that_had_no_answer_in_time_gives_back_what_it_may_have_got(
    direct: AsyncLockClient, proxy: Proxy, name: str
) -> None:
    async with AsyncLockClient(f"http://127.0.0.1:{proxy.port}", request_timeout_s=0.2) as hasty:
        proxy.drop_replies()
        with pytest.raises(LockServerUnreachable):
            await hasty.acquire(name, 60.0)
        assert (await direct.get(name)).held
        proxy.heal()
        await until_held(direct, name, held=False)


# -- silence ----------------------------------------------------------------------------------------------------------


async def test_a_cut_network_loses_the_lease_at_its_own_deadline_and_cancels_the_body(
    client: AsyncLockClient, proxy: Proxy, name: str
) -> None:
    clock = client._core.clock

    async def work() -> None:
        async with client.lock(name, 0.6) as lease, patience():
            proxy.cut()
            try:
                await asyncio.Event().wait()
            finally:
                assert clock.now() >= lease.deadline, "it was given up before its deadline"
                assert not lease.valid
                proxy.heal()

    with pytest.raises(LeaseLost) as lost:
        await work()
    assert lost.value.reason == "deadline"


@contextlib.contextmanager
def frozen(server: LockServerProcess) -> Iterator[None]:
    server.program.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.program.signal(signal.SIGCONT)


async def test_a_frozen_server_lets_the_heartbeats_own_deadline_fire(tmp_path: Path, name: str) -> None:
    with lock_server(tmp_path) as own:
        async with AsyncLockClient(own.url) as client:
            lease = await client.acquire(name, SHORT_TTL_S)
            client.start_heartbeat(lease)
            with frozen(own):
                async with patience():
                    assert await lease.wait_lost() is True
            assert lease.loss().reason == "deadline"
            assert isinstance(lease.loss().__cause__, LockServerUnreachable)


def test_a_frozen_server_lets_the_deadline_of_the_heartbeat_thread_fire(tmp_path: Path, name: str) -> None:
    def work(client: LockClient, own: LockServerProcess) -> None:
        with client.lock(name, 0.6) as lease, frozen(own):
            assert lease.lost.wait(PATIENCE_S)
            assert not lease.valid

    with lock_server(tmp_path) as own, LockClient(own.url, request_timeout_s=60.0) as client:
        with pytest.raises(LeaseLost) as lost:
            work(client, own)
        assert lost.value.reason == "deadline"


async def test_a_silent_server_does_not_hold_up_the_news_of_a_loss(tmp_path: Path, name: str) -> None:
    """Its release would wait for the server, far longer than the test's patience."""
    inside, blocking_inside = asyncio.Event(), threading.Event()

    async def work(client: AsyncLockClient) -> None:
        async with client.lock(name, SHORT_TTL_S):
            inside.set()
            await asyncio.Event().wait()

    def blocking_work(client: LockClient) -> None:
        with client.lock(f"{name}/2", SHORT_TTL_S) as lease:
            blocking_inside.set()
            lease.lost.wait(PATIENCE_S)

    with lock_server(tmp_path) as own, LockClient(own.url, request_timeout_s=300.0) as blocking:
        async with AsyncLockClient(own.url, request_timeout_s=300.0) as client:
            await client.get(name)
            both = [
                asyncio.create_task(work(client)),
                asyncio.create_task(asyncio.to_thread(blocking_work, blocking)),
            ]
            # Not merely held at the server: a grant whose reply is still on its way is no lease yet.
            async with asyncio.timeout(PATIENCE_S):
                await inside.wait()
            assert await asyncio.to_thread(blocking_inside.wait, PATIENCE_S)
            with frozen(own):
                done, _ = await asyncio.wait(both, timeout=PATIENCE_S)
            assert len(done) == 2
            for task in both:
                with pytest.raises(LeaseLost):
                    await task


@contextlib.contextmanager
def unreachable() -> Iterator[str]:
    """An address where a connect hangs: a listener whose queue is full, so that the kernel answers nobody."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            filling = stack.enter_context(socket.socket())
            filling.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filling.connect(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_a_server_that_cannot_be_reached_leaves_a_heartbeat_time_for_the_next_one(
    server: LockServerProcess, name: str
) -> None:
    with unreachable() as nowhere:
        async with AsyncLockClient([nowhere, server.url], connect_timeout_s=30.0, request_timeout_s=0.5) as client:
            lease = await client.acquire(name, 2.0)
            client._core._turn = 0  # the one that cannot be reached is asked again
            client.start_heartbeat(lease)
            before = lease.deadline
            async with patience():
                while lease.deadline == before and not lease.lost.is_set():
                    await asyncio.sleep(0.01)
            assert lease.valid
            assert client._core.endpoint.port == server.port
        with LockClient([nowhere, server.url], connect_timeout_s=30.0, request_timeout_s=0.5) as blocking:
            held = await asyncio.to_thread(blocking.acquire, f"{name}/2", 2.0)
            assert held.valid


async def test_a_short_silence_costs_nothing(client: AsyncLockClient, proxy: Proxy, name: str) -> None:
    async with client.lock(name, 3.0, interval_s=0.1) as lease:
        for _ in range(3):
            proxy.cut()
            accepted = proxy.accepted
            sent = proxy.bytes_to_server
            await asyncio.sleep(0.3)  # a silence is a length of time: at least one heartbeat falls into it
            assert (proxy.accepted, proxy.bytes_to_server) == (accepted, sent)
            before = lease.deadline
            proxy.heal()
            async with patience():
                while lease.deadline == before:
                    await asyncio.sleep(0.005)
    assert lease.state is LeaseState.RELEASED


# -- servers that die -------------------------------------------------------------------------------------------------


async def test_a_server_that_is_killed_and_started_again_keeps_leases_and_their_heartbeats(
    tmp_path: Path, name: str
) -> None:
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(lock_server(tmp_path))
        async with AsyncLockClient(own.url) as client, client.lock(name, 20.0, interval_s=0.1) as lease:
            own.program.process.kill()
            own.program.process.wait(PATIENCE_S)
            stack.enter_context(lock_server(tmp_path, port=own.port))
            with pytest.raises(LockHeld):  # what was granted stays granted
                await client.acquire(name, 5.0)
            before = lease.deadline
            async with patience():
                while lease.deadline == before:
                    await asyncio.sleep(0.01)
        async with AsyncLockClient(own.url) as client:
            assert (await client.acquire(name, 5.0)).fencing_token > lease.fencing_token


async def test_the_death_of_one_of_two_servers_is_not_noticed_by_those_who_hold_leases(
    tmp_path: Path, name: str, throwaway_postgres: StartServer
) -> None:
    dsn = throwaway_postgres().dsn
    assert command("migrate", "--dsn", dsn).code == 0
    store = postgres_url(dsn)
    with contextlib.ExitStack() as stack:
        one, two = (stack.enter_context(lock_server(tmp_path, store=store)) for _ in range(2))
        async with AsyncLockClient([one.url, two.url]) as client, client.lock(name, 20.0, interval_s=0.1) as lease:
            await client.renew(lease)
            one.program.process.kill()
            one.program.process.wait(PATIENCE_S)
            before = lease.deadline
            async with patience():
                while lease.deadline == before:
                    await asyncio.sleep(0.01)
                another = await client.acquire(f"{name}/2", 5.0)
            assert another.valid
        assert lease.state is LeaseState.RELEASED


# -- for threads ------------------------------------------------------------------------------------------------------


async def test_the_blocking_client_retries_a_lost_reply_with_the_same_key(
    direct: AsyncLockClient, proxy: Proxy, name: str
) -> None:
    with LockClient(f"http://127.0.0.1:{proxy.port}") as client:
        for number in range(10):
            lock = f"{name}/{number}"
            proxy.drop_replies()
            acquiring = asyncio.create_task(asyncio.to_thread(client.acquire, lock, 60.0))
            await until_held(direct, lock)
            proxy.heal()
            proxy.reset()
            lease = await acquiring
            assert (lease.fencing_token, (await direct.get(lock)).fencing_token) == (1, 1)
            assert await asyncio.to_thread(client.release, lease) is True


async def test_a_kept_blocking_connection_that_was_closed_is_replaced_without_a_word(proxy: Proxy, name: str) -> None:
    with LockClient(f"http://127.0.0.1:{proxy.port}") as client:
        for end in (proxy.reset, proxy.half_close, proxy.reset):
            lease = await asyncio.to_thread(client.acquire, name, 60.0)
            end()
            assert await asyncio.to_thread(client.release, lease) is True


async def test_a_blocking_acquire_without_an_answer_gives_back_what_it_may_have_got(
    direct: AsyncLockClient, proxy: Proxy, name: str
) -> None:
    with LockClient(f"http://127.0.0.1:{proxy.port}", request_timeout_s=0.2) as client:
        proxy.drop_replies()
        with pytest.raises(LockServerUnreachable):
            await asyncio.to_thread(client.acquire, name, 60.0)
        assert (await direct.get(name)).held
        proxy.heal()
        await until_held(direct, name, held=False)


def in_a_child(tell: Callable[[], bytes]) -> bytes:
    """What a forked child says; b"" if it says nothing in time."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = b"raised"
        with contextlib.suppress(BaseException):
            said = tell()
        os.write(write, said)
        os._exit(0)  # without cleaning up: that is the parent's
    os.close(write)
    try:
        ready, _, _ = select.select([read], [], [], PATIENCE_S)
        return os.read(read, 100) if ready else b""
    finally:
        os.close(read)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextlib.contextmanager
def locked_by_another_thread(*locks: Any) -> Iterator[None]:
    reached, go = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as held:
            for lock in locks:
                held.enter_context(lock)
            reached.set()
            go.wait(PATIENCE_S)

    thread = threading.Thread(target=hold)
    thread.start()
    reached.wait(PATIENCE_S)
    try:
        yield
    finally:
        go.set()
        thread.join()


async def test_a_forked_child_shares_no_connection_with_its_parent(proxy: Proxy, name: str) -> None:
    with LockClient(f"http://127.0.0.1:{proxy.port}") as client:
        lease = await asyncio.to_thread(client.acquire, name, 60.0)
        assert proxy.accepted == 1

        def use() -> bytes:
            truths = [not lease.valid, client.get(name).held, client.acquire(f"{name}/child", 5.0).valid]
            return b"used" if all(truths) else repr(truths).encode()

        # Not in this thread: the proxy is served by it.
        assert await asyncio.to_thread(in_a_child, use) == b"used"
        assert proxy.accepted == 2
        assert await asyncio.to_thread(client.release, lease) is True
        assert proxy.accepted == 2, "the child has closed its parent's connection"


def test_a_forked_child_ends_nothing_of_its_parent_and_waits_for_nobody(server: LockServerProcess, name: str) -> None:
    with LockClient(server.url) as client:
        lease = client.acquire(name, 60.0)
        heartbeat = client.start_heartbeat(lease)

        def leave() -> bytes:
            with pytest.raises(LeaseLost, match="belongs to the parent"):
                client.renew(lease)
            with pytest.raises(LeaseLost, match="belongs to the parent"):
                client.batch([Release(lease)])
            truths = [
                client.release(lease) is False,
                lease.state is LeaseState.LOST,
                lease.lost.is_set(),
                lease.wait_lost(0) is True,
            ]
            client.release_later(lease)
            heartbeat.stop()
            client.close()
            return b"left" if all(truths) else repr(truths).encode()

        with locked_by_another_thread(lease._mutex, client._heart._changed, client._heart._plan._mutex):
            assert in_a_child(leave) == b"left"
        client.renew(lease)
        assert client.release(lease) is True


def test_a_forked_child_that_leaves_the_block_is_told_and_its_parent_stays_inside(
    server: LockServerProcess, name: str
) -> None:
    with LockClient(server.url) as client:
        block = client.lock(name, 60.0)
        lease = block.__enter__()

        def leave() -> bytes:
            with pytest.raises(LeaseLost, match="belongs to the parent"):
                block.__exit__(None, None, None)
            client.close()
            return b"told"

        assert in_a_child(leave) == b"told"
        client.renew(lease)
        block.__exit__(None, None, None)
        assert not client.get(name).held


def test_a_forked_child_has_a_heart_of_its_own(server: LockServerProcess, name: str) -> None:
    with LockClient(server.url) as client:
        client.start_heartbeat(client.acquire(name, 60.0))

        def beat() -> bytes:
            lease = client.acquire(f"{name}/child", 60.0)
            granted_until = lease.deadline
            client.start_heartbeat(lease, 0.01)
            until(lambda: lease.deadline > granted_until)
            return b"renewed"

        assert in_a_child(beat) == b"renewed"


def test_a_client_that_is_closed_says_so_at_once(server: LockServerProcess, name: str) -> None:
    client = LockClient(server.url)
    client.close()
    with pytest.raises(LockServerError, match="this client is closed: make a new one") as caught:
        client.acquire_with_retry(name, max_retries=1_000_000, max_total_wait_s=600.0)
    assert not isinstance(caught.value, LockServerUnreachable)
    with pytest.raises(LockServerError, match="this client is closed"), client:
        pass


async def test_an_async_client_that_is_closed_says_so_at_once(server: LockServerProcess, name: str) -> None:
    client = AsyncLockClient(server.url)
    await client.aclose()
    with pytest.raises(LockServerError, match="this client is closed: make a new one") as caught:
        await client.acquire_with_retry(name, max_retries=1_000_000, max_total_wait_s=600.0)
    assert not isinstance(caught.value, LockServerUnreachable)
    with pytest.raises(LockServerError, match="this client is closed"):
        await client.__aenter__()


async def test_nothing_is_left_running_when_a_client_is_closed(server: LockServerProcess, name: str) -> None:
    before = asyncio.all_tasks()
    async with AsyncLockClient(server.url) as opened:
        leases = [await opened.acquire(f"{name}/{number}", 60.0) for number in range(5)]
        for lease in leases:
            opened.start_heartbeat(lease, 0.01)
        assert all(isinstance(lease, AsyncLease) for lease in leases)
    assert asyncio.all_tasks() <= before
    with LockClient(server.url) as blocking:
        held = await asyncio.to_thread(blocking.acquire, f"{name}/b", 60.0)
        blocking.start_heartbeat(held)
    assert not [thread for thread in threading.enumerate() if thread.name == "pgleaderlock-heartbeat"]


# -- In the wake of an interrupted acquire ----------------------------------------------------------------------------


async def test_a_clean_up_has_a_connection_of_its_own_and_so_overtakes_nothing(
    proxy: Proxy, client: AsyncLockClient, name: str
) -> None:
    await client.get(name)  # one connection is kept from now on
    attempt = flows.new_attempt(client._core, name, 60.0, 0.0)
    await client._run(attempt.clean_up())
    assert proxy.accepted == 2
    await client.get(name)
    assert proxy.accepted == 2, "everything else uses what was kept"


async def test_so_has_that_of_the_blocking_client(proxy: Proxy, name: str) -> None:
    def run() -> None:
        with LockClient(f"http://127.0.0.1:{proxy.port}") as client:
            client.get(name)
            client._run(flows.new_attempt(client._core, name, 60.0, 0.0).clean_up())
            client.get(name)

    await asyncio.to_thread(run)
    assert proxy.accepted == 2
