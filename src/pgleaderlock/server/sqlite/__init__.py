"""The lock server's store in one SQLite file.

`store` takes requests, `writer` runs the requests that have gathered in one transaction, `locks` has the rules,
`waiting` the waiting requests, `file` the database file and its claim, `mark` the ceiling of all tokens in case the log
is lost. Rule: no reply before the commit has returned.
"""
