-- What `status` asks, and what `acquire` asks when somebody else was faster. Looks only; needs no privilege of its own.

-- name: status_server
-- Which database answers. On a standby the locks of the primary cannot be seen, so this is asked first.
SELECT current_database()::text AS database,
       current_setting('server_version') AS version,
       pg_is_in_recovery() AS in_recovery,
       current_user::text AS role

-- name: status_lock
-- Everybody who holds this lock or waits for it at the server, holders first, then in the order in which they came.
-- pg_locks does not say when a lock was granted, so two times near it are shown by their names. Ages are taken from the
-- server's clock alone. A role without pg_read_all_stats sees no address and no times of other roles' sessions: then
-- client_port is NULL, while a connection through the socket has -1.
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
