-- The query that `keys` prints for people to paste. The values are filled in as text, not by the driver: both are
-- integers.

-- name: keys_find
-- The holder of a lock. pg_locks shows the two keys as unsigned numbers, marks the key space of pairs by objsubid 2,
-- and lists the locks of every database. No line is longer than 60 characters, for narrow terminals.
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
