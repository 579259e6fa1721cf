"""One role on one session: the state machine and what runs it.

`fsm` is the table of states, `driver` steps through it, `lifecycle` does what a step asks for: it connects, takes the
lock, checks it and releases it, on a session of its own or on one that is lent (`borrowed`). `callbacks` and `work`
tell the application; `guarding` is what the one-shot guards share.

Rule: no transition exists outside the table, and `fsm` imports no other module of the room.
"""
