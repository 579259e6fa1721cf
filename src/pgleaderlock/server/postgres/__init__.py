"""The lock server's store in PostgreSQL, for several servers at once.

`store` takes requests, `pool` sends statements over a few connections, `waiting` keeps the waiting requests and listens
for releases. Rule: a statement with an unknown outcome closes the connection, and the outcome is reported as unknown.
"""
