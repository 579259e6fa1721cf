-- The statements of the lock server's store. Each is one simple-query message and one transaction.

-- name: locks_set_up
-- A grant must be on disk before it is acknowledged, whatever the default: with synchronous_commit off, the same token
-- was issued again after a crash. It is set even if it has the right value, because a setting that the session has not
-- set itself can change when the server reloads its configuration. Names are UTF-8, whatever the encoding of the
-- database. The other settings keep plans made for empty tables from scanning large ones.
SELECT CASE WHEN current_setting('synchronous_commit') = 'off'
            THEN set_config('synchronous_commit', 'on', false)
            ELSE set_config('synchronous_commit', current_setting('synchronous_commit'), false) END AS durable,
       set_config('client_encoding', 'UTF8', false) AS encoding,
       set_config('enable_seqscan', 'off', false) AS seqscan,
       set_config('jit', 'off', false) AS jit

-- name: locks_store_id
-- The store id: it changes with a new cluster, a new database or new tables, and stays the same through a failover.
SELECT left(md5(concat_ws('/', c.system_identifier, d.oid, 'pgleaderlock.lock_tokens'::regclass::oid)), 16) AS store_id
FROM pg_control_system() c, pg_database d WHERE d.datname = current_database()

-- name: locks_apply
-- `hints`: the servers to wake afterwards (see locks_hint). The function has run by the time its first row is read.
-- `remaining_ms` of a lease is rounded down. `reused`: set if the lease in the way has the idempotency key of this
-- acquire, but was asked for with another owner_id or ttl_ms; it names which. A key is stored with its ttl_ms, after a
-- blank (see stored_key). Owner and key are read from one version of the row, so a client that repeats its own request
-- never gets `reused`. The row is as it was before this statement, so it counts only if its lease is the one in the way:
-- an earlier operation of the same list may have ended it. The function's name comes first, because pg_stat_activity cuts
-- off the end.
WITH lock_apply_asked AS MATERIALIZED (SELECT %(operations)s::jsonb AS operations)
SELECT n, outcome, owner_id, lease_id, fencing_token, expiry_ms,
       CASE WHEN outcome IN ('granted', 'replayed')
            THEN greatest(0, expiry_ms - ceil(extract(epoch FROM clock_timestamp()) * 1000)::bigint)
            ELSE remaining_ms END AS remaining_ms,
       waited_ms, ticket, created,
       CASE WHEN outcome = 'held' AND operations #>> ARRAY[(n - 1)::text, 'key'] IS NOT NULL THEN (
           SELECT CASE WHEN l.owner_id <> o.owner THEN 'owner_id' WHEN l.idempotency_key <> o.key THEN 'ttl_ms' END
           FROM jsonb_to_record(operations -> (n - 1)::integer) AS o (lock text, owner text, key text)
           JOIN pgleaderlock.lock_leases l ON l.lock_name = o.lock AND l.lease_expiry > clock_timestamp()
            AND (l.owner_id, trunc(extract(epoch FROM l.lease_expiry) * 1000)) = (a.owner_id, a.expiry_ms)
           WHERE split_part(l.idempotency_key, ' ', 1) = split_part(o.key, ' ', 1)) END AS reused,
       CASE WHEN n = 1 THEN current_setting('pgleaderlock.hints', true) END AS hints
FROM lock_apply_asked, pgleaderlock.lock_apply(%(server_id)s, operations, %(room)s) a

-- name: locks_has_key
-- Whether a lock's lease is valid and was acquired with this idempotency key.
SELECT EXISTS (SELECT FROM pgleaderlock.lock_leases l
               WHERE l.lock_name = %(lock_name)s AND l.lease_expiry > clock_timestamp()
                 AND split_part(l.idempotency_key, ' ', 1) = %(key)s) AS has_key

-- name: locks_hint
-- Wakes the servers that have the first waiters of these locks. It is sent after a decision, never in the same
-- transaction. It may fail, waits only briefly for its turn, and never for the disk (see ledger_hint). A payload must
-- be shorter than 8000 bytes; with an empty one, the server looks at all of its waiters.
SELECT set_config('lock_timeout', '50ms', true), set_config('synchronous_commit', 'off', true),
       count(pg_notify('pgleaderlock_locks_' || h.server_id,
                       CASE WHEN octet_length(h.lock_name) < 7000 THEN h.lock_name ELSE '' END))
FROM unnest(%(server_ids)s::text[], %(lock_names)s::text[]) AS h (server_id, lock_name)

-- name: locks_tick
SELECT lock_name, remaining_ms FROM pgleaderlock.lock_tick(%(server_id)s, %(valid_ms)s, %(heads)s)

-- name: locks_close
SELECT pgleaderlock.lock_close(%(server_id)s) AS closed, current_setting('pgleaderlock.hints', true) AS hints

-- name: locks_break
SELECT %(lock_name)s AS lock_name, held, owner_id, lease_id, fencing_token, expiry_ms, version, 0 AS waiters,
       current_setting('pgleaderlock.hints', true) AS hints
FROM pgleaderlock.lock_break(%(lock_name)s, %(by)s)

-- name: locks_sweep
SELECT expired, pruned, more, current_setting('pgleaderlock.hints', true) AS hints
FROM pgleaderlock.lock_sweep(%(step)s, %(free_kept_s)s)

-- name: locks_count
-- The number of locks stored (held, or held lately), and of those held now.
SELECT count(*) AS stored, count(*) FILTER (WHERE lease_expiry > clock_timestamp()) AS held FROM pgleaderlock.lock_leases

-- name: locks_adopt
-- Takes over the locks of another server. Only the owner of these tables may write to them without a function. A token
-- that is stored here is never lowered, and a lease is taken over only if its token is new here: so a second call
-- changes nothing.
WITH found AS MATERIALIZED (
    SELECT f.* FROM jsonb_to_recordset(%(locks)s) AS f (lock_name text, fencing_token bigint, version bigint,
                                                        owner_id text, lease_id text, remaining_ms bigint)
), risen AS (
    INSERT INTO pgleaderlock.lock_tokens AS t (lock_name, last_token, version, system_identifier, timeline)
    SELECT f.lock_name, f.fencing_token, f.version, h.system_identifier, h.timeline
    FROM found f, pgleaderlock.history() h ORDER BY f.lock_name COLLATE "C"
    ON CONFLICT (lock_name) DO UPDATE
    SET last_token = excluded.last_token, system_identifier = excluded.system_identifier, timeline = excluded.timeline
    WHERE t.last_token < excluded.last_token
    RETURNING t.lock_name
), taken AS (
    INSERT INTO pgleaderlock.lock_leases AS l (lock_name, owner_id, lease_id, fencing_token, lease_expiry, ttl_ms, version)
    SELECT f.lock_name, f.owner_id, f.lease_id, f.fencing_token,
           clock_timestamp() + f.remaining_ms * interval '1 millisecond', f.remaining_ms, f.version
    FROM found f JOIN risen r ON r.lock_name = f.lock_name WHERE f.lease_id IS NOT NULL
    ORDER BY f.lock_name COLLATE "C"
    ON CONFLICT (lock_name) DO UPDATE
    SET owner_id = excluded.owner_id, lease_id = excluded.lease_id, fencing_token = excluded.fencing_token,
        lease_expiry = excluded.lease_expiry, ttl_ms = excluded.ttl_ms, version = greatest(l.version, excluded.version) + 1,
        idempotency_key = NULL, waited_ms = 0, replayed = false
    WHERE (l.lease_expiry > clock_timestamp()) IS NOT TRUE
)
SELECT count(*) AS adopted FROM risen

-- name: locks_get
-- Returns one row, whether the lock is stored or not.
SELECT asked.lock_name, coalesce(l.lease_expiry > moment.at, false) AS held, l.owner_id, l.lease_id,
       coalesce(t.last_token, 0) AS fencing_token, trunc(extract(epoch FROM l.lease_expiry) * 1000)::bigint AS expiry_ms,
       coalesce(l.version, t.version, 0) AS version,
       (SELECT count(*) FROM pgleaderlock.lock_waiters w JOIN pgleaderlock.lock_servers s ON s.server_id = w.server_id
        WHERE w.lock_name = asked.lock_name AND w.deadline > moment.at AND s.alive_until > moment.at) AS waiters
FROM (SELECT %(lock_name)s::text AS lock_name) asked
CROSS JOIN (SELECT clock_timestamp() AS at OFFSET 0) moment
LEFT JOIN pgleaderlock.lock_leases l ON l.lock_name = asked.lock_name
LEFT JOIN pgleaderlock.lock_tokens t ON t.lock_name = asked.lock_name

-- name: locks_list
-- Sorted as in the index, by code points. The pattern is a constant in the statement, so it becomes an index range.
SELECT t.lock_name, coalesce(l.lease_expiry > moment.at, false) AS held, l.owner_id, l.lease_id,
       t.last_token AS fencing_token, trunc(extract(epoch FROM l.lease_expiry) * 1000)::bigint AS expiry_ms,
       coalesce(l.version, t.version) AS version,
       (SELECT count(*) FROM pgleaderlock.lock_waiters w JOIN pgleaderlock.lock_servers s ON s.server_id = w.server_id
        WHERE w.lock_name = t.lock_name AND w.deadline > moment.at AND s.alive_until > moment.at) AS waiters
FROM pgleaderlock.lock_tokens t
CROSS JOIN (SELECT clock_timestamp() AS at OFFSET 0) moment
LEFT JOIN pgleaderlock.lock_leases l ON l.lock_name = t.lock_name
WHERE t.lock_name LIKE %(pattern)s AND t.lock_name > %(cursor)s
ORDER BY t.lock_name
LIMIT %(limit)s
