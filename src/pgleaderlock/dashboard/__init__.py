"""The dashboard: who leads, since when, and what happened last night. Read-only.

`app` is the ASGI application: it stands in front of the lock server, or alone. `api` asks the ledger, `feed` asks it
once for all open pages, `logins` knows who has signed in, `pages` makes HTML of what the JSON API says, and the script
in `static/` fills copies of the same rows with what changes. `run` puts it together.

Must never write to a database.
"""
