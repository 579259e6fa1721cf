-- The statements of a guard, on a connection that the caller owns. They have ordinary parameters, so psycopg can
-- prepare them.

-- name: guard_take
-- One try. NULL: the session is not fit, and nothing was locked. Behind a pooler, the pid in the protocol's start-up is
-- the pooler's own; on a standby, a lock excludes no leader. Backends of two servers may have the same pid, so the
-- server's start time is returned as well; it is cheaper to read than the backend's.
SELECT CASE WHEN pg_backend_pid() = %(backend_pid)s AND NOT pg_is_in_recovery()
       THEN pg_try_advisory_lock(%(key1)s, %(key2)s) END AS granted,
       extract(epoch FROM pg_postmaster_start_time())::text AS server_start

-- name: guard_take_pooled
-- The same behind an allowed pooler, on the session that was proven to be ours. A session that already holds the lock
-- has served another client: advisory locks are re-entrant, so both clients would lead.
SELECT CASE WHEN pg_backend_pid() = %(backend_pid)s AND NOT pg_is_in_recovery()
             AND NOT EXISTS (
                 SELECT FROM pg_locks
                 WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND granted
                   AND classid::bigint = %(classid)s AND objid::bigint = %(objid)s AND objsubid = 2
             )
       THEN pg_try_advisory_lock(%(key1)s, %(key2)s) END AS granted,
       extract(epoch FROM pg_postmaster_start_time())::text AS server_start

-- name: guard_free
-- After a try that failed with an error: true if this session does not hold the lock; otherwise it does, or this is
-- another session.
SELECT pg_backend_pid() = %(backend_pid)s AND NOT EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND granted AND objsubid = 2 AND pid = pg_backend_pid()
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND classid::bigint = %(classid)s AND objid::bigint = %(objid)s
) AS free

-- name: guard_diagnose
-- Asked to find out why a session was not fit.
SELECT pg_is_in_recovery() AS in_recovery

-- name: guard_holder
-- The holder, as far as this role may see it. Asked only after a failed try.
SELECT l.pid, a.application_name
FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.classid::bigint = %(classid)s AND l.objid::bigint = %(objid)s

-- name: guard_check
-- Proof that the lock is held: by the same backend of the same server, not a standby, in this database, with this key
-- in the key space of pairs (objsubid 2).
SELECT pg_backend_pid() = %(backend_pid)s AND NOT pg_is_in_recovery()
   AND extract(epoch FROM pg_postmaster_start_time())::text = %(server_start)s AND EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND granted AND objsubid = 2 AND pid = pg_backend_pid()
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND classid::bigint = %(classid)s AND objid::bigint = %(objid)s
) AS held

-- name: guard_unlock
SELECT pg_advisory_unlock(%(key1)s, %(key2)s) AS unlocked
