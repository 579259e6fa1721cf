-- What `keys` prints for people to paste. It is filled in as text, not by the driver: both values are integers.

-- name: keys_find
-- Who holds it. pg_locks shows the two keys as unsigned numbers, marks the pair space by objsubid 2, and lists the locks
-- of every database. No line is longer than 60 characters: it is read in a terminal.
SELECT l.pid, a.application_name, a.client_addr,
       a.backend_start
FROM pg_locks l
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted
  AND l.database = (SELECT oid FROM pg_database
                    WHERE datname = current_database())
  AND l.classid::bigint = %(classid)s
  AND l.objid::bigint = %(objid)s
  AND l.objsubid = 2
