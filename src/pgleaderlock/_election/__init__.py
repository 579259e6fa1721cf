"""Many roles on one session: the engine behind `LeaderElection`.

`run` holds the parts of one election: its roles and gates, who hears of it, and the task. In the task `engine` goes
from tick to tick: beat, obey requests and release (`releasing`), try locks and begin terms (`winning`), balance
(`balancing`). `role` is what this node knows of each role and of its session, `ledger` the statements, `settings` the
values that all of them run on.

Rules: a gate opens only by `role.opens_at`; a hint never shares a transaction with a decision; `role.Owner` is all that
the engine calls above itself.
"""
