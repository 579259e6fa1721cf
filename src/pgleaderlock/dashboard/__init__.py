"""The dashboard: who leads, since when, and what happened last night. Read-only.

`app` is the ASGI application: it stands in front of the lock server, or alone. `_queries` asks the ledger, `feed` asks
it once for all open pages, `sessions` knows who has signed in, `pages` makes HTML of what the JSON API says.

May import `server` and `_http`; nothing but `cli` imports it. Must never write to a database.
"""
