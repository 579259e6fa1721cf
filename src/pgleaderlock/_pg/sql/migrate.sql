-- What `migrate` reads and does around the migrations, which are files in migrations/.

-- name: migrate_look
-- The server, and the privileges of this role. Every role may read the catalogs, so this works for a plain role too.
SELECT pg_is_in_recovery() AS in_recovery,
       current_user::text AS role,
       current_database()::text AS database,
       has_database_privilege(current_database(), 'CREATE') AS may_create,
       n.nspowner::regrole::text AS owner,
       n.nspowner = (SELECT oid FROM pg_roles WHERE rolname = current_user) AS is_owner,
       coalesce(pg_has_role(n.nspowner, 'USAGE'), false) AS acts_for_owner,
       EXISTS (SELECT FROM pg_class c WHERE c.relnamespace = n.oid AND c.relname = 'schema_version') AS has_ledger
FROM (SELECT 1) AS always LEFT JOIN pg_namespace n ON n.nspname = 'pgleaderlock'

-- name: migrate_lock
-- One migration at a time; the lock ends with the transaction. Statements after it see what earlier migrations
-- committed.
SELECT set_config('lock_timeout', '60s', true), pg_advisory_xact_lock(%(key1)s, %(key2)s)

-- name: migrate_no_role
-- Those of these roles that do not exist, checked before anything is applied. `public` needs no role of that name.
SELECT a.role FROM unnest(%(roles)s::text[]) AS a (role)
WHERE a.role <> 'public' AND NOT EXISTS (SELECT FROM pg_roles r WHERE r.rolname = a.role)

-- name: epoch_patience
-- A fenced transaction that does not end would otherwise block the next statement without limit.
SELECT set_config('lock_timeout', '10s', true)

-- name: epoch_advance
SELECT a.old_epoch, a.new_epoch FROM pgleaderlock.advance_epoch(%(role)s, %(namespace)s, %(channel)s) a
