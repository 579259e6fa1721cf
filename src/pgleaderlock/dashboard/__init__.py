"""The dashboard: who leads, since when, and what happened last night. Read-only.

`app` is the ASGI application: it runs in front of the lock server, or alone. `api` reads the ledger, `feed` reads it
once for all open pages, `logins` keeps the logins, `pages` renders the answers of the JSON API as HTML, and the script
in `static/` fills copies of the same rows with changes. `run` puts it together.

Must never write to a database.
"""
