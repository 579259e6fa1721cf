"""The lock server's store in PostgreSQL, for several servers at once.

`store` takes requests, `pool` sends statements over a few connections, `waiting` keeps those who wait and learns of
releases. Rule: an unknown outcome closes the connection and is reported as unknown.
"""
