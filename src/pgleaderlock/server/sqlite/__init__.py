"""The lock server's store in one SQLite file.

`store` takes requests, `writer` runs all that have gathered in one transaction, `locks` holds the rules, `waiting`
those who wait, `file` the database file and its claim, `mark` how high tokens are if the log is lost. Rule: no reply
before the commit has returned.
"""
