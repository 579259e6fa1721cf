"""Many roles on one session: the engine behind `LeaderElection`.

`run` holds the parts of one election: its roles and gates, its observers, and the task. In the task, `engine` runs one
tick after the other: send a heartbeat, carry out requests and release (`releasing`), try locks and begin terms
(`winning`), balance (`balancing`). `role` is what this node knows of each role and of its session, `ledger` the
statements, `settings` the frozen settings.

Rules: `role.opens_at` alone decides when a gate opens; a hint never shares a transaction with a decision; the engine
calls the code above it through `role.Owner` only.
"""
