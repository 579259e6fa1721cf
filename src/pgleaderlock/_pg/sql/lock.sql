-- The statements of the dedicated session. All are sent as one simple-query message each: a Parse without its
-- Sync would leave the backend outside "idle", where idle_session_timeout, our lease, never fires.
--
-- A session takes its lock twice, so that the probe can check it by releasing it once: the server counts the holds of a
-- session, and the result of `pg_advisory_unlock` is the only cheap way to find out whether this session holds a lock.
-- (Reading pg_locks goes through the locks of all sessions.) The probe releases one hold and takes it again; the other
-- one stays, so no other session can get the lock in between.

-- name: take
-- Checks the session and tries the lock in one round trip. The lock is tried only if the session is fit for it: the
-- CASE evaluates the try once or not at all (in a WHERE clause, a try-lock was seen to be counted twice). The lease is
-- set in the same statement as the lock, so no error can come between them. NULL: not fit; empty: another session holds
-- it. It uses nothing that is slow on a fresh backend, such as a view, because it is on the path from start to leader.
SELECT CASE WHEN pg_backend_pid() = %(backend_pid)s
             AND NOT pg_is_in_recovery()
             AND current_setting('idle_session_timeout') = '0'
             AND current_setting('default_transaction_isolation') = 'read committed'
             AND current_setting('default_transaction_read_only') = 'off'
             AND current_setting('client_min_messages') = 'warning'
             AND current_setting('search_path') = 'pg_catalog'
             AND current_setting('client_encoding') = 'UTF8'
       THEN CASE WHEN pg_try_advisory_lock(%(key1)s, %(key2)s)
            THEN CASE WHEN pg_try_advisory_lock(%(key1)s, %(key2)s)
                 THEN set_config('idle_session_timeout', %(lease_ms)s::text, false) END
            ELSE '' END
       END AS lease,
       current_setting('deadlock_timeout') AS deadlock_timeout

-- name: take_pooled
-- The same behind an allowed pooler. There, a backend that already holds the lock serves another client as well:
-- advisory locks are re-entrant, so taking it once more would succeed, and two clients would lead.
SELECT CASE WHEN pg_backend_pid() = %(backend_pid)s
             AND NOT pg_is_in_recovery()
             AND current_setting('idle_session_timeout') = '0'
             AND current_setting('default_transaction_isolation') = 'read committed'
             AND current_setting('default_transaction_read_only') = 'off'
             AND current_setting('client_min_messages') = 'warning'
             AND current_setting('search_path') = 'pg_catalog'
             AND current_setting('client_encoding') = 'UTF8'
             AND NOT EXISTS (
                 SELECT FROM pg_locks
                 WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND granted
                   AND classid::bigint = %(classid)s AND objid::bigint = %(objid)s AND objsubid = 2
             )
       THEN CASE WHEN pg_try_advisory_lock(%(key1)s, %(key2)s)
            THEN CASE WHEN pg_try_advisory_lock(%(key1)s, %(key2)s)
                 THEN set_config('idle_session_timeout', %(lease_ms)s::text, false) END
            ELSE '' END
       END AS lease,
       current_setting('deadlock_timeout') AS deadlock_timeout

-- name: diagnose
-- Why a session was not fit. A separate statement, so that the path to leadership stays short.
SELECT pg_backend_pid() AS backend_pid,
       pg_is_in_recovery() AS in_recovery,
       current_setting('idle_session_timeout') AS idle_session_timeout,
       current_setting('default_transaction_isolation') AS default_transaction_isolation,
       current_setting('default_transaction_read_only') AS default_transaction_read_only,
       current_setting('client_min_messages') AS client_min_messages,
       current_setting('search_path') AS search_path,
       current_setting('client_encoding') AS client_encoding,
       current_setting('deadlock_timeout') AS deadlock_timeout

-- name: identify
-- The first probe of a session identifies the backend, so that exactly this one can be ended should it become a zombie.
-- It also prepares the later probes. A prepared statement exists in one backend only and ends with it, and only we know
-- the name `session`: a backend that answers with it is ours, and not another one with the same pid. The CASEs fix the
-- order of evaluation, so that no other backend releases a lock.
PREPARE pgleaderlock_probe AS
SELECT CASE WHEN pg_backend_pid() = %(backend_pid)s AND NOT pg_is_in_recovery()
       THEN CASE WHEN pg_advisory_unlock(%(key1)s, %(key2)s)
            THEN CASE WHEN pg_try_advisory_lock(%(key1)s, %(key2)s) THEN %(session)s END END
       END AS session;
SELECT pg_backend_pid() AS backend_pid,
       (SELECT extract(epoch FROM backend_start)::text FROM pg_stat_get_activity(pg_backend_pid())) AS backend_start

-- name: set_up_pooled
-- The settings that the startup packet sets without a pooler. In session mode they stay for as long as we are
-- connected. No row, and nothing set, if this is not the session that was proven to be ours.
SELECT set_config('idle_session_timeout', %(idle_timeout_ms)s::text, false),
       set_config('statement_timeout', %(statement_timeout_ms)s::text, false),
       set_config('lock_timeout', %(statement_timeout_ms)s::text, false),
       set_config('idle_in_transaction_session_timeout', %(lease_ms)s::text, false),
       set_config('default_transaction_isolation', 'read committed', false),
       set_config('default_transaction_read_only', 'off', false),
       set_config('client_min_messages', 'warning', false),
       set_config('search_path', 'pg_catalog', false),
       set_config('client_encoding', 'UTF8', false)
WHERE pg_backend_pid() = %(backend_pid)s

-- name: same_backend
-- The backend that this statement ran on, its client's address, and its mark: a sample for the proof that a session is
-- ours alone. It changes nothing, and every role may see its own backend.
SELECT pid, extract(epoch FROM backend_start)::text AS started, host(client_addr) AS client,
       current_setting('pgleaderlock.mark', true) AS mark
FROM pg_stat_get_activity(pg_backend_pid())

-- name: mark_backend
-- The same, and sets the mark, or removes it (empty). Nothing else reads this setting.
SELECT pid, extract(epoch FROM backend_start)::text AS started, host(client_addr) AS client,
       set_config('pgleaderlock.mark', %(mark)s, false) AS mark
FROM pg_stat_get_activity(pg_backend_pid())

-- name: wait_for_lock
-- Waits at the server for one slice. The EXCEPTION handler keeps the end of a slice out of the server's log. The
-- timeout can strike after the grant, so pg_locks decides, not the error. Before that, a try finds out cheaply that the
-- lock is not ours: reading pg_locks at the end of each slice was nearly half of its cost with a hundred waiters. A
-- successful try adds a hold, which is released first. Settings made in a block are rolled back with it, so the answer
-- is reset outside, and the second hold and the lease are set after the handler.
DO $wait$
DECLARE
    held boolean;
BEGIN
    PERFORM set_config('pgleaderlock.granted', 'no', false);
    BEGIN
        PERFORM set_config('lock_timeout', '%(slice_ms)s', true);
        PERFORM pg_advisory_lock(%(key1)s, %(key2)s);
        held := true;
    EXCEPTION WHEN lock_not_available THEN
        IF pg_try_advisory_lock(%(key1)s, %(key2)s) THEN
            PERFORM pg_advisory_unlock(%(key1)s, %(key2)s);
            held := EXISTS (
                SELECT FROM pg_locks
                WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND granted
                  AND classid::bigint = %(classid)s AND objid::bigint = %(objid)s AND objsubid = 2
            );
        END IF;
    END;
    IF held THEN
        PERFORM pg_advisory_lock(%(key1)s, %(key2)s);
        PERFORM set_config('pgleaderlock.granted', 'yes', false);
        PERFORM set_config('idle_session_timeout', '%(lease_ms)s', false);
    END IF;
END
$wait$;
SELECT current_setting('pgleaderlock.granted') = 'yes' AS granted

-- name: probe
-- Is this the backend that took the lock, on a primary, and does it still hold it? Prepared by `identify`: it then
-- costs the same as SELECT 1, and a tenth more if it is planned each time. It also restarts the server's idle timeout,
-- which renews the lease.
EXECUTE pgleaderlock_probe

-- name: unlock
-- Releases both holds.
SELECT CASE WHEN pg_advisory_unlock(%(key1)s, %(key2)s)
       THEN pg_advisory_unlock(%(key1)s, %(key2)s) ELSE false END AS unlocked

-- name: end_own_zombie
-- Ends exactly one session: the one that was ours before the connection was lost, identified by pid and start time.
-- Waits until it is gone.
SELECT pg_terminate_backend(pid, %(wait_ms)s) AS ended
FROM pg_stat_get_activity(%(zombie_pid)s)
WHERE extract(epoch FROM backend_start)::text = %(zombie_start)s
  AND datid = (SELECT oid FROM pg_database WHERE datname = current_database())

-- The statements for a connection that the caller owns. They have positional parameters, so that tests can use a small
-- fake.

-- name: borrowed_take
SELECT pg_try_advisory_lock(%s, %s)

-- name: borrowed_probe
SELECT 1

-- name: borrowed_unlock
SELECT pg_advisory_unlock(%s, %s)
