-- The statements of `once`. Each runs in autocommit mode on a plain connection.

-- name: slot_tick
-- The current tick by the database's clock. A caller that comes a little early gets the tick that is about to begin. A
-- slot is named after the beginning of its tick, in UTC, because local times are not unique.
SELECT to_char(t.begins AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') AS slot,
       extract(epoch FROM t.ends - clock_timestamp())::float8 AS left_s
FROM pgleaderlock.tick_of(
    clock_timestamp() + %(early_s)s * interval '1 second', %(every_s)s * interval '1 second', %(time_zone)s) t

-- name: slot_look
-- The state of a slot: NULL if it was not begun yet.
SELECT (SELECT coalesce(s.outcome, 'claimed') FROM pgleaderlock.slots s
        WHERE s.namespace = %(namespace)s AND s.name = %(slot_name)s AND s.slot = %(slot)s) AS outcome

-- name: slot_claim
SELECT c.claimed, c.attempts, c.outcome
FROM pgleaderlock.claim_slot(%(namespace)s, %(slot_name)s, %(slot)s, %(epoch)s, %(holder)s, %(retry)s) c

-- name: slot_finish
SELECT pgleaderlock.finish_slot(
    %(namespace)s, %(slot_name)s, %(slot)s, %(epoch)s, %(holder)s, %(outcome)s, %(detail)s) AS finished
