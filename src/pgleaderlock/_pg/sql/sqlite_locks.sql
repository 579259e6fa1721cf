-- The statements of the lock server's SQLite store. Parameters are numbered: the driver takes a tuple.
-- `run` counts how often the file was opened. A lease of an earlier run is valid for its full ttl_ms from the start of
-- this run, because the clock of that run is gone and the wall clock cannot be trusted.

-- name: sqlite_empty
-- Whether the file is new, without any table.
SELECT count(*) = 0 FROM sqlite_schema

-- name: sqlite_schema
-- locks: owner_id is NULL when the lock is free. fencing_token is the highest that was ever granted. deadline_ns is on
-- the boot-time clock of `run`: when the lease ends or, for a free lock, when it ended. lease_expiry_ns is Unix time,
-- for people. There is no index beside the key: it would make every grant of many locks half as fast again, and only
-- the sweep would use it.
-- tokens: what outlives a lock's row. The trigger saves it when the row is deleted, by this program or by a person.
CREATE TABLE locks (
    lock_name TEXT PRIMARY KEY,
    owner_id TEXT,
    lease_id TEXT,
    fencing_token INTEGER NOT NULL,
    ttl_ms INTEGER NOT NULL,
    run INTEGER NOT NULL,
    deadline_ns INTEGER NOT NULL,
    lease_expiry_ns INTEGER NOT NULL,
    version INTEGER NOT NULL,
    idempotency_key TEXT
) STRICT, WITHOUT ROWID;
CREATE TABLE tokens (
    lock_name TEXT PRIMARY KEY,
    last_token INTEGER NOT NULL,
    version INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TRIGGER locks_file_token AFTER DELETE ON locks BEGIN
    INSERT INTO tokens (lock_name, last_token, version) VALUES (old.lock_name, old.fencing_token, old.version)
    ON CONFLICT (lock_name) DO UPDATE
    SET last_token = max(last_token, excluded.last_token), version = max(version, excluded.version);
END;
CREATE TABLE breaks (
    break_id INTEGER PRIMARY KEY AUTOINCREMENT,
    broken_ns INTEGER NOT NULL,
    lock_name TEXT NOT NULL,
    broken_by TEXT NOT NULL,
    owner_id TEXT,
    lease_id TEXT,
    fencing_token INTEGER NOT NULL
) STRICT;
CREATE TABLE meta (
    name TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO meta (name, value) VALUES ('schema_version', 1), ('run', 0), ('checks', 0);

-- name: sqlite_meta
SELECT value FROM meta WHERE name = ?1

-- name: sqlite_next_run
UPDATE meta SET value = value + 1 WHERE name = 'run'

-- name: sqlite_end_run
-- The last write of a run. A copy of the file that was made during the run does not have it.
INSERT INTO meta (name, value) VALUES ('ended', ?1)
ON CONFLICT (name) DO UPDATE SET value = excluded.value

-- name: sqlite_set_store_id
-- The store id, set once for each store and never changed.
INSERT INTO meta (name, value) VALUES ('store_id', ?1) ON CONFLICT DO NOTHING

-- name: sqlite_raise_floor
-- Every new token is above the floor. The floor is raised when grants may have been lost (see the mark).
INSERT INTO meta (name, value) VALUES ('token_floor', ?1)
ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value)

-- name: sqlite_highest_token
-- The highest token of all locks. It reads all rows, so it is only used if the mark does not have the token.
SELECT max((SELECT coalesce(max(fencing_token), 0) FROM locks), (SELECT coalesce(max(last_token), 0) FROM tokens))

-- name: sqlite_check
-- A write for the health check: only a write that reaches the disk proves that the next one can.
UPDATE meta SET value = value + 1 WHERE name = 'checks'

-- name: sqlite_count
SELECT count(*), count(owner_id) FROM locks

-- name: sqlite_find
SELECT owner_id, lease_id, fencing_token, ttl_ms, run, deadline_ns, lease_expiry_ns, version, idempotency_key
FROM locks WHERE lock_name = ?1

-- name: sqlite_find_token
SELECT last_token, version FROM tokens WHERE lock_name = ?1

-- name: sqlite_insert
INSERT INTO locks (lock_name, owner_id, lease_id, fencing_token, ttl_ms, run, deadline_ns, lease_expiry_ns, version,
                   idempotency_key)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)

-- name: sqlite_grant
UPDATE locks SET owner_id = ?2, lease_id = ?3, fencing_token = ?4, ttl_ms = ?5, run = ?6, deadline_ns = ?7,
                 lease_expiry_ns = ?8, version = ?9, idempotency_key = ?10
WHERE lock_name = ?1

-- name: sqlite_renew
-- Matches owner, lease and token, and a lease that is still valid. ?5 is this run, ?6 its start, ?7 now.
UPDATE locks SET ttl_ms = ?8, run = ?5, deadline_ns = ?9, lease_expiry_ns = ?10, version = version + 1
WHERE lock_name = ?1 AND owner_id = ?2 AND lease_id = ?3 AND fencing_token = ?4
  AND CASE run WHEN ?5 THEN deadline_ns ELSE ?6 + ttl_ms * 1000000 END > ?7

-- name: sqlite_release
-- Matches like sqlite_renew. The row stays, as a lock that is free from now on.
UPDATE locks SET owner_id = NULL, lease_id = NULL, run = ?5, deadline_ns = ?7, version = version + 1,
                 idempotency_key = NULL
WHERE lock_name = ?1 AND owner_id = ?2 AND lease_id = ?3 AND fencing_token = ?4
  AND CASE run WHEN ?5 THEN deadline_ns ELSE ?6 + ttl_ms * 1000000 END > ?7

-- name: sqlite_break
UPDATE locks SET owner_id = NULL, lease_id = NULL, run = ?2, deadline_ns = ?3, version = version + 1,
                 idempotency_key = NULL
WHERE lock_name = ?1 AND owner_id IS NOT NULL

-- name: sqlite_record_break
INSERT INTO breaks (broken_ns, lock_name, broken_by, owner_id, lease_id, fencing_token) VALUES (?1, ?2, ?3, ?4, ?5, ?6)

-- name: sqlite_forget_breaks
-- Keeps the last ?1 breaks only.
DELETE FROM breaks WHERE break_id <= (SELECT max(break_id) FROM breaks) - ?1

-- name: sqlite_adopt_token
-- The last token of a lock of another server: no lower token is granted here.
INSERT INTO tokens (lock_name, last_token, version) VALUES (?1, ?2, ?3)
ON CONFLICT (lock_name) DO UPDATE
SET last_token = max(last_token, excluded.last_token), version = max(version, excluded.version)

-- name: sqlite_original_table
-- In the database of the Go LockServer: the one table that has these columns, or NULL. Its design gives the columns,
-- but not the name of the table.
SELECT CASE count(*) WHEN 1 THEN max(t.name) END FROM sqlite_schema t
WHERE t.type = 'table' AND NOT EXISTS (
    SELECT 1 FROM json_each(?1) wanted WHERE wanted.value NOT IN (SELECT c.name FROM pragma_table_info(t.name) c))

-- name: sqlite_original_locks
SELECT lock_name, owner_id, lease_id, fencing_token, lease_expiry_ns, version FROM TABLE_FOUND

-- name: sqlite_original_tokens
SELECT lock_name, last_token FROM TABLE_FOUND

-- name: sqlite_walk_end
-- The last name of the next ?2 names after ?1, or NULL when there are none.
SELECT max(lock_name) FROM (SELECT lock_name FROM locks WHERE lock_name > ?1 ORDER BY lock_name LIMIT ?2)

-- name: sqlite_walk
-- The locks that the sweep must expire or prune among the names from ?1 to ?2. ?3 is this run, ?4 its start, ?5 now. A
-- free lock is pruned if it became free before ?6.
SELECT lock_name FROM locks
WHERE lock_name > ?1 AND lock_name <= ?2
  AND CASE WHEN owner_id IS NULL THEN CASE run WHEN ?3 THEN deadline_ns ELSE ?4 END <= ?6
           ELSE CASE run WHEN ?3 THEN deadline_ns ELSE ?4 + ttl_ms * 1000000 END <= ?5 END

-- name: sqlite_expire
-- A row that the walk has found, if its lease is still over. The row keeps the deadline at which the lease ended.
UPDATE locks SET owner_id = NULL, lease_id = NULL, deadline_ns = CASE run WHEN ?2 THEN deadline_ns ELSE ?4 END, run = ?2,
                 version = version + 1, idempotency_key = NULL
WHERE lock_name = ?1 AND owner_id IS NOT NULL
  AND CASE run WHEN ?2 THEN deadline_ns ELSE ?3 + ttl_ms * 1000000 END <= ?4

-- name: sqlite_prune
-- The trigger saves token and version.
DELETE FROM locks WHERE lock_name = ?1 AND owner_id IS NULL AND CASE run WHEN ?2 THEN deadline_ns ELSE ?3 END <= ?4

-- name: sqlite_list
-- At most ?3 names, from ?1 to below ?2: locks with a row, and locks of which only the token is left.
SELECT lock_name, owner_id, lease_id, fencing_token, ttl_ms, run, deadline_ns, lease_expiry_ns, version
FROM locks WHERE lock_name >= ?1 AND lock_name < ?2
ORDER BY lock_name LIMIT ?3

-- name: sqlite_list_tokens
SELECT lock_name, last_token, version
FROM tokens WHERE lock_name >= ?1 AND lock_name < ?2
  AND NOT EXISTS (SELECT 1 FROM locks WHERE locks.lock_name = tokens.lock_name)
ORDER BY lock_name LIMIT ?3
