-- What people and dashboards ask of the ledger: roles, nodes, terms, events, requests. Looks only, with a run-time role's
-- right to read the tables. Every list is a page: at most `page_size` rows, from a place that an index finds. Ages are
-- taken from the server's clock alone. What a ledger of version 2 does not have is read as NULL, by way of to_jsonb: a
-- column that is missing would be an error.

-- name: history_ledger
-- From the catalogue: asking for a table in a schema that one may not use is an error.
SELECT count(*) = 6 AS present,
       coalesce(bool_and(has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')), false) AS readable,
       pg_is_in_recovery() AS in_recovery
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'pgleaderlock'
  AND c.relname IN ('schema_version', 'sessions', 'leaders', 'terms', 'events', 'requests')

-- name: history_roles
-- One page of the roles by name, or one of them. Which roles a node is after, no table says: candidates are those of the
-- namespace.
SELECT l.namespace, l.role, l.epoch,
       s.session_id IS NOT NULL AS led,
       s.node_id, s.holder_identity,
       CASE WHEN s.session_id IS NOT NULL THEN l.acquired_at END AS acquired_at,
       CASE WHEN s.session_id IS NOT NULL
            THEN extract(epoch FROM clock_timestamp() - l.acquired_at)::float8 END AS tenure_s,
       s.last_heartbeat,
       extract(epoch FROM clock_timestamp() - s.last_heartbeat)::float8 AS heartbeat_age_s,
       s.lease_s,
       coalesce((to_jsonb(s) ->> 'draining')::boolean, false) AS draining,
       (SELECT count(DISTINCT c.node_id) FROM pgleaderlock.sessions c
        WHERE c.namespace = %(namespace)s AND c.candidate AND c.ended_at IS NULL
          AND clock_timestamp() - c.last_heartbeat < make_interval(secs => c.lease_s)
          AND NOT coalesce((to_jsonb(c) ->> 'draining')::boolean, false)) AS candidates
FROM pgleaderlock.leaders l
LEFT JOIN pgleaderlock.sessions s ON s.session_id = l.session_id AND NOT l.ended AND s.ended_at IS NULL
WHERE l.namespace = %(namespace)s AND l.role > %(after)s AND (%(role)s::text IS NULL OR l.role = %(role)s)
ORDER BY l.role
LIMIT %(page_size)s

-- name: history_nodes
-- Sessions that live, and the last one of each node that does not, if it was heard lately or still leads by the ledger.
-- There are few: what was silent for a week is gone.
SELECT x.* FROM (
    SELECT s.namespace, s.session_id, s.node_id, s.host, s.os_pid, s.holder_identity, s.candidate, s.library_version,
           s.gate_s, s.lease_s, s.beat, s.started_at, s.last_heartbeat, s.ended_at,
           extract(epoch FROM clock_timestamp() - s.last_heartbeat)::float8 AS heartbeat_age_s,
           coalesce((to_jsonb(s) ->> 'draining')::boolean, false) AS draining,
           coalesce((to_jsonb(s) ->> 'balance')::boolean, false) AS balance,
           (SELECT count(*) FROM pgleaderlock.leaders l
            WHERE l.session_id = s.session_id AND NOT l.ended AND s.ended_at IS NULL) AS leads,
           row_number() OVER (PARTITION BY s.node_id ORDER BY s.session_id DESC) = 1 AS latest
    FROM pgleaderlock.sessions s
    WHERE s.namespace = %(namespace)s
) x
WHERE x.ended_at IS NULL AND x.heartbeat_age_s < x.lease_s
   OR x.leads > 0
   OR x.latest AND x.heartbeat_age_s < %(heard_within_s)s
ORDER BY x.node_id, x.session_id
LIMIT %(page_size)s

-- name: history_terms
-- One page of a role's terms, the newest first, each with the one before it. Terms follow each other in time as their
-- epochs do, so a page that is cut short by `since_s` is the last.
SELECT t.namespace, t.role, t.epoch, t.node_id, t.holder_identity, t.began_at, t.ended_at, t.reason,
       extract(epoch FROM coalesce(t.ended_at, clock_timestamp()) - t.began_at)::float8 AS lasted_s,
       p.epoch AS prev_epoch, p.node_id AS prev_node_id, p.reason AS prev_reason,
       extract(epoch FROM t.began_at - p.ended_at)::float8 AS failover_s
FROM (
    SELECT * FROM pgleaderlock.terms o
    WHERE o.namespace = %(namespace)s AND o.role = %(role)s AND o.epoch < %(before_epoch)s
    ORDER BY o.epoch DESC
    LIMIT %(page_size)s
) t
LEFT JOIN LATERAL (
    SELECT o.epoch, o.node_id, o.reason, o.ended_at FROM pgleaderlock.terms o
    WHERE o.namespace = t.namespace AND o.role = t.role AND o.epoch < t.epoch
    ORDER BY o.epoch DESC
    LIMIT 1
) p ON true
WHERE t.ended_at IS NULL OR t.ended_at >= clock_timestamp() - make_interval(secs => %(since_s)s)
ORDER BY t.epoch DESC

-- name: history_events_before
-- One page of events, the newest first.
SELECT e.event_id, e.at, e.kind, e.namespace, e.role, e.node_id, e.epoch, e.detail,
       extract(epoch FROM clock_timestamp() - e.at)::float8 AS age_s
FROM pgleaderlock.events e
WHERE e.event_id < %(before_id)s AND e.namespace = %(namespace)s
  AND (%(role)s::text IS NULL OR e.role = %(role)s)
  AND e.at >= clock_timestamp() - make_interval(secs => %(since_s)s)
ORDER BY e.event_id DESC
LIMIT %(page_size)s

-- name: history_events_after
-- One page of events, the oldest first.
SELECT e.event_id, e.at, e.kind, e.namespace, e.role, e.node_id, e.epoch, e.detail,
       extract(epoch FROM clock_timestamp() - e.at)::float8 AS age_s
FROM pgleaderlock.events e
WHERE e.event_id > %(after_id)s AND e.namespace = %(namespace)s
  AND (%(role)s::text IS NULL OR e.role = %(role)s)
ORDER BY e.event_id
LIMIT %(page_size)s

-- name: history_settled_event
-- Numbers are given out before the commit: below the last event of a minute ago none will appear any more.
SELECT coalesce(max(e.event_id), 0) AS event_id FROM pgleaderlock.events e
WHERE e.at < clock_timestamp() - make_interval(secs => %(late_s)s)

-- name: history_request
-- What became of something that was asked from afar.
SELECT r.request_id, r.at, r.kind, r.namespace, r.role, r.node_id, r.to_node_id, r.asked_by::text AS asked_by, r.done_at,
       to_jsonb(r) ->> 'outcome' AS outcome, to_jsonb(r) ->> 'detail' AS detail
FROM pgleaderlock.requests r
WHERE r.request_id = %(request_id)s

-- name: history_namespaces
-- Who shares this ledger. A loose scan of the key: one step of the index a namespace, however many roles they have.
WITH RECURSIVE found AS (
    (SELECT l.namespace FROM pgleaderlock.leaders l ORDER BY l.namespace LIMIT 1)
    UNION ALL
    SELECT (SELECT l.namespace FROM pgleaderlock.leaders l WHERE l.namespace > f.namespace ORDER BY l.namespace LIMIT 1)
    FROM found f WHERE f.namespace IS NOT NULL
)
SELECT f.namespace FROM found f WHERE f.namespace IS NOT NULL LIMIT %(page_size)s

-- name: history_ask_step_down
SELECT pgleaderlock.request_step_down(%(role)s, %(namespace)s, %(to_node_id)s, %(channel)s) AS request_id

-- name: history_ask_drain
SELECT pgleaderlock.request_drain(%(node_id)s, %(namespace)s, %(channel)s) AS request_id

-- name: history_ask_resume
SELECT pgleaderlock.request_resume(%(node_id)s, %(namespace)s, %(channel)s) AS request_id
