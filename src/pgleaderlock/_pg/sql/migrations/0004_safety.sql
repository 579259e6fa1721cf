-- Fixes for defects that fault injection, a specification and adversarial tests have found. Hints are sent outside of
-- decisions; all functions take locks in one order; keys are checked under the row's lock; rows of another history are
-- not trusted; requests lock no rows.
--
-- Libraries of version 3 go on working: no function that they call changes its arguments or its result.
--
-- THE ORDER OF LOCKS. Every function of the ledger takes its locks in this order, and rows of one table by their key:
--
--   1. the caller's own row in sessions        a heartbeat needs it: no other session locks it while its backend lives
--   2. fence keys (advisory, by role)          bump and advance_epoch only
--   3. leaders                                 by (namespace, role)
--   4. other rows of sessions                  by session_id: sessions whose backend is gone
--   5. terms                                   by (namespace, role, epoch)
--   6. requests                                by request_id
--
-- Rows of events are only inserted. Steps 3 to 6 never wait at all (SKIP LOCKED): a row that another transaction has
-- locked is left to that transaction, or reported as not done. So a transaction that an operator leaves open delays no
-- heartbeat, and no two functions can wait for each other. The exception is advance_epoch, an operator's command: it
-- waits for the fence and the row.
--
-- NO HINTS IN HERE. A NOTIFY can fail or block at commit: its queue is full, or another database's NOTIFY waits for a
-- standby. The caller of these functions sends its hint afterwards, in a separate statement that may fail. The
-- arguments p_channel are kept for libraries of version 3, and are not used.

-- A reader that holds a table for long must not make every heartbeat queue up behind this migration: let it fail after
-- a second, to be run again.
SELECT set_config('lock_timeout', '1s', true);

-- The history of this database in which a session was recorded: see history(). NULL in rows from before version 4.
ALTER TABLE pgleaderlock.sessions
    ADD COLUMN system_identifier bigint,
    ADD COLUMN timeline          integer;

-- `epoch`: the term that a request to step down is for. `sessions`: the sessions that a request to a node is for.
-- `answers`: what each of them has answered so far. The first two are NULL in rows from before version 4.
ALTER TABLE pgleaderlock.requests
    ADD COLUMN epoch    bigint,
    ADD COLUMN sessions bigint[],
    ADD COLUMN answers  jsonb NOT NULL DEFAULT '{}';

-- A role that was renamed has no key while its key belongs to the new name.
ALTER TABLE pgleaderlock.leaders ALTER COLUMN key1 DROP NOT NULL, ALTER COLUMN key2 DROP NOT NULL;
CREATE INDEX terms_open ON pgleaderlock.terms (namespace, role) WHERE ended_at IS NULL;

-- Every history in which this ledger was written, and since when. A role that no node has led in a new history may have
-- been led in commits that were lost with the old one.
CREATE TABLE pgleaderlock.histories (
    system_identifier  bigint NOT NULL,
    timeline           integer NOT NULL,
    seen_at            timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (system_identifier, timeline)
);
INSERT INTO pgleaderlock.histories (system_identifier, timeline, seen_at)
SELECT h.system_identifier, h.timeline, '-infinity' FROM pgleaderlock.history() h;

-- Does the backend of a recorded session still run? A backend of another database does not count, because a restored
-- dump has the records of its original. A backend whose start time the ledger's owner may not see counts as running.
CREATE FUNCTION pgleaderlock.is_there(p_session pgleaderlock.sessions) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (
        SELECT FROM pg_stat_get_activity(p_session.backend_pid) a
        WHERE a.datid = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
          AND (a.backend_start IS NULL OR p_session.backend_start IN (a.backend_start, '-infinity')))
$$;

-- Is this session alive? Checks its record and its backend, because the record of a killed session stays fresh for a
-- while.
CREATE FUNCTION pgleaderlock.is_live(p_session pgleaderlock.sessions) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT p_session.ended_at IS NULL
       AND p_session.last_heartbeat > clock_timestamp() - make_interval(secs => 2 * p_session.lease_s)
       AND pgleaderlock.is_there(p_session)
$$;

CREATE OR REPLACE FUNCTION pgleaderlock.is_live_candidate(p_namespace text, p_node_id text) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (
        SELECT FROM pgleaderlock.sessions s
        WHERE s.namespace = p_namespace AND s.node_id = p_node_id AND s.candidate AND NOT s.draining
          AND pgleaderlock.is_live(s))
$$;

-- The live sessions that a request to a node is for: those that it names, and those that their processes have opened
-- since. A process is identified by its instance and its database role, because another role can copy the instance
-- only.
CREATE FUNCTION pgleaderlock.request_targets(p_request pgleaderlock.requests) RETURNS SETOF bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT s.session_id FROM pgleaderlock.sessions s
    WHERE s.namespace = p_request.namespace AND s.node_id = p_request.node_id AND pgleaderlock.is_live(s)
      AND EXISTS (
          SELECT FROM pgleaderlock.sessions e
          WHERE e.instance = s.instance AND e.database_role = s.database_role
            AND CASE WHEN p_request.sessions IS NULL THEN e.started_at <= p_request.at
                     ELSE e.session_id = ANY (p_request.sessions) END)
$$;

-- As in version 3. New: the session's history is recorded, and the first session of a history records when that began.
CREATE OR REPLACE FUNCTION pgleaderlock.open_session(
    p_namespace text, p_instance uuid, p_node_id text, p_host text, p_os_pid integer, p_holder_identity text,
    p_gate_s double precision, p_lease_s double precision, p_candidate boolean, p_library_version text,
    p_backend_start timestamptz DEFAULT NULL,
    OUT session_id bigint, OUT system_identifier bigint, OUT timeline integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    here record;
    own bigint;
BEGIN
    SELECT h.system_identifier, h.timeline INTO here FROM pgleaderlock.history() h;
    IF NOT EXISTS (SELECT FROM pgleaderlock.histories k
                   WHERE k.system_identifier = here.system_identifier AND k.timeline = here.timeline) THEN
        INSERT INTO pgleaderlock.histories (system_identifier, timeline) VALUES (here.system_identifier, here.timeline)
        ON CONFLICT DO NOTHING;
    END IF;
    -- The caller passes the start time of its backend, because the ledger's owner, as which this function runs, may not
    -- be allowed to see it. If the caller passes none, or a wrong one, other nodes cannot evict the session when it
    -- falls silent: only its lease ends it.
    INSERT INTO pgleaderlock.sessions AS s (
        namespace, instance, node_id, host, os_pid, holder_identity, backend_pid, backend_start, database_role,
        gate_s, lease_s, candidate, library_version, system_identifier, timeline)
    VALUES (p_namespace, p_instance, p_node_id, p_host, p_os_pid, p_holder_identity, pg_backend_pid(),
        coalesce(p_backend_start, '-infinity'), session_user, p_gate_s, p_lease_s, p_candidate, p_library_version,
        here.system_identifier, here.timeline)
    RETURNING s.session_id INTO own;
    -- This process has no other session any more, and this backend serves no other client: end the earlier sessions
    -- that either of them has recorded.
    WITH past AS MATERIALIZED (
        SELECT s.session_id FROM pgleaderlock.sessions s
        WHERE (s.instance = p_instance AND s.database_role = session_user OR s.backend_pid = pg_backend_pid())
          AND s.session_id <> own AND s.ended_at IS NULL
        ORDER BY s.session_id FOR NO KEY UPDATE SKIP LOCKED
    ), ended AS (
        UPDATE pgleaderlock.sessions s SET ended_at = clock_timestamp() FROM past WHERE s.session_id = past.session_id
        RETURNING s.session_id, s.namespace, s.node_id
    )
    INSERT INTO pgleaderlock.events (kind, namespace, node_id, detail)
    SELECT e.kind, e.namespace, e.node_id, e.detail
    FROM (
        SELECT 1 AS n, 'session_ended' AS kind, o.namespace, o.node_id, 'session ' || o.session_id || ' was lost' AS detail
        FROM ended o
        UNION ALL
        SELECT 2, 'session_opened', p_namespace, p_node_id,
               'session ' || own || ' of ' || p_holder_identity || ', version ' || p_library_version
    ) e ORDER BY e.n;
    open_session.session_id := own;
    open_session.system_identifier := here.system_identifier;
    open_session.timeline := here.timeline;
END
$$;

-- The heartbeat of version 4, one per node, whatever the number of roles. `p_settled` names the roles whose predecessor
-- this node has waited out since the last beat: a successor then no longer has to wait for that predecessor as well.
-- `p_draining`, if given, is this node's own decision; no other session writes to its record. Returns how many roles
-- this session leads and the sum of their epochs, so that a leader notices when it has lost an epoch; which roles were
-- settled (the caller names a role whose row was locked again in its next beat); the requests to this node; and the
-- ledger's version, which may have changed since the session began.
CREATE FUNCTION pgleaderlock.heartbeat(
    p_session_id bigint, p_settled text[], p_draining boolean,
    OUT beat bigint, OUT roles bigint, OUT epochs numeric, OUT settled text[], OUT requests jsonb, OUT version integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    me record;
BEGIN
    UPDATE pgleaderlock.sessions s
    SET beat = s.beat + 1, last_heartbeat = clock_timestamp(), draining = coalesce(p_draining, s.draining)
    WHERE s.session_id = p_session_id AND s.backend_pid = pg_backend_pid() AND s.ended_at IS NULL
    RETURNING s.beat, s.namespace, s.node_id, s.lease_s INTO me;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'session % is not recorded for this backend', p_session_id USING ERRCODE = 'PGL03';
    END IF;
    heartbeat.beat := me.beat;
    heartbeat.settled := '{}';
    IF cardinality(p_settled) > 0 THEN
        WITH due AS MATERIALIZED (
            SELECT l.role FROM pgleaderlock.leaders l
            WHERE l.namespace = me.namespace AND l.role = ANY (p_settled) AND l.session_id = p_session_id AND NOT l.ended
            ORDER BY l.role FOR NO KEY UPDATE SKIP LOCKED
        ), waited AS (
            UPDATE pgleaderlock.leaders l SET wait_t = me.lease_s
            FROM due WHERE l.namespace = me.namespace AND l.role = due.role
            RETURNING l.role
        )
        SELECT coalesce(array_agg(w.role), '{}') INTO heartbeat.settled FROM waited w;
    END IF;
    SELECT count(*), coalesce(sum(l.epoch), 0) INTO heartbeat.roles, heartbeat.epochs
    FROM pgleaderlock.leaders l WHERE l.session_id = p_session_id AND NOT l.ended;
    SELECT max(v.version) INTO heartbeat.version FROM pgleaderlock.schema_version v;
    IF NOT EXISTS (SELECT FROM pgleaderlock.requests r WHERE r.namespace = me.namespace AND r.done_at IS NULL) THEN
        RETURN;  -- the usual case: no open request
    END IF;
    -- Requests that have been open for too long expire.
    UPDATE pgleaderlock.requests r
    SET done_at = clock_timestamp(), outcome = 'expired', detail = 'nobody has done it within 5 minutes'
    WHERE r.request_id IN (
        SELECT o.request_id FROM pgleaderlock.requests o
        WHERE o.namespace = me.namespace AND o.done_at IS NULL AND o.at < clock_timestamp() - interval '5 minutes'
        ORDER BY o.request_id FOR NO KEY UPDATE SKIP LOCKED);
    -- A request to step down is for one term only. If this session leads a later one, the request is done: it could not
    -- be settled when that term began.
    UPDATE pgleaderlock.requests r
    SET done_at = clock_timestamp(), outcome = 'done', detail = 'the term that was asked for has ended'
    WHERE r.request_id IN (
        SELECT o.request_id FROM pgleaderlock.requests o
        JOIN pgleaderlock.leaders l ON l.namespace = o.namespace AND l.role = o.role AND l.epoch > o.epoch
        WHERE o.namespace = me.namespace AND o.done_at IS NULL AND o.kind = 'step_down'
          AND l.session_id = p_session_id AND NOT l.ended
        ORDER BY o.request_id FOR NO KEY UPDATE OF o SKIP LOCKED);
    SELECT jsonb_agg(
        jsonb_build_object(
            'request_id', r.request_id, 'kind', r.kind, 'role', r.role, 'to_node_id', r.to_node_id,
            'to_is_live', CASE WHEN r.to_node_id IS NOT NULL
                               THEN pgleaderlock.is_live_candidate(r.namespace, r.to_node_id) ELSE false END)
        ORDER BY r.request_id)
    INTO heartbeat.requests
    FROM pgleaderlock.requests r
    WHERE r.namespace = me.namespace AND r.done_at IS NULL
      AND CASE WHEN r.kind = 'step_down'
               THEN EXISTS (SELECT FROM pgleaderlock.leaders l
                            WHERE l.namespace = r.namespace AND l.role = r.role AND l.session_id = p_session_id AND NOT l.ended
                              AND l.epoch = coalesce(r.epoch, l.epoch))
               ELSE r.node_id = me.node_id AND p_session_id IN (SELECT pgleaderlock.request_targets(r)) END;
END
$$;

-- The heartbeat under the name that libraries of version 3 call.
CREATE OR REPLACE FUNCTION pgleaderlock.tick(
    p_session_id bigint, p_settled text[], p_draining boolean,
    OUT beat bigint, OUT roles bigint, OUT epochs numeric, OUT requests jsonb, OUT draining boolean)
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    -- This statement's snapshot is older than what the heartbeat has just written.
    SELECT h.beat, h.roles, h.epochs, h.requests,
           coalesce(p_draining, (SELECT s.draining FROM pgleaderlock.sessions s WHERE s.session_id = p_session_id))
    FROM pgleaderlock.heartbeat(p_session_id, p_settled, p_draining) h
$$;

-- How long a leader may still act whose term was lost with another history: the longest T of all sessions in this
-- ledger that may have been alive then.
CREATE FUNCTION pgleaderlock.longest_wait_s(p_namespace text) RETURNS double precision
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(max(s.lease_s), 0) FROM pgleaderlock.sessions s
    WHERE s.namespace = p_namespace
      AND s.last_heartbeat > clock_timestamp() - greatest(interval '1 hour', make_interval(secs => 2 * s.lease_s))
$$;

-- Begins terms: the second of the two statements that win a role. An earlier statement took the lock, so the snapshot
-- of this one is newer than the grant, and the predecessor that it reads is the last one. The fence is taken
-- exclusively first, so every fenced transaction of an older epoch has ended when the epoch changes. `p_wait_ms` is how
-- long to wait for a busy fence (0: not at all). Outcomes: `won`; `not_held`: this backend does not hold the lock;
-- `busy`: the fence or the row is locked, try again (the other roles are not delayed); `collision`: the role is led
-- under another key, or the key belongs to another name in use.
CREATE OR REPLACE FUNCTION pgleaderlock.bump(
    p_session_id bigint, p_roles text[], p_key1 integer[], p_key2 integer[], p_wait_ms integer, p_channel text)
RETURNS TABLE (
    role text, outcome text, epoch bigint, system_identifier bigint, timeline integer,
    prev_session_id bigint, prev_beat bigint, prev_wait_t double precision, prev_clean boolean, prev_instance uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    me pgleaderlock.sessions%ROWTYPE;
    here record;
    other record;
    held text[];
    fenced text[] := '{}';
    ours text[];
    taken text[];
    longest_s double precision;
    since timestamptz;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'bump needs READ COMMITTED' USING ERRCODE = 'PGL03';
    END IF;
    SELECT h.system_identifier, h.timeline INTO here FROM pgleaderlock.history() h;
    -- A grant counts as a beat: a node that saw an earlier term of this session must not take that for a sight of this
    -- term.
    UPDATE pgleaderlock.sessions s SET beat = s.beat + 1, last_heartbeat = clock_timestamp()
    WHERE s.session_id = p_session_id AND s.backend_pid = pg_backend_pid() AND s.ended_at IS NULL
    RETURNING s.* INTO me;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'session % is not recorded for this backend', p_session_id USING ERRCODE = 'PGL03';
    END IF;

    -- Entitled: the roles whose lock this backend holds.
    SELECT coalesce(array_agg(a.role ORDER BY a.role), '{}') INTO held
    FROM unnest(p_roles, p_key1, p_key2) AS a (role, key1, key2)
    JOIN pg_locks k ON k.locktype = 'advisory' AND k.granted AND k.objsubid = 2 AND k.pid = pg_backend_pid()
        AND k.classid = (a.key1::bigint & 4294967295)::oid AND k.objid = (a.key2::bigint & 4294967295)::oid;

    -- The fence.
    IF p_wait_ms = 0 THEN
        SELECT coalesce(array_agg(x.role) FILTER (WHERE x.locked), '{}') INTO fenced
        FROM (
            SELECT r.role, pg_try_advisory_xact_lock(pgleaderlock.fence_key(me.namespace, r.role)) AS locked
            FROM unnest(held) AS r (role) OFFSET 0
        ) x;
    ELSE
        BEGIN
            PERFORM set_config('lock_timeout', p_wait_ms::text, true);
            PERFORM pg_advisory_xact_lock(pgleaderlock.fence_key(me.namespace, r.role)) FROM unnest(held) AS r (role);
            fenced := held;
        EXCEPTION WHEN lock_not_available THEN
            NULL;
        END;
    END IF;

    -- The rows. Each statement from here on sees what was committed before this transaction took the fence.
    INSERT INTO pgleaderlock.leaders (namespace, role) SELECT me.namespace, r.role FROM unnest(fenced) AS r (role)
    ON CONFLICT (namespace, role) DO NOTHING;
    SELECT coalesce(array_agg(x.role), '{}') INTO ours
    FROM (
        SELECT l.role FROM pgleaderlock.leaders l WHERE l.namespace = me.namespace AND l.role = ANY (fenced)
        ORDER BY l.role FOR UPDATE SKIP LOCKED
    ) x;

    -- A role under two keys has two locks, which do not exclude each other. While another session holds the recorded
    -- one, that one counts. This is checked under the row's lock, because the record may have changed during the wait
    -- for the fence. It is checked before anything is changed, because a caller that is refused must not have taken a
    -- key from another role.
    SELECT coalesce(array_agg(a.role), '{}') INTO taken
    FROM unnest(p_roles, p_key1, p_key2) AS a (role, key1, key2)
    JOIN pgleaderlock.leaders l ON l.namespace = me.namespace AND l.role = a.role
    WHERE a.role = ANY (ours) AND (l.key1, l.key2) <> (a.key1, a.key2) AND EXISTS (
        SELECT FROM pg_locks k
        WHERE k.locktype = 'advisory' AND k.granted AND k.objsubid = 2 AND k.pid <> pg_backend_pid()
          AND k.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
          AND k.classid = (l.key1::bigint & 4294967295)::oid AND k.objid = (l.key2::bigint & 4294967295)::oid);

    -- A key of another name that no node leads, and that no other live session has led last: the role was renamed. The
    -- key moves to the new name, and with it the wait that its successor owes. The old name keeps its epoch.
    FOR other IN
        SELECT a.role AS heir, l.namespace, l.role, l.clean, l.wait_t,
               (l.system_identifier, l.timeline) = (here.system_identifier, here.timeline) AS known
        FROM unnest(p_roles, p_key1, p_key2) AS a (role, key1, key2)
        JOIN pgleaderlock.leaders l ON l.key1 = a.key1 AND l.key2 = a.key2 AND (l.namespace, l.role) <> (me.namespace, a.role)
        LEFT JOIN pgleaderlock.sessions s ON s.session_id = l.session_id
        WHERE a.role = ANY (ours) AND a.role <> ALL (taken)
          AND CASE WHEN s.session_id = me.session_id THEN l.ended ELSE s.session_id IS NULL OR NOT pgleaderlock.is_live(s) END
        ORDER BY l.namespace, l.role FOR UPDATE OF l SKIP LOCKED
    LOOP
        UPDATE pgleaderlock.leaders l SET key1 = NULL, key2 = NULL
        WHERE l.namespace = other.namespace AND l.role = other.role;
        IF NOT (other.clean AND other.known) THEN
            UPDATE pgleaderlock.leaders l
            SET clean = false, session_id = NULL,
                wait_t = greatest(l.wait_t, other.wait_t, CASE WHEN NOT other.known THEN greatest(
                    pgleaderlock.longest_wait_s(me.namespace), pgleaderlock.longest_wait_s(other.namespace)) END)
            WHERE l.namespace = me.namespace AND l.role = other.heir;
        END IF;
    END LOOP;

    -- A key that still belongs to another name is a collision.
    SELECT taken || coalesce(array_agg(a.role), '{}') INTO taken
    FROM unnest(p_roles, p_key1, p_key2) AS a (role, key1, key2)
    JOIN pgleaderlock.leaders o ON o.key1 = a.key1 AND o.key2 = a.key2 AND (o.namespace, o.role) <> (me.namespace, a.role)
    WHERE a.role = ANY (ours);
    RETURN QUERY
    SELECT r.role,
           CASE WHEN r.role <> ALL (held) THEN 'not_held' WHEN r.role = ANY (taken) THEN 'collision' ELSE 'busy' END,
           NULL::bigint, NULL::bigint, NULL::integer, NULL::bigint, NULL::bigint, NULL::double precision,
           NULL::boolean, NULL::uuid
    FROM unnest(p_roles) AS r (role) WHERE r.role <> ALL (ours) OR r.role = ANY (taken);
    SELECT coalesce(array_agg(r.role), '{}') INTO ours FROM unnest(ours) AS r (role) WHERE r.role <> ALL (taken);

    -- A row of another history is not trusted: terms that left no trace may have followed its last one. Nor is a role
    -- that was never led, while such terms may still act. The new leader then waits as long as any of them may act.
    SELECT k.seen_at INTO since FROM pgleaderlock.histories k
    WHERE k.system_identifier = here.system_identifier AND k.timeline = here.timeline;
    longest_s := me.lease_s;
    IF EXISTS (SELECT FROM pgleaderlock.leaders l WHERE l.namespace = me.namespace AND l.role = ANY (ours)
               AND (l.epoch = 0 OR (l.system_identifier, l.timeline) <> (here.system_identifier, here.timeline))) THEN
        longest_s := greatest(longest_s, pgleaderlock.longest_wait_s(me.namespace));
    END IF;

    RETURN QUERY
    WITH prev AS MATERIALIZED (
        SELECT l.role, l.epoch, l.session_id, l.system_identifier, l.timeline, s.beat, s.instance, s.last_heartbeat,
               l.clean AND known.so AS clean,
               CASE WHEN known.so THEN l.wait_t ELSE greatest(l.wait_t, longest_s) END AS wait_t
        FROM pgleaderlock.leaders l
        LEFT JOIN pgleaderlock.sessions s ON s.session_id = l.session_id
        CROSS JOIN LATERAL (
            SELECT CASE WHEN l.epoch = 0 THEN since < clock_timestamp() - make_interval(secs => longest_s)
                        ELSE (l.system_identifier, l.timeline) = (here.system_identifier, here.timeline) END AS so
        ) known
        WHERE l.namespace = me.namespace AND l.role = ANY (ours)
    ), bumped AS (
        UPDATE pgleaderlock.leaders l
        SET epoch = CASE
                -- The first epoch of a role in this ledger: start above every epoch that an earlier, lost history may
                -- have issued.
                WHEN prev.epoch = 0 THEN (here.timeline::bigint - 1) * 4294967296 + 1
                ELSE pgleaderlock.next_number(
                    prev.epoch, prev.system_identifier, prev.timeline, here.system_identifier, here.timeline) END,
            key1 = a.key1,
            key2 = a.key2,
            session_id = me.session_id,
            wait_t = greatest(me.lease_s, CASE WHEN prev.clean THEN 0 ELSE prev.wait_t END),
            clean = false,
            ended = false,
            acquired_at = clock_timestamp(),
            system_identifier = here.system_identifier,
            timeline = here.timeline
        FROM prev JOIN unnest(p_roles, p_key1, p_key2) AS a (role, key1, key2) ON a.role = prev.role
        WHERE l.namespace = me.namespace AND l.role = prev.role
        RETURNING l.role, l.epoch
    ), open_terms AS MATERIALIZED (
        SELECT t.role, t.epoch FROM pgleaderlock.terms t
        WHERE t.namespace = me.namespace AND t.role = ANY (ours) AND t.ended_at IS NULL
        ORDER BY t.role, t.epoch FOR NO KEY UPDATE SKIP LOCKED
    ), closed AS (
        -- A term without an end was lost. The last heartbeat of its session is the best known time of its end.
        UPDATE pgleaderlock.terms t
        SET ended_at = greatest(t.began_at, prev.last_heartbeat), reason = 'lost'
        FROM open_terms o JOIN prev ON prev.role = o.role
        WHERE t.namespace = me.namespace AND t.role = o.role AND t.epoch = o.epoch
        RETURNING t.role, t.node_id, t.epoch
    ), opened AS (
        INSERT INTO pgleaderlock.terms (namespace, role, epoch, session_id, node_id, holder_identity)
        SELECT me.namespace, b.role, b.epoch, me.session_id, me.node_id, me.holder_identity FROM bumped b
    ), noted AS (
        INSERT INTO pgleaderlock.events (kind, namespace, role, node_id, epoch)
        SELECT e.kind, me.namespace, e.role, e.node_id, e.epoch
        FROM (
            SELECT 1 AS n, 'lost' AS kind, c.role, c.node_id, c.epoch FROM closed c
            UNION ALL
            SELECT 2, 'acquired', b.role, me.node_id, b.epoch FROM bumped b
        ) e ORDER BY e.role, e.n
    )
    SELECT b.role, 'won', b.epoch, here.system_identifier, here.timeline,
           prev.session_id, prev.beat, prev.wait_t, prev.clean, prev.instance
    FROM bumped b JOIN prev ON prev.role = b.role;

    -- A request to step down is done when a node leads the role again.
    IF cardinality(ours) > 0 THEN
        UPDATE pgleaderlock.requests r
        SET done_at = clock_timestamp(), outcome = 'done',
            detail = CASE WHEN r.to_node_id <> me.node_id THEN me.node_id || ' leads it, and not ' || r.to_node_id
                          ELSE me.node_id || ' leads it' END
        WHERE r.request_id IN (
            SELECT o.request_id FROM pgleaderlock.requests o
            WHERE o.namespace = me.namespace AND o.done_at IS NULL AND o.kind = 'step_down' AND o.role = ANY (ours)
            ORDER BY o.request_id FOR NO KEY UPDATE SKIP LOCKED);
    END IF;
END
$$;

-- Ends terms; returns which. Matches session and epoch: a late call cannot end a newer term. The caller commits it
-- before it releases the lock, so that the next leader sees it. `p_clean` is true only if the leader had waited its own
-- predecessor out and has no work in flight: the successor's gate then opens at once. A role whose row is locked is not
-- ended, and so not clean.
CREATE OR REPLACE FUNCTION pgleaderlock.end_term(
    p_session_id bigint, p_roles text[], p_epochs bigint[], p_clean boolean[], p_reason text)
RETURNS SETOF text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    me pgleaderlock.sessions%ROWTYPE;
BEGIN
    SELECT * INTO me FROM pgleaderlock.sessions s
    WHERE s.session_id = p_session_id AND s.backend_pid = pg_backend_pid() AND s.ended_at IS NULL;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'session % is not recorded for this backend', p_session_id USING ERRCODE = 'PGL03';
    END IF;
    RETURN QUERY
    WITH ending AS MATERIALIZED (
        SELECT l.role, l.epoch, a.clean
        FROM unnest(p_roles, p_epochs, p_clean) AS a (role, epoch, clean)
        JOIN pgleaderlock.leaders l ON l.namespace = me.namespace AND l.role = a.role AND l.epoch = a.epoch
        WHERE l.session_id = p_session_id AND NOT l.ended
        ORDER BY l.role FOR NO KEY UPDATE OF l SKIP LOCKED
    ), ended AS (
        UPDATE pgleaderlock.leaders l SET clean = e.clean, ended = true
        FROM ending e WHERE l.namespace = me.namespace AND l.role = e.role
        RETURNING l.role, l.epoch, l.clean
    ), open_terms AS MATERIALIZED (
        SELECT t.role, t.epoch FROM pgleaderlock.terms t JOIN ending e ON e.role = t.role AND e.epoch = t.epoch
        WHERE t.namespace = me.namespace AND t.ended_at IS NULL
        ORDER BY t.role, t.epoch FOR NO KEY UPDATE OF t SKIP LOCKED
    ), closed AS (
        UPDATE pgleaderlock.terms t SET ended_at = clock_timestamp(), reason = p_reason
        FROM open_terms o WHERE t.namespace = me.namespace AND t.role = o.role AND t.epoch = o.epoch
    ), noted AS (
        INSERT INTO pgleaderlock.events (kind, namespace, role, node_id, epoch, detail)
        SELECT p_reason, me.namespace, e.role, me.node_id, e.epoch, CASE WHEN e.clean THEN 'clean' ELSE 'not clean' END
        FROM ended e
    )
    SELECT e.role FROM ended e;
END
$$;

-- Records that a standby has ended a silent session. The caller ends the session itself, with its own privileges.
CREATE OR REPLACE FUNCTION pgleaderlock.note_eviction(p_by_session_id bigint, p_session_id bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    me pgleaderlock.sessions%ROWTYPE;
    silent pgleaderlock.sessions%ROWTYPE;
BEGIN
    SELECT * INTO me FROM pgleaderlock.sessions s
    WHERE s.session_id = p_by_session_id AND s.backend_pid = pg_backend_pid() AND s.ended_at IS NULL;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'session % is not recorded for this backend', p_by_session_id USING ERRCODE = 'PGL03';
    END IF;
    SELECT * INTO silent FROM pgleaderlock.sessions s WHERE s.session_id = p_session_id;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    -- Refuse while the backend still runs, whatever the caller says.
    IF pgleaderlock.is_there(silent) THEN
        RAISE EXCEPTION 'session % has not ended', p_session_id USING ERRCODE = 'PGL03';
    END IF;
    UPDATE pgleaderlock.sessions s SET ended_at = clock_timestamp()
    WHERE s.session_id IN (SELECT o.session_id FROM pgleaderlock.sessions o
                           WHERE o.session_id = p_session_id AND o.ended_at IS NULL FOR NO KEY UPDATE SKIP LOCKED);
    WITH open_terms AS MATERIALIZED (
        SELECT t.namespace, t.role, t.epoch FROM pgleaderlock.terms t
        WHERE t.session_id = p_session_id AND t.ended_at IS NULL
        ORDER BY t.namespace, t.role, t.epoch FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE pgleaderlock.terms t SET ended_at = greatest(t.began_at, silent.last_heartbeat), reason = 'evicted'
    FROM open_terms o WHERE t.namespace = o.namespace AND t.role = o.role AND t.epoch = o.epoch;
    INSERT INTO pgleaderlock.events (kind, namespace, node_id, detail)
    VALUES ('evicted', silent.namespace, silent.node_id, 'silent session ' || p_session_id || ' ended by ' || me.node_id);
END
$$;

-- Asks the leader of a role to step down, if there is one. The node `p_to_node_id`, if given, may try first when the
-- role is free. Returns NULL if no node leads the role. Only inserts: the leader reads the request with its next
-- heartbeat.
CREATE OR REPLACE FUNCTION pgleaderlock.request_step_down(p_role text, p_namespace text, p_to_node_id text, p_channel text)
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    asked bigint;
BEGIN
    INSERT INTO pgleaderlock.requests (kind, namespace, role, epoch, to_node_id)
    SELECT 'step_down', l.namespace, l.role, l.epoch, p_to_node_id
    FROM pgleaderlock.leaders l WHERE l.namespace = p_namespace AND l.role = p_role AND NOT l.ended
    RETURNING request_id INTO asked;
    IF asked IS NOT NULL THEN
        INSERT INTO pgleaderlock.events (kind, namespace, role, detail)
        VALUES ('step_down_requested', p_namespace, p_role, concat('by ', session_user, ', in favour of ' || p_to_node_id));
    END IF;
    RETURN asked;
END
$$;

-- Asks every session of a node to give up all its roles and compete for none, or to compete again. Returns NULL if
-- there is no such node. Only inserts: the node marks its own record with its next heartbeat. Of several requests the
-- last one counts, because a node obeys them in their order.
CREATE OR REPLACE FUNCTION pgleaderlock.request_of_node(p_kind text, p_node_id text, p_namespace text, p_channel text)
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    asked bigint;
BEGIN
    INSERT INTO pgleaderlock.requests (kind, namespace, node_id, sessions)
    SELECT p_kind, p_namespace, p_node_id, live.sessions
    FROM (SELECT array_agg(s.session_id) AS sessions FROM pgleaderlock.sessions s
          WHERE s.namespace = p_namespace AND s.node_id = p_node_id AND pgleaderlock.is_live(s)) live
    WHERE live.sessions IS NOT NULL
    RETURNING request_id INTO asked;
    IF asked IS NOT NULL THEN
        INSERT INTO pgleaderlock.events (kind, namespace, node_id, detail)
        VALUES (p_kind || '_requested', p_namespace, p_node_id, 'by ' || session_user);
    END IF;
    RETURN asked;
END
$$;

-- Reserves roles that are about to be free: for a moment, other nodes leave them to the nodes that the requests name.
-- The leader calls this before it releases the locks.
CREATE OR REPLACE FUNCTION pgleaderlock.reserve(p_session_id bigint, p_request_ids bigint[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    WITH latest AS MATERIALIZED (
        -- Only for roles that this session leads, and once per request. Of several requests for one role the last one
        -- counts.
        SELECT max(r.request_id) AS request_id
        FROM pgleaderlock.requests r
        JOIN pgleaderlock.leaders l ON l.namespace = r.namespace AND l.role = r.role
        JOIN pgleaderlock.sessions s ON s.session_id = l.session_id
        WHERE r.request_id = ANY (p_request_ids) AND s.session_id = p_session_id AND s.backend_pid = pg_backend_pid()
          AND s.ended_at IS NULL AND r.namespace = s.namespace AND NOT l.ended
        GROUP BY r.role
    ), due AS MATERIALIZED (
        SELECT r.request_id FROM pgleaderlock.requests r
        WHERE r.request_id IN (SELECT request_id FROM latest) AND r.done_at IS NULL AND r.released_at IS NULL
        ORDER BY r.request_id FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE pgleaderlock.requests r SET released_at = clock_timestamp() FROM due WHERE r.request_id = due.request_id
$$;

-- Records the outcome of a request. The session that leads the role, or led it last, answers a step-down. Each session
-- that was asked answers a request to a node: the request is settled when the last one has answered.
CREATE OR REPLACE FUNCTION pgleaderlock.settle_request(p_session_id bigint, p_request_id bigint, p_outcome text, p_detail text)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    me pgleaderlock.sessions%ROWTYPE;
    asked pgleaderlock.requests%ROWTYPE;
    answered jsonb;
BEGIN
    SELECT * INTO me FROM pgleaderlock.sessions s
    WHERE s.session_id = p_session_id AND s.backend_pid = pg_backend_pid() AND s.ended_at IS NULL;
    SELECT * INTO asked FROM pgleaderlock.requests r
    WHERE r.request_id = p_request_id AND r.namespace = me.namespace AND r.done_at IS NULL
      AND p_outcome IN ('done', 'refused')
    FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF asked.kind = 'step_down' THEN
        UPDATE pgleaderlock.requests r SET done_at = clock_timestamp(), outcome = p_outcome, detail = p_detail
        WHERE r.request_id = p_request_id AND EXISTS (
            SELECT FROM pgleaderlock.leaders l
            WHERE l.namespace = asked.namespace AND l.role = asked.role AND l.session_id = p_session_id);
    ELSIF p_session_id IN (SELECT pgleaderlock.request_targets(asked)) THEN
        answered := asked.answers || jsonb_build_object(p_session_id::text, p_outcome);
        IF EXISTS (SELECT FROM pgleaderlock.request_targets(asked) AS t (session_id) WHERE NOT answered ? t.session_id::text)
        THEN
            UPDATE pgleaderlock.requests r SET answers = answered WHERE r.request_id = p_request_id;
        ELSE
            UPDATE pgleaderlock.requests r
            SET answers = answered, done_at = clock_timestamp(), detail = p_detail,
                outcome = CASE WHEN jsonb_path_exists(answered, '$.* ? (@ == "refused")') THEN 'refused' ELSE 'done' END
            WHERE r.request_id = p_request_id;
        END IF;
    END IF;
END
$$;

-- Moves the epoch of a role far ahead, above every epoch that was issued in lost commits. For operators, after the
-- restore of a backup or a loss of commits; no run-time role may call it. The leader notices at its next beat, and a
-- successor waits as after a loss. The new epoch stays within the 2^32 numbers of this history, in steps of 2^20: a
-- standby that was promoted from before the call issues numbers above all of them.
CREATE OR REPLACE FUNCTION pgleaderlock.advance_epoch(
    p_role text, p_namespace text, p_channel text, OUT old_epoch bigint, OUT new_epoch bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    -- A commit must be on disk before it is acknowledged, as in every session of an election.
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM pg_advisory_xact_lock(pgleaderlock.fence_key(p_namespace, p_role));
    SELECT l.epoch INTO old_epoch FROM pgleaderlock.leaders l WHERE l.namespace = p_namespace AND l.role = p_role FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'role % is not known in namespace %', p_role, p_namespace USING ERRCODE = 'PGL01';
    END IF;
    new_epoch := (old_epoch / 1048576 + 1) * 1048576;
    IF new_epoch / 4294967296 <> old_epoch / 4294967296 THEN
        RAISE EXCEPTION 'the epoch of role % was advanced 4095 times in this history: there is no room for more', p_role
            USING ERRCODE = 'PGL01';
    END IF;
    UPDATE pgleaderlock.leaders l SET epoch = new_epoch, session_id = NULL, clean = false, ended = true
    WHERE l.namespace = p_namespace AND l.role = p_role;
    WITH open_terms AS MATERIALIZED (
        SELECT t.epoch FROM pgleaderlock.terms t
        WHERE t.namespace = p_namespace AND t.role = p_role AND t.ended_at IS NULL
        ORDER BY t.epoch FOR NO KEY UPDATE SKIP LOCKED
    ), ended AS (
        UPDATE pgleaderlock.terms t SET ended_at = clock_timestamp(), reason = 'superseded'
        FROM open_terms o WHERE t.namespace = p_namespace AND t.role = p_role AND t.epoch = o.epoch
        RETURNING t.node_id, t.epoch
    )
    INSERT INTO pgleaderlock.events (kind, namespace, role, node_id, epoch)
    SELECT 'superseded', p_namespace, p_role, e.node_id, e.epoch FROM ended e;
    INSERT INTO pgleaderlock.events (kind, namespace, role, epoch, detail)
    VALUES ('advanced', p_namespace, p_role, new_epoch, 'by ' || session_user);
END
$$;

-- Notes which server has the first waiter of a lock, unless that server is `p_except`: a hint that the caller sends
-- after the commit. The notes are lines of a setting that ends with the transaction; each is a JSON array of the server
-- and the lock.
CREATE OR REPLACE FUNCTION pgleaderlock.lock_wake(p_lock_name text, p_except text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    server text;
BEGIN
    SELECT w.server_id INTO server
    FROM pgleaderlock.lock_waiters w JOIN pgleaderlock.lock_servers s ON s.server_id = w.server_id
    WHERE w.lock_name = p_lock_name AND w.deadline > clock_timestamp() AND s.alive_until > clock_timestamp()
    ORDER BY w.ticket LIMIT 1;
    IF server IS DISTINCT FROM p_except AND server IS NOT NULL THEN
        PERFORM set_config(
            'pgleaderlock.hints',
            concat(current_setting('pgleaderlock.hints', true), jsonb_build_array(server, p_lock_name)::text, E'\n'), true);
    END IF;
END
$$;

-- PUBLIC has no privileges here: grants.sql grants them to single roles. Roles that were nodes before are granted the
-- new functions, too.
REVOKE ALL ON pgleaderlock.histories FROM PUBLIC;
REVOKE ALL ON FUNCTION pgleaderlock.is_there, pgleaderlock.is_live, pgleaderlock.request_targets, pgleaderlock.heartbeat,
    pgleaderlock.longest_wait_s FROM PUBLIC;
DO $$
DECLARE
    node text;  -- not type name: a quoted name may be longer
BEGIN
    FOR node IN
        SELECT DISTINCT a.grantee::regrole::text
        FROM pg_proc p, aclexplode(p.proacl) a
        WHERE p.oid = 'pgleaderlock.tick(bigint, text[], boolean)'::regprocedure AND a.privilege_type = 'EXECUTE'
          AND a.grantee NOT IN (0, p.proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION pgleaderlock.heartbeat TO %s', node);
    END LOOP;
END
$$;

INSERT INTO pgleaderlock.schema_version (version) VALUES (4);
