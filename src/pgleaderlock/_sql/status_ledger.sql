-- What `status` asks of the ledger, if there is one and this role may read it.

-- name: status_has_ledger
-- From the catalogue: asking for a table in a schema that one may not use is an error.
SELECT count(*) = 2 AS present,
       coalesce(bool_and(has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')), false) AS readable
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'pgleaderlock' AND c.relname IN ('leaders', 'sessions')

-- name: status_ledger
-- The role of this key, who leads it by the ledger, and how long ago that one was last heard; by the server's clock.
SELECT l.role,
       l.namespace,
       l.epoch,
       NOT l.ended AS led,
       s.holder_identity,
       s.node_id,
       s.last_heartbeat,
       extract(epoch FROM clock_timestamp() - s.last_heartbeat)::float8 AS heartbeat_age_s,
       l.acquired_at,
       extract(epoch FROM clock_timestamp() - l.acquired_at)::float8 AS acquired_age_s
FROM pgleaderlock.leaders l
LEFT JOIN pgleaderlock.sessions s ON s.session_id = l.session_id AND NOT l.ended
WHERE l.key1 = %(key1)s AND l.key2 = %(key2)s

-- name: status_candidates
-- Nodes of the namespace that would lead and were heard of lately. Which roles each of them is after, no table says.
SELECT s.node_id,
       s.holder_identity,
       s.last_heartbeat,
       extract(epoch FROM clock_timestamp() - s.last_heartbeat)::float8 AS heartbeat_age_s
FROM pgleaderlock.sessions s
WHERE s.namespace = %(namespace)s AND s.candidate AND s.ended_at IS NULL
  AND clock_timestamp() - s.last_heartbeat < make_interval(secs => 2 * s.lease_s)
ORDER BY s.node_id, s.session_id
LIMIT 100
