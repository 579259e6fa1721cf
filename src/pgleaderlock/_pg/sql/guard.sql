-- The statements of a guard on a connection that the caller owns. Ordinary parameters, so that psycopg prepares them.

-- name: guard_take
-- One try. NULL: the session is not fit, and nothing was locked. The pid that the protocol told is the pooler's own
-- behind a pooler; on a standby a lock excludes nobody. Two servers may have backends with one pid: hence the server's
-- start, which is cheap to ask for, unlike the backend's own.
SELECT CASE WHEN pg_backend_pid() = %(backend_pid)s AND NOT pg_is_in_recovery()
       THEN pg_try_advisory_lock(%(key1)s, %(key2)s) END AS granted,
       extract(epoch FROM pg_postmaster_start_time())::text AS server_start

-- name: guard_take_pooled
-- The same behind a pooler that was allowed, on the session that was proven to be ours. If it holds the lock already, it
-- has served another client: advisory locks are re-entrant, so both would lead.
SELECT CASE WHEN pg_backend_pid() = %(backend_pid)s AND NOT pg_is_in_recovery()
             AND NOT EXISTS (
                 SELECT FROM pg_locks
                 WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND granted
                   AND classid::bigint = %(classid)s AND objid::bigint = %(objid)s AND objsubid = 2
             )
       THEN pg_try_advisory_lock(%(key1)s, %(key2)s) END AS granted,
       extract(epoch FROM pg_postmaster_start_time())::text AS server_start

-- name: guard_free
-- After a try that has failed with an error: does this session not hold the lock? Not true: it does, or this is another one.
SELECT pg_backend_pid() = %(backend_pid)s AND NOT EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND granted AND objsubid = 2 AND pid = pg_backend_pid()
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND classid::bigint = %(classid)s AND objid::bigint = %(objid)s
) AS free

-- name: guard_diagnose
-- Why a session was not fit.
SELECT pg_is_in_recovery() AS in_recovery

-- name: guard_holder
-- Who holds it, as far as this role may see: asked only after a try has failed.
SELECT l.pid, a.application_name
FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.classid::bigint = %(classid)s AND l.objid::bigint = %(objid)s

-- name: guard_check
-- Positive proof: the backend that took it, on the same server and no standby, this database, this key, in the key space
-- of pairs (objsubid 2).
SELECT pg_backend_pid() = %(backend_pid)s AND NOT pg_is_in_recovery()
   AND extract(epoch FROM pg_postmaster_start_time())::text = %(server_start)s AND EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND granted AND objsubid = 2 AND pid = pg_backend_pid()
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND classid::bigint = %(classid)s AND objid::bigint = %(objid)s
) AS held

-- name: guard_unlock
SELECT pg_advisory_unlock(%(key1)s, %(key2)s) AS unlocked
