-- What history, status and dashboard read of the ledger: roles, candidates, nodes, terms, slots, events, requests. They
-- need only SELECT on its tables. Every list is a page of at most `page_size` rows, whose start an index finds. Ages
-- come from the server's clock alone. Times are returned as timestamps and, for programs, as milliseconds since 1970.

-- name: history_ledger
-- Is there a ledger, and may this role read it? Read from the catalogue, because naming a table in a schema that the
-- role may not use is an error.
SELECT count(*) = 6 AS present,
       coalesce(bool_and(has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')), false) AS readable,
       pg_is_in_recovery() AS in_recovery
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'pgleaderlock'
  AND c.relname IN ('schema_version', 'sessions', 'leaders', 'terms', 'events', 'requests')

-- name: live_candidates
-- The candidates of a namespace, one row per run of an election: heard within its own lease, not draining, not ended.
-- Two processes with one node_id are two candidates. With `role`: those that compete for that role. Every view that
-- shows candidates includes this statement, so that all of them agree. `wants`: the roles that the candidate competes
-- for; NULL if it has not declared any (a library of version 4), and then it counts for every role. There is no limit,
-- because each row has its own connection. (`status` also reads ledgers of version 2, which have neither `draining` nor
-- `wants`: hence the access through JSON.)
SELECT * FROM (
    SELECT DISTINCT ON (s.node_id, s.instance) s.node_id, s.holder_identity, s.last_heartbeat,
           extract(epoch FROM clock_timestamp() - s.last_heartbeat)::float8 AS heartbeat_age_s,
           nullif(to_jsonb(s) -> 'wants', 'null') AS wants
    FROM pgleaderlock.sessions s
    WHERE s.namespace = %(namespace)s AND s.candidate AND s.ended_at IS NULL
      AND clock_timestamp() - s.last_heartbeat <= make_interval(secs => s.lease_s)
      AND NOT coalesce((to_jsonb(s) ->> 'draining')::boolean, false)
    ORDER BY s.node_id, s.instance, s.session_id DESC
) live
WHERE %(role)s::text IS NULL OR coalesce(live.wants ? %(role)s, true)

-- name: role_forgotten
-- Has an operator forgotten the role of the row `l`, and has no node led it since? A role that is led is not forgotten.
-- A ledger of version 4 does not have the column: hence the access through JSON.
SELECT CASE WHEN to_jsonb(l) ->> 'forgotten_epoch' IS NULL THEN false
            ELSE (to_jsonb(l) ->> 'forgotten_epoch')::bigint >= (
                     SELECT coalesce(max(o.epoch), 0) FROM pgleaderlock.terms o
                     WHERE o.namespace = l.namespace AND o.role = l.role)
                 AND NOT EXISTS (
                     SELECT FROM pgleaderlock.sessions s
                     WHERE s.session_id = l.session_id AND NOT l.ended AND s.ended_at IS NULL
                       AND clock_timestamp() - s.last_heartbeat <= make_interval(secs => s.lease_s)) END AS forgotten

-- name: term_gate
-- What the ledger has recorded of the gate of the term `t`. A ledger of version 4 has none of these columns: hence the
-- access through JSON. The time in which the leader could act is that of the gate; if nothing is recorded of the gate,
-- it is the whole term. `acts_to` is NULL while the leader can act, and if it never could.
SELECT x.gate, x.opened_at, x.shut_at, x.opens_at, x.in_flight, x.work_failed, x.gaps,
       CASE WHEN x.gate IS NULL THEN t.began_at ELSE x.opened_at END AS acts_from,
       CASE WHEN x.gate IS NULL THEN t.ended_at
            WHEN x.opened_at IS NULL THEN NULL
            WHEN x.shut_at IS NOT NULL THEN x.shut_at
            WHEN t.ended_at IS NOT NULL THEN greatest(x.opened_at, t.ended_at) END AS acts_to
FROM jsonb_to_record(to_jsonb(t)) AS x (
    gate text, opened_at timestamptz, shut_at timestamptz, opens_at timestamptz, in_flight integer, work_failed boolean,
    gaps jsonb)

-- name: history_roles
-- One page of the roles by name, or a single role, each with its state. The state of a role is decided here and nowhere
-- else; everything that shows a state reads it from this statement. A page leaves out forgotten roles, unless they are
-- asked for. The last term of each role and the one before are two steps in the index of terms. A leader of version 4
-- does not report its gate: then its wait is derived from the term before.
WITH page AS MATERIALIZED (
    SELECT l.namespace, l.role, l.epoch, l.session_id, l.ended, l.wait_t, l.acquired_at, f.forgotten
    FROM pgleaderlock.leaders l
    CROSS JOIN LATERAL (
        -- include: role_forgotten
    ) f
    WHERE l.namespace = %(namespace)s AND l.role > %(after)s AND starts_with(l.role, %(prefix)s)
      AND (%(role)s::text IS NULL OR l.role = %(role)s)
      AND (NOT f.forgotten OR %(with_forgotten)s OR %(role)s::text IS NOT NULL)
    ORDER BY l.role
    LIMIT %(page_size)s
), live AS MATERIALIZED (
    -- include: live_candidates
), wanted AS MATERIALIZED (
    SELECT w.role, count(*) AS candidates FROM live c, jsonb_array_elements_text(c.wants) AS w (role) GROUP BY w.role
), away AS MATERIALIZED (
    SELECT d.node_id, nullif(to_jsonb(d) -> 'wants', 'null') AS wants FROM pgleaderlock.sessions d
    WHERE d.namespace = %(namespace)s AND d.candidate AND d.draining AND d.ended_at IS NULL
      AND clock_timestamp() - d.last_heartbeat <= make_interval(secs => d.lease_s)
)
SELECT x.*,
       CASE
           WHEN x.forgotten THEN 'forgotten'
           WHEN NOT x.live THEN 'nobody'
           WHEN x.heartbeat_age_s > x.gate_s OR x.gate = 'late_heartbeat' THEN 'late'
           WHEN x.draining THEN 'draining'
           WHEN x.work_failed THEN 'work_failed'
           WHEN x.opens_at > x.now THEN 'waiting'
           WHEN x.gate IN ('open', 'waiting') OR x.gate IS NULL THEN 'acting'
           ELSE 'vetoed' END AS state,
       e.state_since,
       extract(epoch FROM x.now - e.state_since)::float8 AS state_age_s,
       CASE WHEN x.live AND x.opens_at > x.now THEN extract(epoch FROM x.opens_at - x.now)::float8 END AS opens_in_s,
       (extract(epoch FROM x.now) * 1000)::bigint AS now_ms,
       (extract(epoch FROM x.began_at) * 1000)::bigint AS began_ms,
       (extract(epoch FROM x.ended_at) * 1000)::bigint AS ended_ms,
       (extract(epoch FROM x.last_sign) * 1000)::bigint AS last_sign_ms,
       coalesce(w.candidates, 0) + (SELECT count(*) FROM live c WHERE c.wants IS NULL) AS candidates,
       CASE WHEN x.live THEN '{}' ELSE
           (SELECT coalesce(array_agg(DISTINCT d.node_id ORDER BY d.node_id), '{}') FROM away d
            WHERE coalesce(d.wants ? x.role, true)) END AS drained,
       EXISTS (SELECT FROM pgleaderlock.sessions n
               WHERE n.namespace = %(namespace)s AND n.candidate AND n.ended_at IS NULL
                 AND clock_timestamp() - n.last_heartbeat <= make_interval(secs => n.lease_s)) AS nodes_live
FROM (
    SELECT c.now, l.namespace, l.role, l.epoch, l.forgotten,
           s.session_id IS NOT NULL AS led,
           s.session_id IS NOT NULL AND c.now - s.last_heartbeat <= make_interval(secs => s.lease_s) AS live,
           s.node_id, s.holder_identity, s.gate_s, s.lease_s, s.last_heartbeat,
           -- A ledger of version 4 has no leases: hence the access through JSON.
           CASE WHEN s.session_id IS NOT NULL THEN coalesce(to_jsonb(s) ->> 'hold', 'session') END AS hold,
           CASE WHEN s.session_id IS NOT NULL THEN l.acquired_at END AS acquired_at,
           CASE WHEN s.session_id IS NOT NULL THEN extract(epoch FROM c.now - l.acquired_at)::float8 END AS tenure_s,
           extract(epoch FROM c.now - s.last_heartbeat)::float8 AS heartbeat_age_s,
           coalesce(s.draining, false) OR coalesce(s.session_id IS NOT NULL AND g.gate = 'draining', false) AS draining,
           coalesce(s.draining, false) AS node_drains,
           g.gate, g.in_flight, g.shut_at, g.acts_from, g.acts_to,
           coalesce(g.work_failed, false) AS work_failed,
           t.began_at, t.ended_at, t.reason, t.node_id AS last_node_id,
           greatest(t.began_at, ts.last_heartbeat) AS last_sign,
           p.node_id AS prev_node_id, p.reason AS prev_reason,
           CASE
               WHEN g.gate IS NOT NULL THEN g.opens_at
               WHEN p.reason IS NULL OR p.reason = 'released' OR ps.instance = s.instance THEN NULL
               WHEN p.reason = 'superseded' THEN t.began_at + make_interval(secs => l.wait_t)
               ELSE greatest(p.ended_at, s.started_at) + make_interval(secs => l.wait_t) END AS opens_at
    FROM page l
    CROSS JOIN (SELECT clock_timestamp() AS now) c
    LEFT JOIN pgleaderlock.sessions s ON s.session_id = l.session_id AND NOT l.ended AND s.ended_at IS NULL
    LEFT JOIN LATERAL (
        SELECT * FROM pgleaderlock.terms o
        WHERE o.namespace = l.namespace AND o.role = l.role
        ORDER BY o.epoch DESC LIMIT 1
    ) t ON true
    LEFT JOIN LATERAL (
        -- include: term_gate
    ) g ON true
    LEFT JOIN pgleaderlock.sessions ts ON ts.session_id = t.session_id AND t.ended_at IS NULL
    LEFT JOIN LATERAL (
        SELECT o.node_id, o.ended_at, o.reason, o.session_id FROM pgleaderlock.terms o
        WHERE o.namespace = l.namespace AND o.role = l.role AND o.epoch < t.epoch
        ORDER BY o.epoch DESC LIMIT 1
    ) p ON true
    LEFT JOIN pgleaderlock.sessions ps ON ps.session_id = p.session_id
) x
CROSS JOIN LATERAL (
    SELECT CASE
        WHEN NOT x.live THEN coalesce(x.acts_to, x.last_sign)
        WHEN x.heartbeat_age_s > x.gate_s THEN x.last_heartbeat + make_interval(secs => x.gate_s)
        ELSE coalesce(x.shut_at, x.acts_from, x.began_at) END AS state_since
) e
LEFT JOIN wanted w ON w.role = x.role
ORDER BY x.role

-- name: history_nodes
-- One page of sessions, by node: those that live or lead according to the ledger, and the last session of each node
-- that was heard lately. There are few, because a session that was silent for a week is deleted. `name_shared`: several
-- live sessions have this node_id at the same time, because an older one was heard after a newer one had begun. A
-- restarted node does not count as such.
SELECT y.* FROM (
SELECT x.*,
       x.live AND bool_or(x.live AND x.started_at < x.newest_at AND x.last_heartbeat > x.newest_at)
           OVER (PARTITION BY x.node_id) AS name_shared
FROM (
    SELECT s.namespace, s.session_id, s.node_id, s.host, s.os_pid, s.holder_identity, s.candidate, s.library_version,
           s.gate_s, s.lease_s, s.beat, s.started_at, s.last_heartbeat, s.ended_at, s.draining, s.balance,
           coalesce(to_jsonb(s) ->> 'hold', 'session') AS hold,
           (extract(epoch FROM s.started_at) * 1000)::bigint AS started_ms,
           (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms,
           extract(epoch FROM clock_timestamp() - s.last_heartbeat)::float8 AS heartbeat_age_s,
           s.ended_at IS NULL AND clock_timestamp() - s.last_heartbeat <= make_interval(secs => s.lease_s) AS live,
           (SELECT count(*) FROM pgleaderlock.leaders l
            WHERE l.session_id = s.session_id AND NOT l.ended AND s.ended_at IS NULL) AS leads,
           jsonb_array_length(nullif(to_jsonb(s) -> 'wants', 'null')) AS wants,
           min(s.started_at) OVER (PARTITION BY s.node_id, s.instance) AS process_started_at,
           (SELECT r.kind FROM pgleaderlock.requests r
            WHERE r.namespace = s.namespace AND r.node_id = s.node_id AND r.done_at IS NULL AND s.ended_at IS NULL
            ORDER BY r.request_id DESC LIMIT 1) AS requested,
           row_number() OVER (PARTITION BY s.node_id ORDER BY s.session_id DESC) = 1 AS latest,
           max(s.started_at) FILTER (
               WHERE s.ended_at IS NULL AND clock_timestamp() - s.last_heartbeat <= make_interval(secs => s.lease_s)
           ) OVER (PARTITION BY s.node_id) AS newest_at
    FROM pgleaderlock.sessions s
    WHERE s.namespace = %(namespace)s
) x
) y
WHERE (y.live OR y.leads > 0 OR y.latest AND y.heartbeat_age_s < %(heard_within_s)s)
  AND (y.node_id, y.session_id) > (%(after_node_id)s, %(after_session_id)s)
ORDER BY y.node_id, y.session_id
LIMIT %(page_size)s

-- name: history_terms
-- One page of a role's terms, newest first, each with the last term before it in which a leader could act and, for an
-- open term, what is known about its session. `failover_s` is the time from the last moment at which a leader could act
-- to the next such moment, or up to now while the leader still waits. Terms are in the order of their epochs, so a page
-- that `since_s` cuts short is the last one.
SELECT t.namespace, t.role, t.epoch, t.node_id, t.holder_identity, t.began_at, t.ended_at, t.reason,
       extract(epoch FROM coalesce(t.ended_at, clock_timestamp()) - t.began_at)::float8 AS lasted_s,
       g.opened_at, g.shut_at,
       shut.s AS shut_s,
       p.epoch AS prev_epoch, p.node_id AS prev_node_id, p.reason AS prev_reason,
       gap.s AS failover_s,
       (extract(epoch FROM t.began_at) * 1000)::bigint AS began_ms,
       (extract(epoch FROM t.ended_at) * 1000)::bigint AS ended_ms,
       (extract(epoch FROM g.acts_from) * 1000)::bigint AS opened_ms,
       (extract(epoch FROM g.shut_at) * 1000)::bigint AS shut_ms,
       coalesce(g.gaps, '[]') AS gaps,
       (gap.s * 1000)::bigint AS gap_ms,
       p.acts_to AS nobody_since,
       CASE WHEN t.ended_at IS NULL AND NOT coalesce(
                s.ended_at IS NULL AND clock_timestamp() - s.last_heartbeat <= make_interval(secs => s.lease_s), false)
            THEN greatest(t.began_at, s.last_heartbeat) END AS silent_since,
       s.ended_at IS NULL AND clock_timestamp() - s.last_heartbeat <= make_interval(secs => s.lease_s) AS live,
       (extract(epoch FROM greatest(t.began_at, s.last_heartbeat)) * 1000)::bigint AS last_sign_ms
FROM (
    SELECT * FROM pgleaderlock.terms o
    WHERE o.namespace = %(namespace)s AND o.role = %(role)s AND o.epoch < %(before_epoch)s
      AND o.began_at <= to_timestamp(%(to_ms)s / 1000.0)
    ORDER BY o.epoch DESC
    LIMIT %(page_size)s
) t
CROSS JOIN LATERAL (
    -- include: term_gate
) g
LEFT JOIN pgleaderlock.sessions s ON s.session_id = t.session_id AND t.ended_at IS NULL
LEFT JOIN LATERAL (
    SELECT t.epoch, t.node_id, t.reason, g.acts_to
    FROM (SELECT * FROM pgleaderlock.terms o
          WHERE o.namespace = t.namespace AND o.role = t.role AND o.epoch < t.epoch
            AND (to_jsonb(o) ->> 'gate' IS NULL OR to_jsonb(o) ->> 'opened_at' IS NOT NULL)
          ORDER BY o.epoch DESC
          LIMIT 1) t
    CROSS JOIN LATERAL (
        -- include: term_gate
    ) g
) p ON true
CROSS JOIN LATERAL (
    SELECT extract(epoch FROM coalesce(g.acts_from, CASE WHEN t.ended_at IS NULL THEN clock_timestamp() END)
                              - p.acts_to)::float8 AS s
) gap
CROSS JOIN LATERAL (
    SELECT coalesce(sum((e.gap ->> 1)::bigint - (e.gap ->> 0)::bigint), 0)::float8 / 1000
           + CASE WHEN t.ended_at IS NULL AND g.shut_at IS NOT NULL
                  THEN extract(epoch FROM clock_timestamp() - g.shut_at)::float8 ELSE 0 END AS s
    FROM jsonb_array_elements(coalesce(g.gaps, '[]')) AS e (gap)
) shut
WHERE t.ended_at IS NULL OR t.ended_at >= clock_timestamp() - make_interval(secs => %(since_s)s)
ORDER BY t.epoch DESC

-- name: history_slots_readable
-- A ledger of version 4 has no slots, and a role with the privileges for that version may not be allowed to read slots.
SELECT count(*) = 1 AS present, coalesce(bool_and(has_table_privilege(c.oid, 'SELECT')), false) AS readable
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'pgleaderlock' AND c.relname = 'slots'

-- name: history_slots
-- The newest slots of a name; without a name, the newest slot of each, by a loose index scan: one step per name,
-- however many slots each has. A slot without an outcome is running as long as its runner leads in a live session.
WITH RECURSIVE names AS (
    (SELECT s.name FROM pgleaderlock.slots s
     WHERE s.namespace = %(namespace)s AND (%(slot_name)s::text IS NULL OR s.name = %(slot_name)s)
     ORDER BY s.name LIMIT 1)
    UNION ALL
    SELECT (SELECT s.name FROM pgleaderlock.slots s
            WHERE s.namespace = %(namespace)s AND %(slot_name)s::text IS NULL AND s.name > f.name
            ORDER BY s.name LIMIT 1)
    FROM names f WHERE f.name IS NOT NULL
)
SELECT s.name, s.slot, s.epoch, s.attempts, s.holder_identity, s.claimed_at, s.ended_at, s.detail,
       (SELECT t.node_id FROM pgleaderlock.terms t
        WHERE t.namespace = s.namespace AND t.role = s.name AND t.epoch = s.epoch) AS node_id,
       extract(epoch FROM clock_timestamp() - s.claimed_at)::float8 AS age_s,
       (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms,
       coalesce(s.outcome, CASE WHEN EXISTS (
           SELECT FROM pgleaderlock.leaders l JOIN pgleaderlock.sessions o ON o.session_id = l.session_id
           WHERE l.namespace = s.namespace AND l.role = s.name AND l.epoch = s.epoch AND NOT l.ended
             AND o.ended_at IS NULL AND clock_timestamp() - o.last_heartbeat <= make_interval(secs => o.lease_s)
       ) THEN 'running' ELSE 'lost' END) AS state
FROM names f
CROSS JOIN LATERAL (
    SELECT * FROM pgleaderlock.slots o
    WHERE o.namespace = %(namespace)s AND o.name = f.name
    ORDER BY o.claimed_at DESC
    LIMIT CASE WHEN %(slot_name)s::text IS NULL THEN 1 ELSE %(page_size)s END
) s
ORDER BY s.claimed_at DESC, s.name
LIMIT %(page_size)s

-- name: history_now
SELECT clock_timestamp() AS now

-- name: history_changed_roles
-- The roles (or one role) with a term that has ended lately, and the roles whose leader was not heard within its lease:
-- if no other node is left, its term stays open. Reads all terms of the namespace in one query, instead of one per
-- role.
SELECT t.role, coalesce(f.forgotten, false) AS forgotten
FROM (
    SELECT o.role FROM pgleaderlock.terms o
    LEFT JOIN pgleaderlock.sessions s ON s.session_id = o.session_id AND o.ended_at IS NULL
    WHERE o.namespace = %(namespace)s
      AND (o.ended_at >= clock_timestamp() - make_interval(secs => %(since_s)s)
           OR o.ended_at IS NULL AND NOT coalesce(
               s.ended_at IS NULL AND clock_timestamp() - s.last_heartbeat <= make_interval(secs => s.lease_s), false))
      AND (%(role)s::text IS NULL OR o.role = %(role)s)
    GROUP BY o.role
) t
LEFT JOIN pgleaderlock.leaders l ON l.namespace = %(namespace)s AND l.role = t.role
LEFT JOIN LATERAL (
    -- include: role_forgotten
) f ON l.role IS NOT NULL
ORDER BY t.role

-- name: history_events_before
-- One page of events, newest first.
SELECT e.event_id, e.at, e.kind, e.namespace, e.role, e.node_id, e.epoch, e.detail,
       (extract(epoch FROM e.at) * 1000)::bigint AS at_ms, extract(epoch FROM clock_timestamp() - e.at)::float8 AS age_s
FROM pgleaderlock.events e
WHERE e.event_id < %(before_id)s AND e.namespace = %(namespace)s
  AND (%(role)s::text IS NULL OR e.role = %(role)s) AND (%(node)s::text IS NULL OR e.node_id = %(node)s)
  AND e.at >= clock_timestamp() - make_interval(secs => %(since_s)s)
  AND e.at BETWEEN to_timestamp(%(from_ms)s / 1000.0) AND to_timestamp(%(to_ms)s / 1000.0)
ORDER BY e.event_id DESC
LIMIT %(page_size)s

-- name: history_events_after
-- One page of events, oldest first.
SELECT e.event_id, e.at, e.kind, e.namespace, e.role, e.node_id, e.epoch, e.detail,
       (extract(epoch FROM e.at) * 1000)::bigint AS at_ms, extract(epoch FROM clock_timestamp() - e.at)::float8 AS age_s
FROM pgleaderlock.events e
WHERE e.event_id > %(after_id)s AND e.namespace = %(namespace)s
  AND (%(role)s::text IS NULL OR e.role = %(role)s) AND (%(node)s::text IS NULL OR e.node_id = %(node)s)
  AND e.at BETWEEN to_timestamp(%(from_ms)s / 1000.0) AND to_timestamp(%(to_ms)s / 1000.0)
ORDER BY e.event_id
LIMIT %(page_size)s

-- name: history_settled_event
-- The last event_id of a minute ago. Ids are assigned before the commit, so events may appear out of order; but below
-- this id, no new one will appear.
SELECT coalesce(max(e.event_id), 0) AS event_id FROM pgleaderlock.events e
WHERE e.at < clock_timestamp() - make_interval(secs => %(late_s)s)

-- name: history_request
SELECT r.request_id, r.at, r.kind, r.namespace, r.role, r.node_id, r.to_node_id, r.asked_by::text AS asked_by, r.done_at,
       r.outcome, r.detail
FROM pgleaderlock.requests r
WHERE r.request_id = %(request_id)s

-- name: history_namespaces
-- A loose index scan: one step per namespace, however many roles each has. Namespaces of slots are recognised by the
-- end of their names.
WITH RECURSIVE found AS (
    (SELECT l.namespace FROM pgleaderlock.leaders l ORDER BY l.namespace LIMIT 1)
    UNION ALL
    SELECT (SELECT l.namespace FROM pgleaderlock.leaders l WHERE l.namespace > f.namespace ORDER BY l.namespace LIMIT 1)
    FROM found f WHERE f.namespace IS NOT NULL
)
SELECT f.namespace FROM found f
WHERE f.namespace IS NOT NULL AND (right(f.namespace, length(%(slots_end)s)) = %(slots_end)s) = %(of_slots)s
LIMIT %(page_size)s

-- name: history_forget_role
SELECT pgleaderlock.forget_role(%(role)s, %(namespace)s, %(epoch)s) AS forgotten

-- name: history_ask_step_down
SELECT pgleaderlock.request_step_down(%(role)s, %(namespace)s, %(to_node_id)s, %(channel)s) AS request_id

-- name: history_ask_drain
SELECT pgleaderlock.request_drain(%(node_id)s, %(namespace)s, %(channel)s) AS request_id

-- name: history_ask_drain_within
SELECT pgleaderlock.request_drain_within(%(node_id)s, %(namespace)s, %(work_timeout_s)s) AS request_id

-- name: history_ask_resume
SELECT pgleaderlock.request_resume(%(node_id)s, %(namespace)s, %(channel)s) AS request_id
