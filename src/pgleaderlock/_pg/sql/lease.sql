-- The statements that only a lease has. Each write is sent between lease_begin and lease_done, as one simple-query
-- message, which is one transaction. The other statements in between are those of a session, in ledger.sql.

-- name: lease_begin
SELECT pgleaderlock.lease_begin(%(session_id)s, %(key)s::uuid, %(number)s)

-- name: lease_done
SELECT pgleaderlock.lease_done(%(session_id)s, %(key)s::uuid)

-- name: lease_end_silent
-- Sent before lease_lock and the bump, in the same message: it frees the roles of these leases.
SELECT pgleaderlock.end_silent_leases(%(session_id)s, %(silent)s::bigint[], %(beats)s::bigint[]) AS session_id

-- name: lease_lock
-- A separate statement before the one that reads the predecessor, because its snapshot is older than the grant.
SELECT pgleaderlock.lease_lock(%(session_id)s, %(roles)s::text[], %(key1)s::integer[], %(key2)s::integer[])

-- name: lease_ended
-- Which of these terms this lease has ended, perhaps by an earlier message whose answer was lost.
SELECT t.role FROM pgleaderlock.terms t
JOIN unnest(%(roles)s::text[], %(epochs)s::bigint[]) AS a (role, epoch) ON a.role = t.role AND a.epoch = t.epoch
WHERE t.session_id = %(session_id)s AND t.ended_at IS NOT NULL AND t.reason = %(reason)s

-- name: lease_heartbeat
-- Never prepared: the next heartbeat may run on another backend.
SELECT beat, roles, epochs, settled, requests, version
FROM pgleaderlock.heartbeat(%(session_id)s, %(settled)s::text[], %(draining)s::boolean)

-- name: lease_open
SELECT session_id, system_identifier, timeline
FROM pgleaderlock.lease_open(
    %(namespace)s, %(instance)s::uuid, %(key)s::uuid, %(previous)s, %(node_id)s, %(host)s, %(os_pid)s,
    %(holder_identity)s, %(gate_s)s, %(lease_s)s, %(candidate)s, %(library_version)s, %(draining)s)

-- name: lease_look
-- A look without a try, with the same rows as ledger_try_and_look. The message that takes a role reads all of it again.
WITH reserved AS MATERIALIZED (
    SELECT DISTINCT r.role FROM pgleaderlock.requests r
    WHERE r.namespace = %(namespace)s AND r.done_at IS NULL AND r.to_node_id <> %(node_id)s
      AND r.released_at BETWEEN clock_timestamp() - %(hold_s)s * interval '1 second' AND clock_timestamp()
), looked AS (
    SELECT l.session_id, 2 * (l.ended IS DISTINCT FROM false)::integer + 4 * (r.role IS NOT NULL)::integer
               + 16 * ((l.key1, l.key2) <> (a.key1, a.key2) IS TRUE)::integer AS marks,
           string_agg(concat(a.place, ':', l.epoch), ' ' ORDER BY a.place) AS roles
    FROM unnest(%(roles)s::text[], %(key1)s::integer[], %(key2)s::integer[]) WITH ORDINALITY AS a (role, key1, key2, place)
    LEFT JOIN reserved r ON r.role = a.role
    LEFT JOIN pgleaderlock.leaders l ON l.namespace = %(namespace)s AND l.role = a.role
    GROUP BY 1, 2
)
SELECT t.session_id, t.marks, t.roles, CASE WHEN s.session_id IS NOT NULL THEN json_build_object(
           'beat', s.beat, 'holder_identity', s.holder_identity, 'node_id', s.node_id, 'lease_s', s.lease_s,
           'backend_pid', s.backend_pid, 'backend_start', extract(epoch FROM s.backend_start)::text,
           'hold', s.hold, 'gone', s.hold = 'lease' AND s.ended_at IS NOT NULL) END AS holder
FROM looked t
LEFT JOIN pgleaderlock.sessions s ON s.session_id = t.session_id
