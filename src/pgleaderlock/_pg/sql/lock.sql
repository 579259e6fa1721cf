-- The statements of the dedicated session. All are sent as one simple-query message each: a Parse without its
-- Sync would leave the backend outside "idle", where idle_session_timeout, our lease, never fires.
--
-- A session of ours holds its lock twice, so that the probe can ask for it by a release: the server counts locks per
-- session, and the answer to `pg_advisory_unlock` is the only cheap one that tells whether this session holds a lock.
-- (pg_locks, which tells it too, reads the locks of all sessions.) One of the two is given back and taken again, the
-- other one stays: no other session can come in between.

-- name: take
-- Looks at the session and tries the lock in one round trip. The lock is not touched unless the session is fit for it:
-- the CASE evaluates the try once or not at all (in a WHERE clause a try-lock was seen to count twice). The lease begins
-- in the same statement as the lock, so no error can come between them. NULL: not fit; empty: another session holds it.
-- Nothing here that a fresh backend is slow at, such as a view: this is the way from start to leader.
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
-- The same behind a pooler that was allowed. There a backend that already holds the lock serves another client as well:
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
-- Why a session was not fit: asked only then, so that the way to leadership stays short.
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
-- The first probe of a session asks which backend this is, so that exactly it can be ended should it become a zombie. It
-- also prepares the probes that follow. A prepared statement exists in one backend only and ends with it, and `session`
-- is a name that only we know: whoever answers with it is that backend, and not another one with the same pid.
-- The CASEs fix the order: nothing is given back by another backend than ours.
PREPARE pgleaderlock_probe AS
SELECT CASE WHEN pg_backend_pid() = %(backend_pid)s AND NOT pg_is_in_recovery()
       THEN CASE WHEN pg_advisory_unlock(%(key1)s, %(key2)s)
            THEN CASE WHEN pg_try_advisory_lock(%(key1)s, %(key2)s) THEN %(session)s END END
       END AS session;
SELECT pg_backend_pid() AS backend_pid,
       (SELECT extract(epoch FROM backend_start)::text FROM pg_stat_get_activity(pg_backend_pid())) AS backend_start

-- name: set_up_pooled
-- What the startup packet does without a pooler. A pooler in session mode keeps these for as long as we are connected.
-- No row, and nothing set: this is not the session that was proven to be ours.
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
-- Which session did this statement run on, whose is it in the eyes of the server, and who has marked it? Samples for the
-- proof that a session is ours alone: it changes nothing, and its own role may always see it.
SELECT pid, extract(epoch FROM backend_start)::text AS started, host(client_addr) AS client,
       current_setting('pgleaderlock.mark', true) AS mark
FROM pg_stat_get_activity(pg_backend_pid())

-- name: mark_backend
-- The same, and sets the mark, or removes it (empty). No statement of PostgreSQL or of anybody else reads this setting.
SELECT pid, extract(epoch FROM backend_start)::text AS started, host(client_addr) AS client,
       set_config('pgleaderlock.mark', %(mark)s, false) AS mark
FROM pg_stat_get_activity(pg_backend_pid())

-- name: wait_for_lock
-- Waits at the server for one slice. The EXCEPTION handler keeps the end of a slice out of the server's log. The
-- timeout can strike after the grant: what is in pg_locks then decides, not the error. A try tells cheaply that the lock
-- is not ours: reading pg_locks at the end of each slice was nearly half of its cost with a hundred waiters. The hold
-- that a successful try has added is given back first. What a block sets is rolled back with it, so the answer is reset
-- outside, and lock and lease are confirmed in the handler once more.
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
-- Is this the backend that took the lock, on a primary, and does it still hold it? Prepared by `identify`: planned anew
-- each time, it would cost a tenth more than SELECT 1, and now it costs the same. It also restarts the server's idle
-- clock, which is how the lease is kept.
EXECUTE pgleaderlock_probe

-- name: unlock
-- Both of them.
SELECT CASE WHEN pg_advisory_unlock(%(key1)s, %(key2)s)
       THEN pg_advisory_unlock(%(key1)s, %(key2)s) ELSE false END AS unlocked

-- name: end_own_zombie
-- Ends exactly one session: the one that was ours before a cut, known by pid and start. Waits until it is gone.
SELECT pg_terminate_backend(pid, %(wait_ms)s) AS ended
FROM pg_stat_get_activity(%(zombie_pid)s)
WHERE extract(epoch FROM backend_start)::text = %(zombie_start)s
  AND datid = (SELECT oid FROM pg_database WHERE datname = current_database())

-- The statements for a connection that the caller owns. Positional parameters, so that a small fake can serve.

-- name: borrowed_take
SELECT pg_try_advisory_lock(%s, %s)

-- name: borrowed_probe
SELECT 1

-- name: borrowed_unlock
SELECT pg_advisory_unlock(%s, %s)
