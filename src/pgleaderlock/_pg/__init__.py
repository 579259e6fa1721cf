"""PostgreSQL: how we connect, which statements we send, and what an error means.

`conninfo` completes a DSN. `connect` opens connections and proves that a session is ours alone. `session` runs named
statements with deadlines on a dedicated session, `lease` sends them through any pooler, `reader` runs them on plain
connections. `listener` waits for notifications, `explain` says what to do about a failure. The SQL is in `sql/`, by
name; `statements` loads it.

Rule: nothing here decides who leads, and no text made here contains a secret of a DSN.
"""
