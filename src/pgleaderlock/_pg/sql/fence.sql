-- What a fenced transaction sends: one statement, before the caller's own.

-- name: fence
-- Takes the fence, then sees to it that a writer which falls silent in its transaction is ended by the server: it would
-- hold back the next leader. A shorter limit of the caller's own stays. The mark is undone with the fence, by the end of
-- the transaction or by a rollback to an older savepoint; the server reports application_name to the client whenever it
-- changes, so that the client knows without asking. Later marks of the same transaction come behind it. CAST is written
-- out for drivers that take a double colon for a parameter of theirs.
SELECT pgleaderlock.fence(
           CAST(%(role)s AS text), CAST(%(epoch)s AS bigint), CAST(%(namespace)s AS text), CAST(%(holder)s AS text)),
       CASE WHEN current_setting('idle_in_transaction_session_timeout') = '0'
              OR CAST(current_setting('idle_in_transaction_session_timeout') AS interval)
                 > CAST(CAST(%(idle_timeout)s AS text) AS interval)
            THEN set_config('idle_in_transaction_session_timeout', CAST(%(idle_timeout)s AS text), true) END,
       set_config('pgleaderlock.fence_marks',
                  concat(current_setting('pgleaderlock.fence_marks', true), CAST(%(mark)s AS text)), true),
       set_config('application_name',
                  left(current_setting('application_name'), 63 - length(CAST(%(mark)s AS text)))
                  || CAST(%(mark)s AS text), true)

-- name: fence_marks
-- The marks of the fences that this transaction has, where application_name does not show them: it was set to something else,
-- or a pooler does not pass it on.
SELECT current_setting('pgleaderlock.fence_marks', true)
