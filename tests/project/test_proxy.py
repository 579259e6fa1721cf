"""The proxy breaks the network in the ways that the other tests rely on, and its count is right."""

import asyncio
import gc
import socket
import warnings

import psycopg
import pytest

from support.proxy import Proxy


async def _connect(proxy: Proxy, dsn: str) -> psycopg.AsyncConnection[tuple[object, ...]]:
    return await psycopg.AsyncConnection.connect(proxy.dsn_for(dsn), autocommit=True, connect_timeout=5)


async def _answers(connection: psycopg.AsyncConnection[tuple[object, ...]]) -> bool:
    row = await (await connection.execute("SELECT 1")).fetchone()
    return row == (1,)


async def test_forwards_both_ways_and_counts(proxy: Proxy, dsn: str) -> None:
    async with await _connect(proxy, dsn) as connection:
        assert await _answers(connection)
        assert (proxy.accepted, proxy.open) == (1, 1)
        assert proxy.bytes_to_server > 0
        assert proxy.bytes_to_client > 0
    await proxy.until(lambda p: p.open == 0)


async def test_cut_is_silent_and_heal_delivers_what_waited(proxy: Proxy, dsn: str) -> None:
    async with await _connect(proxy, dsn) as connection:
        proxy.cut()
        question = asyncio.create_task(_answers(connection))
        done, _ = await asyncio.wait({question}, timeout=0.2)
        assert not done
        assert not connection.closed
        proxy.heal()
        assert await asyncio.wait_for(question, 5)


async def test_a_cut_hides_the_end_of_the_session(proxy: Proxy, dsn: str) -> None:
    connection = await _connect(proxy, dsn)
    proxy.cut()
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other:
        await other.execute("SELECT pg_terminate_backend(%s, 5000)", [connection.info.backend_pid])
    readable = asyncio.Event()
    asyncio.get_running_loop().add_reader(connection.fileno(), readable.set)
    try:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(readable.wait(), 0.2)
        proxy.heal()
        await asyncio.wait_for(readable.wait(), 5)
    finally:
        asyncio.get_running_loop().remove_reader(connection.fileno())
    await connection.close()


async def test_new_connections_wait_during_a_cut(proxy: Proxy, dsn: str) -> None:
    proxy.cut()
    connecting = asyncio.create_task(_connect(proxy, dsn))
    await proxy.until(lambda p: p.accepted == 1)
    done, _ = await asyncio.wait({connecting}, timeout=0.1)
    assert not done
    proxy.heal()
    await (await connecting).close()


async def test_reset_is_an_error_and_not_an_end_of_stream(proxy: Proxy) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    await proxy.until(lambda p: p.open == 1)
    assert proxy.reset() == 1
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert proxy.open == 0


async def test_dropped_replies_still_let_the_statement_happen(proxy: Proxy, dsn: str) -> None:
    connection = await _connect(proxy, dsn)
    proxy.drop_replies()
    statement = asyncio.create_task(connection.execute("SELECT pg_advisory_lock(4711, 1)"))
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other:
        seen = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 4711 AND granted"
        async with asyncio.timeout(5):
            while (await (await other.execute(seen)).fetchone()) != (1,):
                await asyncio.sleep(0.01)
    assert not statement.done()
    proxy.reset()
    with pytest.raises(psycopg.OperationalError):
        await statement
    await connection.close()


async def test_half_close_ends_one_direction_only(proxy: Proxy) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    await proxy.until(lambda p: p.open == 1)
    assert proxy.half_close() == 1
    assert await asyncio.wait_for(reader.read(), 5) == b""
    before = proxy.bytes_to_server
    writer.write(b"\x00\x00\x00\x08\x04\xd2\x16\x2f")
    await proxy.until(lambda p: p.bytes_to_server == before + 8)
    writer.close()
    await writer.wait_closed()


async def test_refuse_turns_new_ones_away_and_keeps_the_old(proxy: Proxy, dsn: str) -> None:
    async with await _connect(proxy, dsn) as connection:
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", proxy.port)
        assert await _answers(connection)
        proxy.heal()
        async with await _connect(proxy, dsn) as second:
            assert await _answers(second)


@pytest.mark.parametrize("turns", range(4))
async def test_a_client_that_comes_as_the_door_is_shut_leaves_no_socket_behind(proxy: Proxy, turns: int) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with socket.create_connection(("127.0.0.1", proxy.port)):
            for _ in range(turns):
                await asyncio.sleep(0)
            proxy.refuse()
            await proxy.close()
        for _ in range(3):
            await asyncio.sleep(0)
        gc.collect()
    assert [str(warning.message) for warning in said] == []


async def test_blackhole_accepts_and_says_nothing(proxy: Proxy, dsn: str) -> None:
    async with await _connect(proxy, dsn) as connection:
        proxy.blackhole()
        connecting = asyncio.create_task(_connect(proxy, dsn))
        await proxy.until(lambda p: p.accepted == 2)
        assert await _answers(connection)
        assert not connecting.done()
        proxy.heal()
        await (await connecting).close()


async def test_delay_holds_each_answer_back(proxy: Proxy, dsn: str) -> None:
    async with await _connect(proxy, dsn) as connection:
        proxy.delay_s = 0.05
        begin = asyncio.get_running_loop().time()
        assert await _answers(connection)
        assert asyncio.get_running_loop().time() - begin >= 0.1
        proxy.heal()


async def test_new_connections_are_led_to_another_server_and_existing_ones_stay(proxy: Proxy, dsn: str) -> None:
    async with Proxy.to(dsn) as other, await _connect(proxy, dsn) as before:
        proxy.lead_to(other.dsn_for(dsn))
        async with await _connect(proxy, dsn) as after:
            assert await _answers(before)
            assert await _answers(after)
            assert (proxy.accepted, other.accepted) == (2, 1)
