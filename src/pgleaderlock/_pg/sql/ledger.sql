-- The statements of an election's session. Each is one simple-query message. Each lock is taken twice, as in lock.sql.

-- name: ledger_version
-- The version of the ledger. An error about a missing schema or table means that there is no ledger.
SELECT max(version) AS version FROM pgleaderlock.schema_version

-- name: ledger_open
-- Records this session in one statement, so that its description is complete or absent. Commits of the ledger must be
-- on disk before they are acknowledged: with synchronous_commit off, the same epoch was issued again after a crash. It
-- is set even if it has the right value, because a setting that the session has not set itself can change when the
-- server reloads its configuration. The session's number is also set on its backend: the heartbeat checks it, and no
-- other backend has it.
SELECT o.session_id, o.system_identifier, o.timeline, d AS described,
       set_config('pgleaderlock.session', o.session_id::text, false) AS marked,
       CASE WHEN current_setting('synchronous_commit') = 'off'
            THEN set_config('synchronous_commit', 'on', false)
            ELSE set_config('synchronous_commit', current_setting('synchronous_commit'), false) END AS durable
FROM pgleaderlock.open_session(
    %(namespace)s, %(instance)s::uuid, %(node_id)s, %(host)s, %(os_pid)s, %(holder_identity)s,
    %(gate_s)s, %(lease_s)s, %(candidate)s, %(library_version)s,
    (SELECT a.backend_start FROM pg_stat_get_activity(pg_backend_pid()) a)) o,
    LATERAL pgleaderlock.describe_session(o.session_id, %(draining)s, %(balance)s) d

-- name: ledger_prepare_heartbeat
-- Prepared once per session: planning it at each heartbeat would cost a tenth more. A standby refuses the write, and
-- the function refuses a backend with another pid than the recorded one. `proven`: is this the backend that recorded
-- the session, and does it still hold the lock of one role (NULL: it leads none)? Checking all locks would make the
-- heartbeat of a thousand roles half as expensive again. One is enough: whatever makes a backend lose locks that we
-- have not released (DISCARD ALL, pg_advisory_unlock_all) takes all of them. Each heartbeat checks the next role.
PREPARE pgleaderlock_heartbeat (bigint, text[], boolean, integer, integer) AS
SELECT beat, roles, epochs, settled, requests, version,
       CASE WHEN current_setting('pgleaderlock.session', true) = $1::text
       THEN CASE WHEN $4 IS NULL THEN true
                 WHEN pg_advisory_unlock($4, $5) THEN pg_try_advisory_lock($4, $5) ELSE false END
       ELSE false END AS proven
FROM pgleaderlock.heartbeat($1, $2, $3);
SELECT true AS prepared

-- name: ledger_heartbeat
EXECUTE pgleaderlock_heartbeat (%(session_id)s, %(settled)s, %(draining)s, %(key1)s, %(key2)s)

-- name: ledger_try_and_look
-- All tries of a tick in one statement, with a look at the holders of the rest. The rows may be older than a grant of
-- the same statement, so they never serve as the predecessor: the bump, a later statement, reads that. As a look they
-- are safe: what they show was committed before the reply came. The try is evaluated once per row, never in a WHERE.
-- Here, in the next statement and in lease_look, one row covers all roles of one holder with the same marks. It has, as
-- text, the place of each role among those asked for and its epoch: a thousand roles have few holders, a long reply
-- costs a standby more than all the rest, and a row that equals the last one need not be parsed. `marks`: 1 for a
-- granted lock, 2 for a term that has ended (or never was), 4 for a role reserved for another node, 8 for a role
-- reserved for us, 16 for a role recorded under another key than the caller's. A role that was given up for another
-- node is left to that node for a moment. A node whose snapshot is older than the reservation may win it anyway: the
-- reservation is a preference, not a promise.
WITH reserved AS MATERIALIZED (
    SELECT DISTINCT r.role FROM pgleaderlock.requests r
    WHERE r.namespace = %(namespace)s AND r.done_at IS NULL AND r.to_node_id <> %(node_id)s
      AND r.released_at BETWEEN clock_timestamp() - %(hold_s)s * interval '1 second' AND clock_timestamp()
), tried AS MATERIALIZED (
    SELECT a.role, a.place, a.key1, a.key2, r.role IS NOT NULL AS reserved,
           CASE WHEN a.wanted AND r.role IS NULL THEN CASE WHEN pg_try_advisory_lock(a.key1, a.key2)
                THEN pg_try_advisory_lock(a.key1, a.key2) ELSE false END ELSE false END AS granted
    FROM unnest(%(roles)s::text[], %(key1)s::integer[], %(key2)s::integer[], %(wanted)s::boolean[])
         WITH ORDINALITY AS a (role, key1, key2, wanted, place)
    LEFT JOIN reserved r ON r.role = a.role
), looked AS (
    SELECT l.session_id, t.granted::integer + 2 * (l.ended IS DISTINCT FROM false)::integer + 4 * t.reserved::integer
               + 16 * ((l.key1, l.key2) <> (t.key1, t.key2) IS TRUE)::integer AS marks,
           string_agg(concat(t.place, ':', l.epoch), ' ' ORDER BY t.place) AS roles
    FROM tried t
    LEFT JOIN pgleaderlock.leaders l ON l.namespace = %(namespace)s AND l.role = t.role
    GROUP BY 1, 2
)
SELECT t.session_id, t.marks, t.roles, CASE WHEN s.session_id IS NOT NULL THEN json_build_object(
           'beat', s.beat, 'holder_identity', s.holder_identity, 'node_id', s.node_id, 'lease_s', s.lease_s,
           'backend_pid', s.backend_pid, 'backend_start', extract(epoch FROM s.backend_start)::text) END AS holder
FROM looked t
LEFT JOIN pgleaderlock.sessions s ON s.session_id = t.session_id

-- name: ledger_try_and_look_closely
-- The same for a node that balances. Such a node tries only roles that it knows to be free, so it must see more:
-- whether the backend of a recorded holder is gone although its record is open (a lease has no backend: its record
-- counts), and whether a role was given up for this node.
WITH reserved AS MATERIALIZED (
    SELECT r.role, bool_and(r.to_node_id = %(node_id)s) AS for_us FROM pgleaderlock.requests r
    WHERE r.namespace = %(namespace)s AND r.done_at IS NULL AND r.to_node_id IS NOT NULL
      AND r.released_at BETWEEN clock_timestamp() - %(hold_s)s * interval '1 second' AND clock_timestamp()
    GROUP BY r.role
), tried AS MATERIALIZED (
    SELECT a.role, a.place, a.key1, a.key2, coalesce(NOT r.for_us, false) AS reserved, coalesce(r.for_us, false) AS for_us,
           CASE WHEN a.wanted AND coalesce(r.for_us, true) THEN CASE WHEN pg_try_advisory_lock(a.key1, a.key2)
                THEN pg_try_advisory_lock(a.key1, a.key2) ELSE false END ELSE false END AS granted
    FROM unnest(%(roles)s::text[], %(key1)s::integer[], %(key2)s::integer[], %(wanted)s::boolean[])
         WITH ORDINALITY AS a (role, key1, key2, wanted, place)
    LEFT JOIN reserved r ON r.role = a.role
), looked AS (
    SELECT l.session_id, t.granted::integer + 2 * (l.ended IS DISTINCT FROM false)::integer + 4 * t.reserved::integer
               + 8 * t.for_us::integer + 16 * ((l.key1, l.key2) <> (t.key1, t.key2) IS TRUE)::integer AS marks,
           string_agg(concat(t.place, ':', l.epoch), ' ' ORDER BY t.place) AS roles
    FROM tried t
    LEFT JOIN pgleaderlock.leaders l ON l.namespace = %(namespace)s AND l.role = t.role
    GROUP BY 1, 2
)
SELECT t.session_id, t.marks, t.roles, CASE WHEN s.session_id IS NOT NULL THEN json_build_object(
           'beat', s.beat, 'holder_identity', s.holder_identity, 'node_id', s.node_id, 'lease_s', s.lease_s,
           'backend_pid', s.backend_pid, 'backend_start', extract(epoch FROM s.backend_start)::text,
           'gone', CASE WHEN s.backend_pid = 0 THEN s.ended_at IS NOT NULL ELSE NOT EXISTS (
               SELECT FROM pg_stat_get_activity(s.backend_pid) a
               WHERE a.datid = (SELECT oid FROM pg_database WHERE datname = current_database())
                 AND (a.backend_start IS NULL OR a.backend_start = s.backend_start)) END) END AS holder
FROM looked t
LEFT JOIN pgleaderlock.sessions s ON s.session_id = t.session_id

-- name: ledger_members
-- The nodes that share the roles of this namespace: candidates that balance and are not drained, with an open record
-- and a live backend. The caller judges by its own clock whether a beat is new. `moving`: some role is being moved to a
-- node.
SELECT s.session_id, s.node_id, s.beat, s.lease_s,
       EXISTS (SELECT FROM pgleaderlock.requests r
               WHERE r.namespace = %(namespace)s AND r.done_at IS NULL AND r.kind = 'step_down' AND r.to_node_id IS NOT NULL
                 AND r.at > clock_timestamp() - %(move_s)s * interval '1 second') AS moving
FROM pgleaderlock.sessions s
WHERE s.namespace = %(namespace)s AND s.ended_at IS NULL AND s.candidate AND s.balance AND NOT s.draining
  AND s.last_heartbeat > clock_timestamp() - make_interval(secs => 2 * s.lease_s)
  AND EXISTS (SELECT FROM pg_stat_get_activity(s.backend_pid) a
              WHERE a.datid = (SELECT oid FROM pg_database WHERE datname = current_database())
                AND (a.backend_start IS NULL OR a.backend_start = s.backend_start))

-- name: ledger_namesakes
-- Other live processes with this session's node_id: heard since this session began, which leaves out the record of an
-- earlier run of this node.
SELECT o.host, o.os_pid
FROM pgleaderlock.sessions me
JOIN pgleaderlock.sessions o ON o.namespace = me.namespace AND o.node_id = me.node_id
WHERE me.session_id = %(session_id)s AND o.ended_at IS NULL AND o.last_heartbeat > me.started_at
  AND o.instance::text <> ALL (%(own)s)
ORDER BY o.session_id
LIMIT 5

-- name: ledger_request_step_down
SELECT pgleaderlock.request_step_down(%(role)s, %(namespace)s, %(to_node_id)s, %(channel)s) AS request_id

-- name: ledger_bump
SELECT * FROM pgleaderlock.bump(
    %(session_id)s, %(roles)s::text[], %(key1)s::integer[], %(key2)s::integer[], %(wait_ms)s, %(channel)s)

-- name: ledger_rehearse
-- A bump of no role. It is rolled back, because each bump counts as a heartbeat.
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SELECT * FROM pgleaderlock.bump(%(session_id)s, '{}', '{}', '{}', 0, %(channel)s);
ROLLBACK;
SELECT true AS rehearsed

-- name: ledger_end_term
SELECT end_term AS role FROM pgleaderlock.end_term(
    %(session_id)s, %(roles)s::text[], %(epochs)s::bigint[], %(clean)s::boolean[], %(reason)s)

-- name: ledger_unlock
-- Sent after the end of the term has been committed.
SELECT a.role, CASE WHEN pg_advisory_unlock(a.key1, a.key2)
                    THEN pg_advisory_unlock(a.key1, a.key2) ELSE false END AS unlocked
FROM unnest(%(roles)s::text[], %(key1)s::integer[], %(key2)s::integer[]) AS a (role, key1, key2)

-- name: ledger_hint
-- Wakes the other nodes. It is sent after a decision, never in the same transaction, because it may fail: a full
-- notification queue refuses it at its commit. It must not block: the commits of notifying transactions run one at a
-- time in the whole server. So this one waits for its turn only briefly and, when it has its turn, neither for the disk
-- nor for a standby.
SELECT set_config('lock_timeout', '50ms', true), set_config('synchronous_commit', 'off', true),
       pg_notify(%(channel)s, %(hint)s)

-- name: ledger_owned
-- The roles that this session still leads according to the ledger. Asked when the sum in a heartbeat's answer differs.
SELECT role, epoch FROM pgleaderlock.leaders WHERE session_id = %(session_id)s AND NOT ended

-- name: ledger_evict
-- Ends exactly the recorded session: same pid, start time and database, of this database role only, and only if it was
-- recorded in this history of the database, because a dump restored beside its original has the original's records.
-- (Rows from before version 4 have no history.)
SELECT pg_terminate_backend(a.pid, %(wait_ms)s) AS ended
FROM pgleaderlock.sessions s, pg_stat_get_activity(s.backend_pid) a
WHERE s.session_id = %(evicted_session_id)s AND s.ended_at IS NULL
  AND a.backend_start = s.backend_start
  AND a.datid = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND a.usesysid = (SELECT oid FROM pg_roles WHERE rolname = current_user)
  AND coalesce(s.system_identifier, %(system_identifier)s) = %(system_identifier)s
  AND coalesce(s.timeline, %(timeline)s) = %(timeline)s

-- name: ledger_note_eviction
SELECT pgleaderlock.note_eviction(%(session_id)s, %(evicted_session_id)s) AS noted

-- name: ledger_settle_requests
SELECT pgleaderlock.settle_request(%(session_id)s, a.request_id, a.outcome, a.detail) AS settled
FROM unnest(%(request_ids)s::bigint[], %(outcomes)s::text[], %(details)s::text[]) AS a (request_id, outcome, detail)

-- name: ledger_work_timeout
-- How long a drain waits for the work. A ledger of version 4 does not have the column: hence the access through JSON.
SELECT (to_jsonb(r) ->> 'work_timeout_s')::float8 AS work_timeout_s FROM pgleaderlock.requests r
WHERE r.request_id = %(request_id)s

-- name: ledger_reserve
SELECT pgleaderlock.reserve(%(session_id)s, %(request_ids)s::bigint[]) AS reserved

-- name: ledger_note_drain
SELECT pgleaderlock.note_drain(%(session_id)s, %(kind)s, %(roles)s::text[], %(details)s::text[]) AS noted

-- name: ledger_report_gates
SELECT role, failover_s FROM pgleaderlock.report_gates(%(session_id)s, %(reports)s::jsonb)

-- name: ledger_declare_roles
SELECT pgleaderlock.declare_roles(%(session_id)s, %(roles)s::text[]) AS declared

-- name: ledger_prune
SELECT pgleaderlock.prune(%(namespace)s, %(keep_s)s * interval '1 second', %(step)s) AS pruned

-- name: ledger_close
SELECT pgleaderlock.close_session(%(session_id)s) AS closed

-- name: ledger_listen
-- The channel is an identifier, so it is quoted by the caller.
LISTEN {channel}
