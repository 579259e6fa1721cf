"""Roles are shared out between live nodes: evenly, with few moves, without flapping, and nobody waits for courtesy."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from pgleaderlock import ConfigurationError, LeaderElection, LockState
from pgleaderlock._election import balancing, ledger, winning
from support.counts import count
from support.elections import STEADY, admin, bounded, ledger_dsns, one, until

ROLES = 20


@pytest.fixture
def space() -> str:
    """A namespace of the test's own: whoever is in it shares."""
    return f"shared-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def node(dsn: str, space: str) -> Callable[..., LeaderElection]:
    def make(node_id: str, **settings: Any) -> LeaderElection:
        options = {"roles": [f"role-{number:02}" for number in range(ROLES)], "balance": True, **STEADY, **settings}
        return LeaderElection(
            ledger_dsns(dsn)["plain"], options.pop("roles"), node_id=node_id, namespace=space, **options
        )

    return make


def led(election: LeaderElection) -> set[str]:
    return {role for role in election.roles if election.state(role) is LockState.LEADER}


def shares(elections: Sequence[LeaderElection]) -> list[int]:
    return sorted(len(led(election)) for election in elections)


def moves(superuser: str, space: str) -> int:
    query = "SELECT count(*) AS n FROM pgleaderlock.requests WHERE namespace = %s AND to_node_id IS NOT NULL"
    return int(one(superuser, query, space)["n"])


async def settles(elections: Sequence[LeaderElection], wanted: list[int]) -> None:
    await until(lambda: shares(elections) == wanted, f"shares {wanted}")


async def reaches(elections: Sequence[LeaderElection], wanted: list[int]) -> None:
    """As `settles`, for so many roles that it takes its time."""
    while shares(elections) != wanted:
        await asyncio.sleep(0.2)


async def many_beats(superuser: str, space: str, beats: int = 15) -> None:
    """Several times the settling time of every node: for claims that nothing moves any more."""
    query = (
        "SELECT min(beat) AS beat FROM pgleaderlock.sessions WHERE namespace = %s AND ended_at IS NULL"
        " AND EXISTS (SELECT FROM pg_stat_get_activity(backend_pid))"
    )
    before = one(superuser, query, space)["beat"]
    await until(lambda: one(superuser, query, space)["beat"] > before + beats)


def die(election: LeaderElection) -> None:
    """Its connection is cut and nothing is said, as when a process is killed."""
    assert election._run.task is not None
    election._run.task.cancel()


@contextlib.asynccontextmanager
async def running(*elections: LeaderElection) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for election in elections:
            await stack.enter_async_context(election)
        yield


async def test_nodes_that_join_get_their_share_with_as_few_moves_as_can_be(
    node: Callable[..., LeaderElection], superuser: str, space: str
) -> None:
    a, b, c = (node(name) for name in "abc")
    async with a:
        await settles([a], [20])
        async with running(b, c):
            await settles([a, b, c], [6, 7, 7])
            needed = len(led(b)) + len(led(c))
            await many_beats(superuser, space)
            assert shares([a, b, c]) == [6, 7, 7]
            assert needed <= moves(superuser, space) <= needed * 1.1, "each role that they lead now was moved once"
    with admin(superuser) as conn:
        outcomes = conn.execute(
            "SELECT DISTINCT outcome, detail = to_node_id || ' leads it' AS as_asked"
            " FROM pgleaderlock.requests WHERE namespace = %s",
            (space,),
        ).fetchall()
        reasons = conn.execute(
            "SELECT DISTINCT reason FROM pgleaderlock.terms WHERE namespace = %s", (space,)
        ).fetchall()
    assert outcomes == [{"outcome": "done", "as_asked": True}]
    assert reasons == [{"reason": "released"}], "every role changed hands by a clean release"


async def test_roles_of_a_node_that_dies_are_spread_while_they_are_won(
    node: Callable[..., LeaderElection], superuser: str, space: str
) -> None:
    a, b, c, d = (node(name) for name in "abcd")
    async with running(a, b, c, d):
        await settles([a, b, c, d], [5, 5, 5, 5])
        before = moves(superuser, space)
        die(a)
        await settles([b, c, d], [6, 7, 7])
        await many_beats(superuser, space)
        assert shares([b, c, d]) == [6, 7, 7]
        assert moves(superuser, space) - before <= 1, "nothing had to be moved afterwards"


@pytest.mark.timeout(3_000)
async def test_a_thousand_roles_move_no_more_than_they_must_when_nodes_join_and_die(
    node: Callable[..., LeaderElection], superuser: str, space: str
) -> None:
    """As many as that with the counts of a proof; else fewer. A thousand take two to three minutes alone, and more than
    800 s on two cores at a load of 15: the limits only end a test that hangs."""
    many = count(30, 1000)
    roles = [f"role-{number:04}" for number in range(many)]
    a, b, c = (node(name, roles=roles) for name in "abc")
    third = [many // 3, (many + 1) // 3, (many + 2) // 3]
    async with a, asyncio.timeout(2_700):
        await reaches([a], [many])
        async with running(b, c):
            await reaches([a, b, c], third)
            joined = moves(superuser, space)
            assert 2 * many // 3 <= joined <= 2 * many / 3 * 1.1
            die(b)
            await reaches([a, c], [many // 2, (many + 1) // 2])
            await many_beats(superuser, space)
            assert shares([a, c]) == [many // 2, (many + 1) // 2]
            assert moves(superuser, space) - joined <= many / 3 * 0.1, "what was free was shared out, and not moved"


async def test_a_node_that_goes_leaves_its_roles_to_the_others(
    node: Callable[..., LeaderElection], superuser: str, space: str
) -> None:
    a, b, c = (node(name) for name in "abc")
    async with running(a, b):
        async with c:
            await settles([a, b, c], [6, 7, 7])
        await settles([a, b], [10, 10])


async def test_a_watcher_and_a_drained_node_get_none_and_a_resumed_one_its_share(
    node: Callable[..., LeaderElection], superuser: str, space: str
) -> None:
    a, b, watcher = node("a"), node("b"), node("watcher", candidate=False)
    async with running(watcher, a, b):
        await settles([a, b], [10, 10])
        assert await bounded(b.drain())
        await settles([a], [20])
        await many_beats(superuser, space, 8)
        assert shares([a, b, watcher]) == [0, 0, 20]
        await b.resume()
        await settles([a, b], [10, 10])
        assert led(watcher) == set()


async def test_who_does_not_balance_keeps_what_it_has_and_nobody_moves_anything_to_it(
    node: Callable[..., LeaderElection], superuser: str, space: str
) -> None:
    a, b = node("a", balance=False), node("b", balance=False)
    async with running(a, b):
        await until(lambda: sum(shares([a, b])) == ROLES)
        await many_beats(superuser, space, 8)
        assert moves(superuser, space) == 0


async def test_what_a_member_does_not_compete_for_is_free_for_a_moment_only_and_is_not_offered_again_and_again(
    node: Callable[..., LeaderElection], superuser: str, space: str
) -> None:
    """The other is live, balances, and is after another role: no table says that."""
    a = node("a", roles=[f"role-{number}" for number in range(4)])
    other = node("other", roles=["elsewhere"])
    async with other, a:
        await settles([a], [4])
        settled = "SELECT count(*) AS n FROM pgleaderlock.requests WHERE namespace = %s AND outcome = 'done'"
        await until(lambda: one(superuser, settled, space)["n"] == 1 and led(a) == set(a.roles))
        await many_beats(superuser, space)
        assert (moves(superuser, space), led(a)) == (1, set(a.roles))


async def test_a_role_is_offered_once_to_a_node_that_does_not_compete_for_it_while_the_members_are_the_same(
    node: Callable[..., LeaderElection], superuser: str, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moments for which others wait are short here, so that there is time for a second offer."""
    for module in (balancing, winning, ledger):
        monkeypatch.setattr(module, "HOLD_S", 0.05)
    monkeypatch.setattr(balancing, "UNWILLING_S", 0.0)
    a, other = node("a", roles=["role-1", "role-2", "role-3"]), node("other", roles=["elsewhere"])
    async with other, a:
        await until(lambda: moves(superuser, space) >= 3)
        await many_beats(superuser, space)
        await until(lambda: led(a) == set(a.roles))
        with admin(superuser) as conn:
            offered = conn.execute(
                "SELECT role, count(*) AS n FROM pgleaderlock.requests WHERE namespace = %s GROUP BY 1 ORDER BY 1",
                (space,),
            ).fetchall()
        assert offered == [{"role": role, "n": 1} for role in ("role-1", "role-2", "role-3")]


async def test_a_node_that_has_its_share_takes_what_an_operator_gives_it(
    node: Callable[..., LeaderElection], superuser: str, space: str
) -> None:
    """Though it is slower than the others, who lead fewer by then. Afterwards the balance goes on from there."""
    roles = [f"role-{number}" for number in range(6)]
    a, c = node("a", roles=roles), node("c", roles=roles)
    b = node("b", roles=roles, acquire_delay_s=(0.4, 0.5), listen_channel=None)
    async with running(a, b, c):
        await settles([a, b, c], [2, 2, 2])
        role = min(led(a))
        asked = one(superuser, "SELECT pgleaderlock.request_step_down(%s, %s, 'b', 'pgleaderlock') AS id", role, space)
        outcome = "SELECT detail FROM pgleaderlock.requests WHERE request_id = %s"
        await until(lambda: one(superuser, outcome, asked["id"])["detail"] is not None)
        assert one(superuser, outcome, asked["id"])["detail"] == "b leads it"
        await settles([a, b, c], [2, 2, 2])


async def test_work_in_flight_is_waited_for_before_a_role_moves(
    node: Callable[..., LeaderElection], superuser: str, space: str
) -> None:
    a, b = node("a", roles=["role-1", "role-2"]), node("b", roles=["role-1", "role-2"])
    async with a:
        await settles([a], [2])
        with a.gate("role-1").acting(), a.gate("role-2").acting():
            async with b:
                await until(lambda: any(a.draining(role) for role in a.roles))
                await many_beats(superuser, space, 5)
                assert led(b) == set()
                stopping = asyncio.ensure_future(b.shutdown())
                await bounded(stopping)


def test_balance_and_a_wait_at_the_server_do_not_go_together(node: Callable[..., LeaderElection]) -> None:
    with pytest.raises(ConfigurationError, match="balance"):
        node("a", roles="one", standby_wait_s=0.2)
