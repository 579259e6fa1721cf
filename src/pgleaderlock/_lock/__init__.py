"""One role on one session: the state machine and what runs it.

`fsm` is the table of states, and `driver` steps through it. `lifecycle` does the I/O of each state: it connects, takes
the lock, checks it and releases it, on its own session or on a connection of the caller (`borrowed`). `callbacks` and
`work` run the application's code; `guarding` is what the one-shot guards share.

Rule: no transition exists outside the table, and `fsm` imports no other module of the room.
"""
