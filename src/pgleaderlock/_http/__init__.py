"""HTTP/1.1 for the lock server and the dashboard. Needs the extra `server`.

`server` accepts connections, `protocol` turns their bytes into requests, `access` says who may ask, `answers` builds
what is sent back, `openapi` describes it. Rule: everything that a client sends has a bound, in size and in time.
"""
