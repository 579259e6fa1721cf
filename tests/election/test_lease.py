"""Elections that hold by a lease, through PgBouncer in transaction mode: the same roles, gates, epochs and fences."""

import asyncio
import contextlib
import json
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from prometheus_client import CollectorRegistry

from conftest import StartPooler, StartServer
from pgleaderlock import ConfigurationError, LeaderElection, LeaderToken, SchemaError, StaleEpoch, fenced, history
from pgleaderlock._pg.reader import PlainConnection
from pgleaderlock._pg.statements import statement
from pgleaderlock.config import Config
from pgleaderlock.dashboard import api
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.metrics import ElectionMetrics
from pgleaderlock.migrate import advance_epoch, migrate
from support.counts import count, proof_asked
from support.election_node import SEND_GAP_S, SendLog
from support.election_storm import LAZY, MIDDLE, POOLED_KINDS, QUICK, SLOW, Storm
from support.elections import (
    HASTY,
    PATIENT,
    STEADY,
    Story,
    admin,
    beats_on,
    fresh_database,
    leader_row,
    ledger_dsns,
    one,
    running,
    somebody_acts,
    terms,
    until,
)
from support.pgbouncer import PoolMode
from support.program import command
from support.proxy import Proxy
from support.storm_writers import INSERT, StormWriters, count_writes, judge_writes, write_by_fenced

WAIT_S = 60.0
StartProxy = Callable[[str], Awaitable[Proxy]]


@pytest.fixture
def pooled(dsn: str, pgbouncer: StartPooler) -> str:
    """Through a pool of two backends, for a role with the grants alone."""
    return pgbouncer(ledger_dsns(dsn)["plain"], "transaction", default_pool_size="2")


def leased(dsn: str, role: str | list[str], node_id: str = "lea", **options: Any) -> LeaderElection:
    return LeaderElection(dsn, role, node_id=node_id, hold="lease", **{**STEADY, **options})


async def opens(election: LeaderElection, role: str) -> LeaderToken:
    assert await election.gate(role).wait_open(WAIT_S), f"the gate of {role} did not open"
    token = election.gate(role).token
    assert token is not None
    return token


async def test_one_of_three_leads_and_holds_nothing_at_the_server(pooled: str, superuser: str, role: str) -> None:
    elections = [leased(pooled, role, f"node-{number}") for number in range(3)]
    async with running(*elections):
        await somebody_acts(elections, role)
        await beats_on(superuser, role, 3)
        assert sum(election.gate(role).is_leader for election in elections) == 1
        locks = "SELECT count(*) AS held FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
        await until(
            lambda: one(superuser, f"{locks} WHERE l.locktype = 'advisory' AND datname = 'elections'")["held"] == 0
        )
        assert one(
            superuser,
            "SELECT hold FROM pgleaderlock.sessions WHERE session_id = %s",
            leader_row(superuser, role)["session_id"],
        ) == {"hold": "lease"}


@pytest.mark.parametrize("mode", ["session", "statement"])
async def test_leases_work_in_the_other_modes_of_a_pool_as_well(
    dsn: str, superuser: str, role: str, pgbouncer: StartPooler, mode: PoolMode
) -> None:
    """A message has several statements, but is one query to the pooler."""
    pooled = pgbouncer(ledger_dsns(dsn)["plain"], mode)
    first, second = leased(pooled, role, "first", **PATIENT), leased(pooled, role, "second", **PATIENT)
    async with running(first):
        before = await opens(first, role)
        async with running(second):
            await beats_on(superuser, role, 2)
            await first.shutdown()
            assert (await opens(second, role)).epoch == before.epoch + 1


async def test_a_clean_release_is_followed_at_once(pooled: str, superuser: str, role: str) -> None:
    first, second = leased(pooled, role, "first", **PATIENT), leased(pooled, role, "second", **PATIENT)
    async with running(first):
        before = await opens(first, role)
        async with running(second):
            await first.shutdown()
            after = await opens(second, role)
    assert after.epoch == before.epoch + 1
    assert [term["reason"] for term in terms(superuser, role)] == ["released", "released"]


async def test_a_silent_lease_is_ended_and_its_roles_are_taken(
    pooled: str, superuser: str, role: str, proxy_to: StartProxy
) -> None:
    cut = await proxy_to(pooled)
    first, second = leased(cut.dsn_for(pooled), role, "first", **HASTY), leased(pooled, role, "second", **HASTY)
    async with running(first, second):
        leading = await somebody_acts([first, second], role)
        if leading is second:
            await second.drain(role)
        before = await opens(first, role)
        await second.resume(role)
        cut.cut()
        after = await opens(second, role)
        assert not first.gate(role).is_leader
        assert after.epoch > before.epoch
        cut.heal()
        await until(lambda: (seen := first.leader(role)) is not None and seen.node_id == "second")


async def test_a_lost_connection_is_no_lost_term(pooled: str, superuser: str, role: str, proxy_to: StartProxy) -> None:
    between = await proxy_to(pooled)
    async with running(election := leased(between.dsn_for(pooled), role)):
        story = Story(election)
        token = await opens(election, role)
        for _ in range(3):
            between.reset()
            await beats_on(superuser, role)
        assert election.gate(role).require_leader() == token
        assert ("on_lost", role) not in story.calls


async def test_a_release_whose_answer_is_lost_is_told_as_it_was(
    pooled: str, superuser: str, role: str, proxy_to: StartProxy
) -> None:
    between = await proxy_to(pooled)
    lost: list[bytes] = []

    def lose_the_answer(chunk: bytes) -> None:
        if b"end_term" in chunk and not lost:
            lost.append(chunk)
            between.drop_replies()

    async with running(election := leased(between.dsn_for(pooled), role)):
        await opens(election, role)
        between.overhear = lose_the_answer
        draining = asyncio.ensure_future(election.drain(role))
        await until(lambda: leader_row(superuser, role)["ended"])
        between.heal()
        between.reset()
        assert await asyncio.wait_for(draining, WAIT_S) is True
        assert leader_row(superuser, role)["clean"]


async def test_a_stale_write_is_refused_through_the_pooler(pooled: str, superuser: str, role: str) -> None:
    async with running(election := leased(pooled, role)):
        token = await opens(election, role)
        async with await psycopg.AsyncConnection.connect(pooled, autocommit=True, prepare_threshold=None) as conn:
            async with fenced(conn, token) as _:
                await conn.execute("SELECT 1")
            await election.step_down(role)
            await until(lambda: leader_row(superuser, role)["epoch"] > token.epoch)
            with pytest.raises(StaleEpoch):
                async with fenced(conn, token):
                    pass


async def test_a_drain_asked_from_afar_is_obeyed_and_answered(pooled: str, superuser: str, role: str) -> None:
    async with running(election := leased(pooled, role, f"node-{role}")):
        await opens(election, role)
        with admin(superuser) as conn:
            (asked,) = conn.execute(
                "SELECT pgleaderlock.request_drain(%s, 'pgleaderlock', 'pgleaderlock') AS id", (f"node-{role}",)
            ).fetchall()
        await until(
            lambda: (
                one(superuser, "SELECT outcome FROM pgleaderlock.requests WHERE request_id = %s", asked["id"])[
                    "outcome"
                ]
                == "done"
            )
        )
        assert leader_row(superuser, role)["ended"]
        assert election.drained(role)


async def test_a_session_and_a_lease_exclude_each_other(dsn: str, pooled: str, superuser: str, role: str) -> None:
    direct = ledger_dsns(dsn)["plain"]
    lease, session = leased(pooled, role, "lease"), LeaderElection(direct, role, node_id="session", **STEADY)
    async with running(lease):
        await opens(lease, role)
        async with running(session):
            await until(lambda: session.leader(role) is not None)
            await beats_on(superuser, role, 10)
            assert lease.gate(role).is_leader
            assert not session.gate(role).is_leader
            # A drained node does not compete, so the other one leads next, however slow it is.
            await lease.drain(role)
            await opens(session, role)
            await lease.resume(role)
            await beats_on(superuser, role, 10)
            assert session.gate(role).is_leader
            assert not lease.gate(role).is_leader
            await session.drain(role)
            await opens(lease, role)


async def test_a_session_ends_a_silent_lease(
    dsn: str, pooled: str, superuser: str, role: str, proxy_to: StartProxy
) -> None:
    cut = await proxy_to(pooled)
    lease = leased(cut.dsn_for(pooled), role, "lease", **HASTY)
    session = LeaderElection(ledger_dsns(dsn)["plain"], role, node_id="session", **HASTY)
    async with running(lease):
        await opens(lease, role)
        async with running(session):
            cut.cut()
            await opens(session, role)
            assert not lease.gate(role).is_leader
            cut.heal()


async def test_a_session_ends_a_silent_lease_once_whatever_the_number_of_its_roles(
    dsn: str, pooled: str, superuser: str, role: str, proxy_to: StartProxy
) -> None:
    """A heartbeat waits behind it: one round trip per role of a thousand would cost the session its own gates."""
    roles = [f"{role}-{number}" for number in range(20)]
    direct = ledger_dsns(dsn)["plain"]
    cut, heard = await proxy_to(pooled), await proxy_to(direct)
    ends: list[bytes] = []
    heard.overhear = lambda chunk: ends.append(chunk) if b"end_silent_leases" in chunk else None
    lease = leased(cut.dsn_for(pooled), roles, "lease", **HASTY)
    session = LeaderElection(heard.dsn_for(direct), roles, node_id="session", **{**HASTY, "listen_channel": None})
    async with running(lease):
        for name in roles:
            await opens(lease, name)
        async with running(session):
            await until(lambda: all(session.leader(name) is not None for name in roles))
            cut.cut()
            for name in roles:
                await opens(session, name)
            cut.heal()
    assert len(ends) < len(roles)


async def test_a_session_that_balances_does_not_take_the_role_of_a_lease_for_free(
    dsn: str, pooled: str, superuser: str, role: str, proxy_to: StartProxy
) -> None:
    """No backend belongs to a lease: that it has none does not say that its node is gone."""
    direct = ledger_dsns(dsn)["plain"]
    heard = await proxy_to(direct)
    session = LeaderElection(heard.dsn_for(direct), role, node_id="session", balance=True, **PATIENT)
    tries: list[bytes] = []
    async with running(lease := leased(pooled, role, **PATIENT)):
        await opens(lease, role)
        async with running(session):
            await until(lambda: session.leader(role) is not None)
            heard.overhear = lambda chunk: tries.append(chunk) if b"pgleaderlock.bump(" in chunk else None
            await beats_on(superuser, role, 10)
            assert not tries
            await lease.shutdown()
            await opens(session, role)


async def test_a_session_that_balances_ends_a_silent_lease(
    dsn: str, pooled: str, role: str, proxy_to: StartProxy
) -> None:
    cut = await proxy_to(pooled)
    session = LeaderElection(ledger_dsns(dsn)["plain"], role, node_id="session", balance=True, **HASTY)
    async with running(lease := leased(cut.dsn_for(pooled), role, **HASTY)):
        await opens(lease, role)
        async with running(session):
            cut.cut()
            await opens(session, role)
            assert not lease.gate(role).is_leader
            cut.heal()


LEASE_OPEN = (
    "SELECT session_id FROM pgleaderlock.lease_open('pgleaderlock', gen_random_uuid(), %s, NULL, 'n', 'h', 1, 'i',"
    " 1, 2, true, 'v', false)"
)


def opened_lease(superuser: str) -> tuple[int, str]:
    key = str(uuid.uuid4())
    return one(superuser, LEASE_OPEN, key)["session_id"], key


async def test_a_late_message_changes_nothing(superuser: str, role: str) -> None:
    session_id, key = opened_lease(superuser)
    assert one(superuser, LEASE_OPEN, key)["session_id"] == session_id, "the same message twice opens one lease"
    begin = "SELECT pgleaderlock.lease_begin(%s, %s, %s)"
    one(superuser, begin, session_id, key, 2)
    with pytest.raises(psycopg.Error, match="comes too late") as late:
        one(superuser, begin, session_id, key, 1)
    assert late.value.sqlstate == "PGL07"
    with pytest.raises(psycopg.Error, match="is over"):
        one(superuser, begin, session_id, str(uuid.uuid4()), 3)
    one(superuser, "UPDATE pgleaderlock.sessions SET ended_at = now() WHERE session_id = %s RETURNING 1", session_id)
    with pytest.raises(psycopg.Error, match="is over") as over:
        one(superuser, begin, session_id, key, 3)
    assert over.value.sqlstate == "PGL06"


async def test_what_a_message_of_a_lease_acknowledges_is_on_disk_also_if_it_only_reports_gates(
    superuser: str, role: str
) -> None:
    """A beat that others have seen and a restart has lost would be issued again, and count from its first sight."""
    session_id, key = opened_lease(superuser)
    with admin(superuser) as conn, conn.transaction():
        conn.execute("SET LOCAL synchronous_commit = off")
        conn.execute("SELECT pgleaderlock.lease_begin(%s, %s, 1)", (session_id, key))
        conn.execute("SELECT pgleaderlock.report_gates(%s, '[]')", (session_id,))
        assert conn.execute("SHOW synchronous_commit").fetchone() == {"synchronous_commit": "on"}


async def test_a_ledger_without_leases_is_told_by_its_version(
    postgres: EmbeddedPostgres, superuser: str, role: str
) -> None:
    with fresh_database(postgres.dsn, ledger=True) as dsn:
        one(dsn, "DELETE FROM pgleaderlock.schema_version WHERE version = 5 RETURNING version")
        with pytest.raises(SchemaError, match="hold=lease needs 5"):
            await leased(dsn, role).start()


@contextlib.contextmanager
def a_node_without(superuser_dsn: str, revoked: str) -> Iterator[str]:
    """The DSN of a role in a database of its own, with `grants.sql` but for one of the grants."""
    name = f"node_{uuid.uuid4().hex[:12]}"
    with fresh_database(superuser_dsn, ledger=True) as superuser, admin(superuser) as dba:
        dba.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{name}'".encode())
        dba.execute(statement("grants").replace(b"{role}", name.encode()))
        dba.execute(f"REVOKE {revoked} FROM {name}".encode())
        try:
            yield psycopg.conninfo.make_conninfo(superuser, user=name, password=name)
        finally:
            dba.execute(f"DROP OWNED BY {name}; DROP ROLE {name}".encode())


async def test_a_role_that_may_not_open_a_lease_is_told_of_the_grants(dsn: str, role: str) -> None:
    lacking = "EXECUTE ON FUNCTION pgleaderlock.lease_open"
    with a_node_without(dsn, lacking) as node, pytest.raises(SchemaError, match="see the GRANTs"):
        await leased(node, role).start()


async def test_a_look_that_the_server_refuses_is_told_and_not_taken_for_a_lost_answer(dsn: str, role: str) -> None:
    """The heartbeats go on: without a word, this node would look like a standby, and never lead."""
    with a_node_without(dsn, "SELECT ON pgleaderlock.requests") as node:
        async with running(election := leased(node, role)):
            await until(lambda: "see the GRANTs" in str(election.last_error))


async def test_looks_that_get_no_answer_are_told_once_though_the_heartbeats_do(
    pooled: str, role: str, proxy_to: StartProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """The node looks like a standby: without a word, nobody would know that it cannot take over."""
    between = await proxy_to(pooled)
    leader, standby = leased(pooled, role, "first", **HASTY), leased(between.dsn_for(pooled), role, "second", **HASTY)

    def lose_the_answers_to_looks(chunk: bytes) -> None:
        if b"reserved AS MATERIALIZED" in chunk:
            looks.append(chunk)
            between.drop_replies()
        else:
            between.heal()

    looks: list[bytes] = []
    async with running(leader):
        await opens(leader, role)
        async with running(standby):
            between.overhear = lose_the_answers_to_looks
            await until(lambda: "looks_unanswered" in caplog.text)
            told = len(looks)
            await until(lambda: len(looks) > told + 1)
            assert caplog.text.count("looks_unanswered") == 1
            assert "did not answer 'lease_look'" in str(standby.last_error)
            between.overhear = None
            between.heal()
            await leader.shutdown()
            await opens(standby, role)


async def test_a_dsn_callable_that_fails_for_a_while_costs_no_term(
    pooled: str, superuser: str, role: str, proxy_to: StartProxy
) -> None:
    between = await proxy_to(pooled)
    failures_left = 0

    def dsn() -> str:
        nonlocal failures_left
        if failures_left:
            failures_left -= 1
            raise RuntimeError("no password yet")
        return between.dsn_for(pooled)

    # Beats only: a look that fails is not asked again.
    settings = {**PATIENT, "acquire_delay_s": (300.0, 300.0)}
    async with running(election := LeaderElection(dsn, role, node_id="lea", hold="lease", **settings)):
        story = Story(election)
        token = await opens(election, role)
        failures_left = 3
        between.reset()
        await beats_on(superuser, role)
        assert failures_left == 0
        assert election.gate(role).require_leader() == token
        assert ("on_lost", role) not in story.calls


async def test_who_needs_a_session_is_told_of_leases_behind_a_pooler(pooled: str, role: str) -> None:
    async with running(election := LeaderElection(pooled, role, **STEADY)):
        assert election.last_error is not None
        assert 'hold="lease"' in str(election.last_error)


async def test_history_dashboard_and_metrics_say_that_a_lease_leads(pooled: str, superuser: str, role: str) -> None:
    node, space = f"node-{role}", f"space-{role}"
    session = LeaderElection(superuser, role, node_id=f"session-{role}", namespace=space, candidate=False, **STEADY)
    async with running(election := leased(pooled, role, node, namespace=space), session):
        await opens(election, role)
        await until(lambda: session.leader(role) is not None)
        async with await PlainConnection.open(pooled, "test") as look:
            shown = await history.role(look, space, role)
            nodes = await history.nodes(look, space)
            page = await api.leaders(look, space, limit=10)
            listed = await api.nodes(look, space, limit=10)
        assert shown is not None
        assert (shown.node_id, shown.hold) == (node, "lease")
        kinds = {node: "lease", f"session-{role}": "session"}
        assert {each.node_id: each.hold for each in nodes} == kinds
        assert [leader.hold for leader in page.leaders] == ["lease"]
        assert {each.node_id: each.hold for each in listed.nodes} == kinds
        metrics = ElectionMetrics(election, CollectorRegistry()).exposition().decode()
        (info,) = [line for line in metrics.splitlines() if line.startswith("pgleaderlock_node_info{")]
        assert 'hold="lease"' in info


async def test_status_says_that_a_lease_holds_the_role_though_its_lock_is_free(pooled: str, role: str) -> None:
    words = ("status", "--name", role, "--dsn", pooled)
    async with running(election := leased(pooled, role)):
        await opens(election, role)
        shown = await asyncio.to_thread(command, *words)
        told = json.loads((await asyncio.to_thread(command, *words, "--json")).out)
    assert (shown.code, shown.err) == (0, "")
    assert "held by      a lease of lea\n" in shown.out
    assert (told["held"], told["holders"], told["ledger"]["hold"]) == (True, [], "lease")
    assert (await asyncio.to_thread(command, *words)).code == 1


async def test_a_command_that_has_not_won_names_the_lease_that_holds_the_role(pooled: str, role: str) -> None:
    words = ("exec", "--fenced", "--hold", "lease", "--dsn", pooled, "--name", role, "--wait", "1s", "--", "true")
    async with running(election := leased(pooled, role)):
        await opens(election, role)
        done = await asyncio.to_thread(command, *words)
    assert f"{role} is held by a lease of lea" in done.err


def test_the_environment_says_how_to_hold(role: str) -> None:
    config = Config.load(None, {"PG_CONN_STRING": "host=h", "LEADER_HOLD": "lease"}, roles=[role])
    assert LeaderElection.from_config(config).hold == "lease"


@pytest.mark.parametrize("option", [{"standby_wait_s": 1.0}, {"balance": True}])
def test_what_needs_a_session_cannot_be_combined_with_a_lease(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="hold=lease"):
        leased("host=h", "r", **option)


async def test_a_command_runs_while_its_lease_leads(pooled: str, superuser: str, role: str) -> None:
    words = ["exec", "--fenced", "--hold", "lease", "--dsn", pooled, "--name", role, "--wait", "60s", "--", "true"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "pgleaderlock", *words)
    assert await process.wait() == 0
    assert [term["reason"] for term in terms(superuser, role)] == ["released"]


# --- Storms


LEASED = {
    name: {**settings, "hold": "lease"} for name, settings in (("quick", QUICK), ("middle", MIDDLE), ("slow", SLOW))
}
if proof_asked():
    LEASED |= {name: {**settings, "hold": "lease"} for name, settings in (("lazy", LAZY), ("fifth", QUICK))}
MIXED = {**LEASED, "middle": MIDDLE, "second": QUICK}
ROLES = [f"role-{number}" for number in range(count(2, 50))]
LASTING_S = count(0, 1800)
WRITERS = 6
# "Within T + 2 s", of which T is the longest in use. The machine's own lag comes on top, as a timer has measured it.
LED_AGAIN_S = 2.0


def stormy(
    server: EmbeddedPostgres, pgbouncer: StartPooler, folder: Path, settings: dict[str, dict[str, Any]]
) -> Storm:
    user = psycopg.conninfo.conninfo_to_dict(server.dsn)["user"]
    pool = {"default_pool_size": str(3 + WRITERS), "server_login_retry": "1", "admin_users": str(user)}
    pooled = pgbouncer(server.dsn, "transaction", **pool)
    # As many acts a second with fifty roles as with five: the judge keeps every one of them.
    gap = {"send_gap_s": SEND_GAP_S * max(1.0, len(ROLES) / 5)}
    nodes = {name: {**options, **gap} for name, options in settings.items()}
    return Storm(server, SendLog(folder / "sends"), nodes, ROLES, pooled=pooled)


@pytest.mark.long
@pytest.mark.timeout(7200 if proof_asked() else 600)
@pytest.mark.parametrize("settings", [LEASED, MIXED], ids=["leases", "leases and sessions"])
async def test_nobody_acts_after_a_newer_epoch_behind_a_pooler_in_transaction_mode(
    throwaway_postgres: StartServer, pgbouncer: StartPooler, tmp_path: Path, settings: dict[str, dict[str, Any]]
) -> None:
    """Nor does a write under an older epoch commit after a newer one began; and calm brings every role back soon."""
    storm = stormy(throwaway_postgres(), pgbouncer, tmp_path, settings)
    log, writers = storm.log, StormWriters(storm, (write_by_fenced,), WRITERS)
    await migrate(storm.server.dsn)
    await count_writes(storm.server.dsn)
    async with storm.running():
        async with writers.writing():
            await storm.faults(POOLED_KINDS, len(POOLED_KINDS), LASTING_S)
            await storm.calm()
            for name in set(settings) - {send.node for send in log.read()}:
                await storm.lets_lead(name)
            await until(lambda: writers.all_have_done_both, "each kind of writer writes and is refused")
        await storm.judge()
        judged, led_again = await judge_writes(storm.server.dsn), storm.led_again()
        longest, least_lag = max(led_again), max(led_again, key=lambda led: led.net_s)
        print(f"{judged}; {writers.written}; {writers.refused}")  # noqa: T201
        print(f"{len(storm.calms_ns)} calms; led again after {longest} at most; without lag, {least_lag}")  # noqa: T201
        assert (judged.stale, judged.twice, judged.backwards) == (0, 0, 0), storm.about
        assert judged.writes >= writers.written.total(), f"an acknowledged write is missing ({storm.about})"
        bound_s = max(options["session_lease_s"] for options in settings.values()) + LED_AGAIN_S
        assert [led for led in led_again if led.net_s > bound_s] == [], storm.about
        # Against an empty proof.
        sends_a_second, changes = storm.figures()
        assert sends_a_second > 50, storm.about
        assert changes >= sum(storm.fired.values()) / 4, storm.about
        assert set(storm.fired) == set(POOLED_KINDS), storm.about
        assert storm.echoes["PGL07"] + storm.echoes["PGL06"] > 0, storm.about
        assert {send.node for send in log.read()} == set(settings), storm.about


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_the_same_storm_catches_leases_that_do_not_wait_for_their_predecessor(
    throwaway_postgres: StartServer, pgbouncer: StartPooler, tmp_path: Path
) -> None:
    broken = {name: {**settings, "takeover": "instant"} for name, settings in LEASED.items()}
    storm = stormy(throwaway_postgres(), pgbouncer, tmp_path, broken)
    async with storm.running():
        for _ in range(20):
            # Whoever is deaf has an open gate while an operator takes its epoch away.
            role = storm.rng.choice(storm.roles)
            leader = storm.log.last(role)
            assert leader is not None
            storm.nodes[leader.node].tell("block", 0.4)
            await advance_epoch(storm.server.dsn, role, namespace="pgleaderlock", channel="pgleaderlock")
            await storm.everybody_is_led()
            if storm.log.violations():
                return
    raise AssertionError("no violation was seen")


async def test_the_judge_of_writes_sees_one_that_was_committed_after_a_newer_epoch_began(
    postgres: EmbeddedPostgres, role: str
) -> None:
    with fresh_database(postgres.dsn, ledger=True) as dsn:
        await count_writes(dsn)
        async with running(election := leased(dsn, role)):
            before = await opens(election, role)
            with admin(dsn) as conn:
                conn.execute(INSERT, (role, before.epoch))
                await election.step_down(role)
                await until(lambda: leader_row(dsn, role)["epoch"] > before.epoch)
                assert (await judge_writes(dsn))[:3] == (1, 2, 0)
                conn.execute(INSERT, (role, before.epoch))
                assert (await judge_writes(dsn))[:3] == (2, 2, 1)
