-- What the dashboard asks of the ledger, beside what is in history.sql. Looks only: SELECT on schema_version, sessions,
-- leaders, terms and events is enough. Every list is a page from a place that an index finds. Times are milliseconds since
-- 1970 and ages come from the server's clock alone. now() and not clock_timestamp(), where an index is to be used.

-- name: dashboard_leaders
-- One page of roles by name. The last term of each and the one before are two steps in the index of terms; events are asked
-- twice: for the few releases of the last minutes that were not clean, after which a successor waits, too; and for the
-- drains of single roles that began within the last hour. A drain of a whole node is in its session.
WITH page AS MATERIALIZED (
    SELECT l.namespace, l.role, l.epoch, l.session_id, l.ended, l.wait_t
    FROM pgleaderlock.leaders l
    WHERE l.namespace = %(namespace)s AND l.role > %(after)s AND starts_with(l.role, %(prefix)s)
    ORDER BY l.role
    LIMIT %(page_size)s
), unclean AS MATERIALIZED (
    SELECT e.role, e.epoch FROM pgleaderlock.events e
    WHERE e.at > now() - (SELECT least(max(p.wait_t), 3600) FROM page p) * interval '1 second'
      AND e.namespace = %(namespace)s AND e.kind = 'released' AND e.detail = 'not clean'
), drains AS MATERIALIZED (
    SELECT e.role, e.node_id, max(e.at) AS at FROM pgleaderlock.events e
    WHERE e.at > now() - interval '1 hour' AND e.namespace = %(namespace)s AND e.kind = 'drain_began'
    GROUP BY e.role, e.node_id
)
SELECT l.namespace, l.role, l.epoch, l.wait_t,
       (extract(epoch FROM now()) * 1000)::bigint AS now_ms,
       s.node_id, s.gate_s, s.lease_s,
       coalesce((to_jsonb(s) ->> 'draining')::boolean, false)
           OR EXISTS (SELECT FROM drains d WHERE d.role = l.role AND d.node_id = s.node_id AND d.at >= t.began_at) AS draining,
       extract(epoch FROM now() - s.last_heartbeat)::float8 AS heartbeat_age_s,
       extract(epoch FROM now() - s.started_at)::float8 AS session_age_s,
       (extract(epoch FROM t.began_at) * 1000)::bigint AS began_ms,
       (extract(epoch FROM t.ended_at) * 1000)::bigint AS ended_ms,
       t.reason,
       (extract(epoch FROM greatest(t.began_at, ts.last_heartbeat)) * 1000)::bigint AS last_sign_ms,
       p.epoch IS NOT NULL AS has_prev, p.reason AS prev_reason,
       extract(epoch FROM now() - p.ended_at)::float8 AS prev_ended_age_s,
       ps.instance = s.instance AS prev_is_self,
       EXISTS (SELECT FROM unclean u WHERE u.role = l.role AND u.epoch = p.epoch) AS prev_unclean,
       (SELECT count(DISTINCT c.node_id) FROM pgleaderlock.sessions c
        WHERE c.namespace = %(namespace)s AND c.candidate AND c.ended_at IS NULL
          AND now() - c.last_heartbeat < make_interval(secs => c.lease_s)
          AND NOT coalesce((to_jsonb(c) ->> 'draining')::boolean, false)) AS candidates
FROM page l
LEFT JOIN pgleaderlock.sessions s ON s.session_id = l.session_id AND NOT l.ended AND s.ended_at IS NULL
LEFT JOIN LATERAL (
    SELECT o.epoch, o.began_at, o.ended_at, o.reason, o.session_id FROM pgleaderlock.terms o
    WHERE o.namespace = l.namespace AND o.role = l.role
    ORDER BY o.epoch DESC LIMIT 1
) t ON true
LEFT JOIN pgleaderlock.sessions ts ON ts.session_id = t.session_id AND t.ended_at IS NULL
LEFT JOIN LATERAL (
    SELECT o.epoch, o.ended_at, o.reason, o.session_id FROM pgleaderlock.terms o
    WHERE o.namespace = l.namespace AND o.role = l.role AND o.epoch < t.epoch
    ORDER BY o.epoch DESC LIMIT 1
) p ON true
LEFT JOIN pgleaderlock.sessions ps ON ps.session_id = p.session_id
ORDER BY l.role

-- name: dashboard_terms
-- One page of a role's terms, the newest first, each with the end of the one before. Terms follow each other in time as
-- their epochs do: whoever is not interested in what ended before some moment stops at the first such term. Of a term that is
-- open, what is known about its session, too.
SELECT t.epoch, t.node_id, t.reason,
       (extract(epoch FROM t.began_at) * 1000)::bigint AS began_ms,
       (extract(epoch FROM t.ended_at) * 1000)::bigint AS ended_ms,
       (extract(epoch FROM t.began_at - p.ended_at) * 1000)::bigint AS gap_ms,
       s.ended_at IS NULL AND now() - s.last_heartbeat <= make_interval(secs => s.lease_s) AS live,
       (extract(epoch FROM greatest(t.began_at, s.last_heartbeat)) * 1000)::bigint AS last_sign_ms
FROM (
    SELECT o.namespace, o.role, o.epoch, o.node_id, o.reason, o.began_at, o.ended_at, o.session_id FROM pgleaderlock.terms o
    WHERE o.namespace = %(namespace)s AND o.role = %(role)s AND o.epoch < %(before_epoch)s
      AND o.began_at <= to_timestamp(%(to_ms)s / 1000.0)
    ORDER BY o.epoch DESC
    LIMIT %(page_size)s
) t
LEFT JOIN pgleaderlock.sessions s ON s.session_id = t.session_id AND t.ended_at IS NULL
LEFT JOIN LATERAL (
    SELECT o.ended_at FROM pgleaderlock.terms o
    WHERE o.namespace = t.namespace AND o.role = t.role AND o.epoch < t.epoch
    ORDER BY o.epoch DESC LIMIT 1
) p ON true
ORDER BY t.epoch DESC

-- name: dashboard_role_known
SELECT EXISTS (SELECT FROM pgleaderlock.leaders l WHERE l.namespace = %(namespace)s AND l.role = %(role)s)
    OR EXISTS (SELECT FROM pgleaderlock.terms t WHERE t.namespace = %(namespace)s AND t.role = %(role)s) AS known

-- name: dashboard_events_before
-- One page of events, the newest first.
SELECT e.event_id, (extract(epoch FROM e.at) * 1000)::bigint AS at_ms, e.kind, e.role, e.node_id, e.epoch, e.detail
FROM pgleaderlock.events e
WHERE e.event_id < %(before_id)s AND e.namespace = %(namespace)s
  AND (%(role)s::text IS NULL OR e.role = %(role)s) AND (%(node)s::text IS NULL OR e.node_id = %(node)s)
ORDER BY e.event_id DESC
LIMIT %(page_size)s

-- name: dashboard_events_after
-- One page of events, the oldest first.
SELECT e.event_id, (extract(epoch FROM e.at) * 1000)::bigint AS at_ms, e.kind, e.role, e.node_id, e.epoch, e.detail
FROM pgleaderlock.events e
WHERE e.event_id > %(after_id)s AND e.namespace = %(namespace)s
  AND (%(role)s::text IS NULL OR e.role = %(role)s) AND (%(node)s::text IS NULL OR e.node_id = %(node)s)
ORDER BY e.event_id
LIMIT %(page_size)s

-- name: dashboard_nodes
-- Sessions that live or lead, and the last one of each node that was heard within the last hour.
SELECT x.* FROM (
    SELECT s.namespace, s.session_id, s.node_id, s.host, s.library_version, s.candidate,
           (extract(epoch FROM s.started_at) * 1000)::bigint AS started_ms,
           (extract(epoch FROM now()) * 1000)::bigint AS now_ms,
           extract(epoch FROM now() - s.last_heartbeat)::float8 AS heartbeat_age_s,
           s.ended_at IS NULL AND now() - s.last_heartbeat <= make_interval(secs => s.lease_s) AS live,
           coalesce((to_jsonb(s) ->> 'draining')::boolean, false) AS draining,
           (SELECT count(*) FROM pgleaderlock.leaders l
            WHERE l.session_id = s.session_id AND NOT l.ended AND s.ended_at IS NULL) AS roles,
           row_number() OVER (PARTITION BY s.node_id ORDER BY s.session_id DESC) = 1 AS latest
    FROM pgleaderlock.sessions s
    WHERE s.namespace = %(namespace)s
) x
WHERE (x.live OR x.roles > 0 OR x.latest AND x.heartbeat_age_s < %(heard_within_s)s)
  AND (x.node_id, x.session_id) > (%(after_node_id)s, %(after_session_id)s)
ORDER BY x.node_id, x.session_id
LIMIT %(page_size)s
