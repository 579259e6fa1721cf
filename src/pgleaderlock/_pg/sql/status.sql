-- The queries of `status` and `doctor`, and of `acquire` when another node holds the lock. They only read, and need no
-- privilege except for `status_ledger`.

-- name: server_facts
-- Facts about the server: on a standby, the locks of the primary cannot be seen. The pid is compared with the one in
-- the protocol's start-up, where a pooler gives its own. It also runs on PostgreSQL 10, so that `doctor` can report a
-- server that is too old.
SELECT pg_backend_pid() AS backend_pid,
       pg_is_in_recovery() AS in_recovery,
       current_setting('server_version') AS version,
       current_setting('server_version_num')::integer AS version_num,
       current_database()::text AS database,
       current_user::text AS role

-- name: status_lock
-- The sessions that hold this lock or wait for it at the server: holders first, then waiters in the order of their
-- arrival. pg_locks does not record when a lock was granted, so two related times are returned instead. Ages come from
-- the server's clock alone. A role without pg_read_all_stats sees no address and no times of other roles' sessions:
-- then client_port is NULL, while a connection through the Unix socket has -1.
SELECT l.pid,
       l.granted,
       l.mode = 'ShareLock' AS shared,
       a.application_name,
       a.usename::text AS role,
       host(a.client_addr) AS client_addr,
       a.client_port,
       a.backend_start,
       a.state_change,
       l.waitstart,
       extract(epoch FROM clock_timestamp() - a.backend_start)::float8 AS backend_age_s,
       extract(epoch FROM clock_timestamp() - a.state_change)::float8 AS state_age_s,
       extract(epoch FROM clock_timestamp() - l.waitstart)::float8 AS waited_s
FROM pg_locks l
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory'
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.classid::bigint = %(classid)s AND l.objid::bigint = %(objid)s AND l.objsubid = 2
ORDER BY l.granted DESC, l.waitstart, l.pid

-- name: status_ledger
-- The role of this key, its leader according to the ledger, and how long ago that leader was last heard, by the
-- server's clock. And whether the work of the last term has failed: the note is written when its node begins to give
-- the role up.
SELECT l.role,
       l.namespace,
       l.epoch,
       NOT l.ended AS led,
       s.holder_identity,
       s.node_id,
       s.last_heartbeat,
       extract(epoch FROM clock_timestamp() - s.last_heartbeat)::float8 AS heartbeat_age_s,
       l.acquired_at,
       extract(epoch FROM clock_timestamp() - l.acquired_at)::float8 AS acquired_age_s,
       f.node_id AS work_failed_on,
       f.at AS work_failed_at,
       extract(epoch FROM clock_timestamp() - f.at)::float8 AS work_failed_age_s
FROM pgleaderlock.leaders l
LEFT JOIN pgleaderlock.sessions s ON s.session_id = l.session_id AND NOT l.ended
LEFT JOIN LATERAL (
    SELECT e.node_id, e.at FROM pgleaderlock.events e
    WHERE e.namespace = l.namespace AND e.at >= l.acquired_at AND e.role = l.role
      AND e.kind = 'drain_began' AND e.detail = %(work_failed)s
    ORDER BY e.at DESC LIMIT 1) f ON true
WHERE l.key1 = %(key1)s AND l.key2 = %(key2)s
