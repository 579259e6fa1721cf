-- What a fenced transaction sends: one statement, before the caller's own.

-- name: fence
-- Takes the fence, and limits how long the transaction may be idle: a silent writer would hold back the next leader, so
-- the server must end it. A shorter limit of the caller is kept. The mark in application_name is undone together with
-- the fence, by the end of the transaction or by a rollback to an older savepoint. The server reports each change of
-- application_name to the client, so the client notices a lost fence without asking. Later marks of the same
-- transaction are appended. CAST is written out for drivers that take a double colon for a parameter.
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
-- The marks of this transaction's fences, for the case that application_name does not show them: the caller has changed
-- it, or a pooler does not report it.
SELECT current_setting('pgleaderlock.fence_marks', true)
