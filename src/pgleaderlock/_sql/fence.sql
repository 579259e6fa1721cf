-- What a fenced transaction sends: one statement, before the caller's own.

-- name: fence
-- Takes the fence, then sees to it that a writer which falls silent in its transaction is ended by the server: it would
-- hold back the next leader. A shorter limit of the caller's own stays. CAST is written out for drivers that take a
-- double colon for a parameter of theirs.
SELECT pgleaderlock.fence(
           CAST(%(role)s AS text), CAST(%(epoch)s AS bigint), CAST(%(namespace)s AS text), CAST(%(holder)s AS text)),
       CASE WHEN current_setting('idle_in_transaction_session_timeout') = '0'
              OR CAST(current_setting('idle_in_transaction_session_timeout') AS interval)
                 > CAST(CAST(%(idle_timeout)s AS text) AS interval)
            THEN set_config('idle_in_transaction_session_timeout', CAST(%(idle_timeout)s AS text), true) END
