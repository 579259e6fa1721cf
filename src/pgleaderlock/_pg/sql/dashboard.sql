-- What the dashboard reads of the ledger in addition to history.sql, by the same rules.

-- name: dashboard_role_known
SELECT EXISTS (SELECT FROM pgleaderlock.leaders l WHERE l.namespace = %(namespace)s AND l.role = %(role)s)
    OR EXISTS (SELECT FROM pgleaderlock.terms t WHERE t.namespace = %(namespace)s AND t.role = %(role)s) AS known
