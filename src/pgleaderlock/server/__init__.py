"""The lock server: leases with fencing tokens over HTTP. Needs the extra `server`.

A request goes from `_http.protocol` to `app` (admits and decodes it, with `wire`), to `service` (waiters, metrics,
log), and through `Store.submit` to one of the two stores (`sqlite`, `postgres`). The reply comes back through
callbacks. `run` puts all of it together. Rule: only a store decides about a lock, and a grant is answered only when it
is durable.
"""
