"""How an application is tested without a database: run it with `pytest examples/test_with_fakes.py`.

Needs pytest, pytest-asyncio for the async test, and `pgleaderlock[embedded]` for the last one.
"""

from typing import Any

import pytest

from pgleaderlock import NotLeader


# -- the application
class Billing:
    """Sends invoices, one process at a time. It is given its election, so that a test can give it a fake."""

    def __init__(self, election: Any) -> None:
        self.gate = election.gate("billing")
        self.sent: list[int] = []

    def send(self, invoice: int) -> None:
        self.gate.require_leader()
        self.sent.append(invoice)


# -- shown in docs/testing.md
def test_an_invoice_is_sent_by_the_leader_only(sync_fake_election: Any) -> None:
    with sync_fake_election("billing") as election:
        billing = Billing(election)
        with pytest.raises(NotLeader):
            billing.send(1)  # another node leads
        election.win()
        billing.send(2)
        election.pause(60)  # the process was suspended: its first call afterwards must be refused
        with pytest.raises(NotLeader):
            billing.send(3)
        assert billing.sent == [2]


@pytest.mark.asyncio
async def test_a_late_heartbeat_delays_an_invoice(fake_election: Any) -> None:
    async with fake_election("billing") as election:
        billing = Billing(election)
        await election.win()
        election.late()
        with pytest.raises(NotLeader, match="no heartbeat"):
            billing.send(1)
        await election.recover()
        billing.send(1)
        assert billing.sent == [1]


def test_a_successor_has_a_higher_epoch(sync_leader_election: Any) -> None:
    with sync_leader_election("billing") as first, sync_leader_election("billing") as second:
        assert first.gate("billing").wait_open(30)
        epoch = first.gate("billing").current_epoch
        first.shutdown()
        assert second.gate("billing").wait_open(30)
        assert second.gate("billing").current_epoch == epoch + 1


# -- until here
