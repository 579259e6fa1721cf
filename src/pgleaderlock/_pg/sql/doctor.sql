-- The queries of `doctor`. Each is a separate statement, so that a refused one costs only one line of the report. Each
-- also runs on PostgreSQL 10, so that `doctor` reports a server that is too old, instead of a syntax error.

-- name: doctor_settings
-- Values and the source of each. A setting that this server does not have is missing from the result.
SELECT name, setting, unit, source
FROM pg_settings
WHERE name IN ('statement_timeout', 'lock_timeout', 'idle_in_transaction_session_timeout', 'idle_session_timeout',
               'transaction_timeout', 'deadlock_timeout', 'client_connection_check_interval', 'fsync',
               'full_page_writes', 'synchronous_commit', 'max_connections', 'superuser_reserved_connections',
               'reserved_connections', 'max_locks_per_transaction', 'max_prepared_transactions')

-- name: doctor_connections
-- Connections in use, and the limits of role and database. Every role may read pg_stat_database, while pg_stat_activity
-- hides the kind of process of other roles' rows. (-1 is no limit.)
SELECT (SELECT coalesce(sum(numbackends), 0) FROM pg_stat_database)::integer AS used,
       d.datconnlimit AS database_limit,
       (SELECT numbackends FROM pg_stat_database WHERE datid = d.oid) AS database_used,
       r.rolconnlimit AS role_limit,
       (SELECT count(*) FROM pg_stat_activity WHERE usename = current_user)::integer AS role_used,
       r.rolsuper AS superuser
FROM pg_database d, pg_roles r
WHERE d.datname = current_database() AND r.rolname = current_user

-- name: doctor_locks
-- Entries of the shared lock table. Fast-path locks are not stored there.
SELECT count(*)::integer AS used FROM pg_locks WHERE NOT fastpath

-- name: doctor_privileges
-- Privileges that a DBA can revoke. A function that this server does not have counts as not allowed.
SELECT coalesce(has_function_privilege(to_regprocedure('pg_catalog.pg_try_advisory_lock(integer,integer)'), 'EXECUTE')
            AND has_function_privilege(to_regprocedure('pg_catalog.pg_advisory_lock(integer,integer)'), 'EXECUTE')
            AND has_function_privilege(to_regprocedure('pg_catalog.pg_advisory_unlock(integer,integer)'), 'EXECUTE'),
                false) AS may_lock,
       coalesce(has_function_privilege(to_regprocedure('pg_catalog.pg_terminate_backend(integer,bigint)'), 'EXECUTE'),
                false) AS may_terminate,
       has_table_privilege('pg_catalog.pg_locks', 'SELECT')
            AND has_table_privilege('pg_catalog.pg_stat_activity', 'SELECT') AS may_look,
       pg_has_role('pg_read_all_stats', 'USAGE') AS sees_others

-- name: doctor_grants
-- Which functions of the ledger a node could not call.
SELECT coalesce(array_agg(p.proname::text ORDER BY p.proname) FILTER (WHERE NOT has_function_privilege(p.oid, 'EXECUTE')),
                '{}') AS missing
FROM pg_proc p
JOIN pg_namespace n ON n.oid = p.pronamespace
WHERE n.nspname = 'pgleaderlock' AND p.proname = ANY (%(names)s)

-- name: doctor_engine
-- The server's version text, and the prefixes of settings that managed services add to PostgreSQL's own.
SELECT version() AS version,
       ARRAY(SELECT DISTINCT split_part(name, '.', 1) FROM pg_settings WHERE name LIKE '%%.%%' ORDER BY 1) AS families

-- name: doctor_round_trip
SELECT 1 AS alive
