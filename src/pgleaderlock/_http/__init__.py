"""HTTP/1.1 for the lock server and the dashboard. Needs the extra `server`.

`server` accepts connections, `protocol` parses requests, `access` checks tokens and hosts, `answers` builds responses,
`openapi` describes the API. Rule: everything that a client sends is bounded, in size and in time.
"""
