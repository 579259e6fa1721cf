-- For operators: requests with outcomes, drained nodes, balancing, a fuller history, and its retention.
--
-- Libraries of version 2 go on working: no function that they call changes its arguments or its result. The new bodies
-- of these functions record more. New features are in new functions.

-- A reader that holds a table for long must not make every heartbeat queue up behind this migration: let it fail after
-- a second, to be run again.
SELECT set_config('lock_timeout', '1s', true);

ALTER TABLE pgleaderlock.sessions
    ADD COLUMN draining boolean NOT NULL DEFAULT false,  -- competes for no role until it is resumed
    ADD COLUMN balance  boolean NOT NULL DEFAULT false;

ALTER TABLE pgleaderlock.requests
    ADD COLUMN released_at timestamptz,  -- when the role was given up for `to_node_id`, which goes first for a moment
    ADD COLUMN outcome     text CHECK (outcome IN ('done', 'refused', 'expired')),
    ADD COLUMN detail      text,
    DROP CONSTRAINT requests_kind_check,
    ADD CONSTRAINT requests_kind_check CHECK (kind IN ('step_down', 'drain', 'resume'));
UPDATE pgleaderlock.requests SET outcome = 'done' WHERE done_at IS NOT NULL;
CREATE INDEX requests_at ON pgleaderlock.requests (at);
-- For pruning one namespace without reading all others.
CREATE INDEX terms_kept ON pgleaderlock.terms (namespace, began_at);
CREATE INDEX events_kept ON pgleaderlock.events (namespace, at);

-- Is there a live node of this name that could take a role over now? Checks its record and its backend, because the
-- record of a killed node stays fresh for a while.
CREATE FUNCTION pgleaderlock.is_live_candidate(p_namespace text, p_node_id text) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (
        SELECT FROM pgleaderlock.sessions s
        WHERE s.namespace = p_namespace AND s.node_id = p_node_id AND s.ended_at IS NULL AND s.candidate AND NOT s.draining
          AND s.last_heartbeat > clock_timestamp() - make_interval(secs => 2 * s.lease_s)
          AND EXISTS (SELECT FROM pg_stat_get_activity(s.backend_pid)))
$$;

CREATE OR REPLACE FUNCTION pgleaderlock.open_session(
    p_namespace text, p_instance uuid, p_node_id text, p_host text, p_os_pid integer, p_holder_identity text,
    p_gate_s double precision, p_lease_s double precision, p_candidate boolean, p_library_version text,
    p_backend_start timestamptz DEFAULT NULL,
    OUT session_id bigint, OUT system_identifier bigint, OUT timeline integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    -- The caller passes the start time of its backend, because the ledger's owner, as which this function runs, may not
    -- be allowed to see it. If the caller passes none, or a wrong one, other nodes cannot evict the session when it
    -- falls silent: only its lease ends it.
    INSERT INTO pgleaderlock.sessions AS s (
        namespace, instance, node_id, host, os_pid, holder_identity, backend_pid, backend_start, database_role,
        gate_s, lease_s, candidate, library_version)
    VALUES (p_namespace, p_instance, p_node_id, p_host, p_os_pid, p_holder_identity, pg_backend_pid(),
        coalesce(p_backend_start, '-infinity'), session_user, p_gate_s, p_lease_s, p_candidate, p_library_version)
    RETURNING s.session_id INTO open_session.session_id;
    -- This process has no other session any more, and this backend serves no other client: end the earlier sessions
    -- that either of them has recorded.
    WITH ended AS (
        UPDATE pgleaderlock.sessions s SET ended_at = clock_timestamp()
        WHERE (s.instance = p_instance AND s.database_role = session_user OR s.backend_pid = pg_backend_pid())
          AND s.session_id <> open_session.session_id AND s.ended_at IS NULL
        RETURNING s.session_id, s.namespace, s.node_id
    )
    INSERT INTO pgleaderlock.events (kind, namespace, node_id, detail)
    SELECT e.kind, e.namespace, e.node_id, e.detail
    FROM (
        SELECT 1 AS n, 'session_ended' AS kind, o.namespace, o.node_id, 'session ' || o.session_id || ' was lost' AS detail
        FROM ended o
        UNION ALL
        SELECT 2, 'session_opened', p_namespace, p_node_id,
               'session ' || open_session.session_id || ' of ' || p_holder_identity || ', version ' || p_library_version
    ) e ORDER BY e.n;
    SELECT h.system_identifier, h.timeline INTO open_session.system_identifier, open_session.timeline
    FROM pgleaderlock.history() h;
END
$$;

-- What a session of version 3 adds to its record when it opens. A drained node stays drained when it reconnects.
CREATE FUNCTION pgleaderlock.describe_session(p_session_id bigint, p_draining boolean, p_balance boolean) RETURNS boolean
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    UPDATE pgleaderlock.sessions SET draining = p_draining, balance = p_balance
    WHERE session_id = p_session_id AND backend_pid = pg_backend_pid() AND ended_at IS NULL
    RETURNING true
$$;

-- The heartbeat of version 3: it does what `beat` does, and also returns the requests to this node. `p_draining`, if
-- given, is this node's own decision. Requests that have been open for 5 minutes expire.
CREATE FUNCTION pgleaderlock.tick(
    p_session_id bigint, p_settled text[], p_draining boolean,
    OUT beat bigint, OUT roles bigint, OUT epochs numeric, OUT requests jsonb, OUT draining boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    me record;
BEGIN
    UPDATE pgleaderlock.sessions s
    SET beat = s.beat + 1, last_heartbeat = clock_timestamp(), draining = coalesce(p_draining, s.draining)
    WHERE s.session_id = p_session_id AND s.backend_pid = pg_backend_pid() AND s.ended_at IS NULL
    RETURNING s.beat, s.draining, s.namespace, s.node_id, s.instance INTO me;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'session % is not recorded for this backend', p_session_id USING ERRCODE = 'PGL03';
    END IF;
    tick.beat := me.beat;
    tick.draining := me.draining;
    IF cardinality(p_settled) > 0 THEN
        UPDATE pgleaderlock.leaders l SET wait_t = s.lease_s
        FROM pgleaderlock.sessions s
        WHERE s.session_id = p_session_id AND l.session_id = p_session_id
          AND l.namespace = s.namespace AND l.role = ANY (p_settled) AND NOT l.ended;
    END IF;
    SELECT count(*), coalesce(sum(l.epoch), 0) INTO tick.roles, tick.epochs
    FROM pgleaderlock.leaders l WHERE l.session_id = p_session_id AND NOT l.ended;
    IF NOT EXISTS (SELECT FROM pgleaderlock.requests r WHERE r.namespace = me.namespace AND r.done_at IS NULL) THEN
        RETURN;  -- the usual case: no open request
    END IF;
    UPDATE pgleaderlock.requests r
    SET done_at = clock_timestamp(), outcome = 'expired', detail = 'nobody has done it within 5 minutes'
    WHERE r.request_id IN (
        SELECT o.request_id FROM pgleaderlock.requests o
        WHERE o.namespace = me.namespace AND o.done_at IS NULL AND o.at < clock_timestamp() - interval '5 minutes'
        FOR UPDATE SKIP LOCKED);
    SELECT jsonb_agg(
        jsonb_build_object(
            'request_id', r.request_id, 'kind', r.kind, 'role', r.role, 'to_node_id', r.to_node_id,
            'to_is_live', CASE WHEN r.to_node_id IS NOT NULL
                               THEN pgleaderlock.is_live_candidate(r.namespace, r.to_node_id) ELSE false END)
        ORDER BY r.request_id)
    INTO tick.requests
    FROM pgleaderlock.requests r
    WHERE r.namespace = me.namespace AND r.done_at IS NULL
      AND (r.kind IN ('drain', 'resume') AND r.node_id = me.node_id
           -- Only if this process had a session before the request: older requests were for its predecessor of the same
           -- node_id.
           AND EXISTS (SELECT FROM pgleaderlock.sessions e WHERE e.instance = me.instance AND e.started_at <= r.at)
           OR r.kind = 'step_down' AND EXISTS (
               SELECT FROM pgleaderlock.leaders l
               WHERE l.namespace = r.namespace AND l.role = r.role AND l.session_id = p_session_id AND NOT l.ended));
END
$$;

-- As in version 1. New: a predecessor's lost term is recorded as an event, too, and a request to step down is done when
-- a node leads the role again.
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
    entitled text[];
    fenced text[];
    rekeyed text[];
    elsewhere text[];
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'bump needs READ COMMITTED' USING ERRCODE = 'PGL03';
    END IF;
    SELECT * INTO me FROM pgleaderlock.sessions s
    WHERE s.session_id = p_session_id AND s.backend_pid = pg_backend_pid() AND s.ended_at IS NULL;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'session % is not recorded for this backend', p_session_id USING ERRCODE = 'PGL03';
    END IF;
    SELECT h.system_identifier, h.timeline INTO here FROM pgleaderlock.history() h;
    -- A grant counts as a beat: a node that saw an earlier term of this session must not take that for a sight of this
    -- term.
    UPDATE pgleaderlock.sessions s SET beat = s.beat + 1, last_heartbeat = clock_timestamp()
    WHERE s.session_id = p_session_id;

    -- A role under two keys has two locks, which do not exclude each other. While another session holds the recorded
    -- one, that one counts.
    SELECT array_agg(l.role) INTO rekeyed
    FROM unnest(p_roles, p_key1, p_key2) AS a (role, key1, key2)
    JOIN pgleaderlock.leaders l ON l.namespace = me.namespace AND l.role = a.role AND (l.key1, l.key2) <> (a.key1, a.key2);
    IF rekeyed IS NOT NULL THEN
        SELECT array_agg(l.role) INTO elsewhere
        FROM pgleaderlock.leaders l
        JOIN pg_locks k ON k.locktype = 'advisory' AND k.granted AND k.objsubid = 2 AND k.pid <> pg_backend_pid()
            AND k.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
            AND k.classid = (l.key1::bigint & 4294967295)::oid AND k.objid = (l.key2::bigint & 4294967295)::oid
        WHERE l.namespace = me.namespace AND l.role = ANY (rekeyed);
    END IF;

    -- Entitled: the roles whose lock this backend holds, and whose key belongs to no other name.
    SELECT array_agg(a.role) INTO entitled
    FROM unnest(p_roles, p_key1, p_key2) AS a (role, key1, key2)
    JOIN pg_locks k ON k.locktype = 'advisory' AND k.granted AND k.objsubid = 2 AND k.pid = pg_backend_pid()
        AND k.classid = (a.key1::bigint & 4294967295)::oid AND k.objid = (a.key2::bigint & 4294967295)::oid
    WHERE NOT EXISTS (
        SELECT FROM pgleaderlock.leaders o
        WHERE o.key1 = a.key1 AND o.key2 = a.key2 AND (o.namespace, o.role) <> (me.namespace, a.role))
      AND a.role <> ALL (coalesce(elsewhere, '{}'));
    RETURN QUERY
    SELECT a.role,
           CASE WHEN a.role = ANY (elsewhere) OR EXISTS (
               SELECT FROM pgleaderlock.leaders o
               WHERE o.key1 = a.key1 AND o.key2 = a.key2 AND (o.namespace, o.role) <> (me.namespace, a.role))
           THEN 'collision' ELSE 'not_held' END,
           NULL::bigint, NULL::bigint, NULL::integer, NULL::bigint, NULL::bigint, NULL::double precision,
           NULL::boolean, NULL::uuid
    FROM unnest(p_roles, p_key1, p_key2) AS a (role, key1, key2)
    WHERE a.role <> ALL (coalesce(entitled, '{}'));

    IF p_wait_ms = 0 THEN
        SELECT array_agg(x.role) FILTER (WHERE x.locked) INTO fenced
        FROM (
            SELECT a.role, pg_try_advisory_xact_lock(pgleaderlock.fence_key(me.namespace, a.role)) AS locked
            FROM unnest(p_roles, p_key1, p_key2) AS a (role, key1, key2)
            WHERE a.role = ANY (entitled)
            OFFSET 0
        ) x;
    ELSE
        BEGIN
            PERFORM set_config('lock_timeout', p_wait_ms::text, true);
            PERFORM pg_advisory_xact_lock(pgleaderlock.fence_key(me.namespace, a.role))
            FROM unnest(p_roles, p_key1, p_key2) AS a (role, key1, key2)
            WHERE a.role = ANY (entitled);
            fenced := entitled;
        EXCEPTION WHEN lock_not_available THEN
            fenced := '{}';
        END;
    END IF;
    RETURN QUERY
    SELECT r.role, 'busy', NULL::bigint, NULL::bigint, NULL::integer, NULL::bigint, NULL::bigint,
           NULL::double precision, NULL::boolean, NULL::uuid
    FROM unnest(entitled) AS r (role) WHERE r.role <> ALL (coalesce(fenced, '{}'));

    INSERT INTO pgleaderlock.leaders (namespace, role, key1, key2)
    SELECT me.namespace, a.role, a.key1, a.key2
    FROM unnest(p_roles, p_key1, p_key2) AS a (role, key1, key2)
    WHERE a.role = ANY (fenced)
    ON CONFLICT (namespace, role) DO NOTHING;

    IF rekeyed IS NOT NULL THEN
        UPDATE pgleaderlock.leaders l SET key1 = a.key1, key2 = a.key2
        FROM unnest(p_roles, p_key1, p_key2) AS a (role, key1, key2)
        WHERE l.namespace = me.namespace AND l.role = a.role AND a.role = ANY (fenced) AND a.role = ANY (rekeyed);
    END IF;

    RETURN QUERY
    WITH prev AS MATERIALIZED (
        SELECT l.role, l.epoch, l.session_id, l.wait_t, l.clean, l.system_identifier, l.timeline,
               s.beat, s.instance, s.last_heartbeat
        FROM pgleaderlock.leaders l LEFT JOIN pgleaderlock.sessions s ON s.session_id = l.session_id
        WHERE l.namespace = me.namespace AND l.role = ANY (fenced)
        FOR UPDATE OF l
    ), bumped AS (
        UPDATE pgleaderlock.leaders l
        SET epoch = CASE
                -- The first epoch of a role in this ledger: start above every epoch that an earlier, lost history may
                -- have issued.
                WHEN prev.epoch = 0 THEN (here.timeline::bigint - 1) * 4294967296 + 1
                ELSE pgleaderlock.next_number(
                    prev.epoch, prev.system_identifier, prev.timeline, here.system_identifier, here.timeline) END,
            session_id = me.session_id,
            wait_t = greatest(me.lease_s, CASE WHEN prev.clean THEN 0 ELSE prev.wait_t END),
            clean = false,
            ended = false,
            acquired_at = clock_timestamp(),
            system_identifier = here.system_identifier,
            timeline = here.timeline
        FROM prev
        WHERE l.namespace = me.namespace AND l.role = prev.role
        RETURNING l.role, l.epoch
    ), closed AS (
        -- A term without an end was lost. The last heartbeat of its session is the best known time of its end.
        UPDATE pgleaderlock.terms t
        SET ended_at = greatest(t.began_at, prev.last_heartbeat), reason = 'lost'
        FROM prev
        WHERE t.namespace = me.namespace AND t.role = prev.role AND t.epoch = prev.epoch AND t.ended_at IS NULL
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

    IF cardinality(fenced) > 0 THEN
        UPDATE pgleaderlock.requests r
        SET done_at = clock_timestamp(), outcome = 'done',
            detail = CASE WHEN r.to_node_id <> me.node_id THEN me.node_id || ' leads it, and not ' || r.to_node_id
                          ELSE me.node_id || ' leads it' END
        WHERE r.namespace = me.namespace AND r.done_at IS NULL AND r.kind = 'step_down' AND r.role = ANY (fenced);
        PERFORM pg_notify(p_channel, 'acquired');
    END IF;
END
$$;

-- Ends the session's record, and records that as an event.
CREATE OR REPLACE FUNCTION pgleaderlock.close_session(p_session_id bigint) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    WITH ended AS (
        UPDATE pgleaderlock.sessions SET ended_at = clock_timestamp()
        WHERE session_id = p_session_id AND backend_pid = pg_backend_pid() AND ended_at IS NULL
        RETURNING session_id, namespace, node_id
    )
    INSERT INTO pgleaderlock.events (kind, namespace, node_id, detail)
    SELECT 'session_ended', e.namespace, e.node_id, 'session ' || e.session_id FROM ended e
$$;

-- Records, as events, that a drain of these roles has begun or ended.
CREATE FUNCTION pgleaderlock.note_drain(p_session_id bigint, p_kind text, p_roles text[], p_details text[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO pgleaderlock.events (kind, namespace, role, node_id, detail)
    SELECT p_kind, s.namespace, a.role, s.node_id, a.detail
    FROM pgleaderlock.sessions s, unnest(p_roles, p_details) AS a (role, detail)
    WHERE s.session_id = p_session_id AND s.backend_pid = pg_backend_pid() AND s.ended_at IS NULL
      AND p_kind IN ('drain_began', 'drain_ended')
$$;

-- Asks the leader of a role to step down, if there is one; the notification only wakes it. The node `p_to_node_id`, if
-- given, may try first when the role is free. Returns NULL if no node leads the role.
CREATE OR REPLACE FUNCTION pgleaderlock.request_step_down(p_role text, p_namespace text, p_to_node_id text, p_channel text)
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    asked bigint;
BEGIN
    INSERT INTO pgleaderlock.requests (kind, namespace, role, to_node_id)
    SELECT 'step_down', l.namespace, l.role, p_to_node_id
    FROM pgleaderlock.leaders l WHERE l.namespace = p_namespace AND l.role = p_role AND NOT l.ended
    RETURNING request_id INTO asked;
    IF asked IS NOT NULL THEN
        INSERT INTO pgleaderlock.events (kind, namespace, role, detail)
        VALUES ('step_down_requested', p_namespace, p_role, concat('by ', session_user, ', in favour of ' || p_to_node_id));
        PERFORM pg_notify(p_channel, 'requested');
    END IF;
    RETURN asked;
END
$$;

-- Asks every session of a node to give up all its roles and compete for none, or to compete again. The request is in
-- the sessions' records, so each session obeys it once, however late it reads it. Returns NULL if there is no such
-- node.
CREATE FUNCTION pgleaderlock.request_of_node(p_kind text, p_node_id text, p_namespace text, p_channel text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    asked bigint;
BEGIN
    UPDATE pgleaderlock.sessions s SET draining = p_kind = 'drain'
    WHERE s.namespace = p_namespace AND s.node_id = p_node_id AND s.ended_at IS NULL
      AND s.last_heartbeat > clock_timestamp() - make_interval(secs => 2 * s.lease_s);
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    -- The later request counts.
    UPDATE pgleaderlock.requests r
    SET done_at = clock_timestamp(), outcome = 'refused', detail = 'a later request asks for the opposite'
    WHERE r.namespace = p_namespace AND r.done_at IS NULL AND r.node_id = p_node_id AND r.kind IN ('drain', 'resume')
      AND r.kind <> p_kind;
    INSERT INTO pgleaderlock.requests (kind, namespace, node_id) VALUES (p_kind, p_namespace, p_node_id)
    RETURNING request_id INTO asked;
    INSERT INTO pgleaderlock.events (kind, namespace, node_id, detail)
    VALUES (p_kind || '_requested', p_namespace, p_node_id, 'by ' || session_user);
    PERFORM pg_notify(p_channel, 'requested');
    RETURN asked;
END
$$;

CREATE FUNCTION pgleaderlock.request_drain(p_node_id text, p_namespace text, p_channel text) RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT pgleaderlock.request_of_node('drain', p_node_id, p_namespace, p_channel)
$$;

CREATE FUNCTION pgleaderlock.request_resume(p_node_id text, p_namespace text, p_channel text) RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT pgleaderlock.request_of_node('resume', p_node_id, p_namespace, p_channel)
$$;

-- Reserves roles that are about to be free: for a moment, other nodes leave them to the nodes that the requests name.
-- The leader calls this before it releases the locks.
CREATE FUNCTION pgleaderlock.reserve(p_session_id bigint, p_request_ids bigint[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    UPDATE pgleaderlock.requests r SET released_at = clock_timestamp()
    FROM pgleaderlock.sessions s
    WHERE s.session_id = p_session_id AND s.backend_pid = pg_backend_pid() AND s.ended_at IS NULL
      AND r.namespace = s.namespace AND r.done_at IS NULL AND r.released_at IS NULL
      -- Only for roles that this session leads, and once per request. Of several requests for one role the last one
      -- counts.
      AND r.request_id IN (SELECT max(o.request_id) FROM pgleaderlock.requests o
                           JOIN pgleaderlock.leaders l ON l.namespace = o.namespace AND l.role = o.role
                           WHERE o.request_id = ANY (p_request_ids) AND l.session_id = s.session_id AND NOT l.ended
                           GROUP BY o.role)
$$;

CREATE FUNCTION pgleaderlock.settle_request(p_session_id bigint, p_request_id bigint, p_outcome text, p_detail text)
RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    UPDATE pgleaderlock.requests r SET done_at = clock_timestamp(), outcome = p_outcome, detail = p_detail
    FROM pgleaderlock.sessions s
    WHERE r.request_id = p_request_id AND s.session_id = p_session_id AND s.backend_pid = pg_backend_pid()
      AND s.ended_at IS NULL AND r.namespace = s.namespace AND r.done_at IS NULL AND p_outcome IN ('done', 'refused')
      AND (r.kind = 'step_down' AND EXISTS (SELECT FROM pgleaderlock.leaders l WHERE l.namespace = r.namespace
                                              AND l.role = r.role AND l.session_id = s.session_id)
           -- A node may have several sessions: it is drained when the last of them is.
           OR r.node_id = s.node_id AND (r.kind = 'resume' OR p_outcome = 'refused' OR NOT EXISTS (
               SELECT FROM pgleaderlock.sessions o JOIN pgleaderlock.leaders l ON l.session_id = o.session_id AND NOT l.ended
               WHERE o.namespace = s.namespace AND o.node_id = s.node_id AND o.session_id <> s.session_id
                 AND o.ended_at IS NULL AND o.last_heartbeat > clock_timestamp() - make_interval(secs => 2 * o.lease_s))))
$$;

-- Libraries of version 2 know no other outcome.
CREATE OR REPLACE FUNCTION pgleaderlock.finish_request(p_session_id bigint, p_request_id bigint) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT pgleaderlock.settle_request(p_session_id, p_request_id, 'done', NULL)
$$;

-- As in version 1. New: the end of the term is recorded as a separate event.
CREATE OR REPLACE FUNCTION pgleaderlock.advance_epoch(
    p_role text, p_namespace text, p_channel text, OUT old_epoch bigint, OUT new_epoch bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(pgleaderlock.fence_key(p_namespace, p_role));
    SELECT l.epoch INTO old_epoch FROM pgleaderlock.leaders l WHERE l.namespace = p_namespace AND l.role = p_role FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'role % is not known in namespace %', p_role, p_namespace USING ERRCODE = 'PGL01';
    END IF;
    WITH ended AS (
        UPDATE pgleaderlock.terms t SET ended_at = clock_timestamp(), reason = 'superseded'
        WHERE t.namespace = p_namespace AND t.role = p_role AND t.ended_at IS NULL
        RETURNING t.node_id, t.epoch
    )
    INSERT INTO pgleaderlock.events (kind, namespace, role, node_id, epoch)
    SELECT 'superseded', p_namespace, p_role, e.node_id, e.epoch FROM ended e;
    UPDATE pgleaderlock.leaders l
    SET epoch = (l.epoch / 4294967296 + 1) * 4294967296, session_id = NULL, clean = false, ended = true
    WHERE l.namespace = p_namespace AND l.role = p_role
    RETURNING l.epoch INTO new_epoch;
    INSERT INTO pgleaderlock.events (kind, namespace, role, epoch, detail)
    VALUES ('advanced', p_namespace, p_role, new_epoch, 'by ' || session_user);
    PERFORM pg_notify(p_channel, 'advanced');
END
$$;

-- Deletes rows older than `p_keep`, at most `p_limit` of each kind; returns how many. Keeps open terms, and the last
-- term of each role, because the fence may ask which holder won it. It hardly waits for a locked table, because the
-- caller's next heartbeat must not be late: it then deletes nothing, and a later call does.
CREATE FUNCTION pgleaderlock.prune(p_namespace text, p_keep interval, p_limit integer) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    oldest timestamptz := clock_timestamp() - p_keep;
    gone bigint := 0;
    n bigint;
BEGIN
    -- Check the time that results, not the interval: '-12 months 361 days' equals one day in a comparison, but leads to
    -- a time in the future.
    IF oldest IS NULL OR oldest > clock_timestamp() - interval '1 hour' OR p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 10000 THEN
        RAISE EXCEPTION 'prune keeps one hour at least, and deletes 1 to 10000 rows at a time' USING ERRCODE = '22023';
    END IF;
    PERFORM set_config('lock_timeout', '50', true);
    DELETE FROM pgleaderlock.terms t USING (
        SELECT o.role, o.epoch FROM pgleaderlock.terms o
        WHERE o.namespace = p_namespace AND o.began_at < oldest AND o.ended_at < oldest
          AND EXISTS (SELECT FROM pgleaderlock.terms later
                      WHERE later.namespace = o.namespace AND later.role = o.role AND later.epoch > o.epoch)
        ORDER BY o.began_at LIMIT p_limit FOR UPDATE SKIP LOCKED) old
    WHERE t.namespace = p_namespace AND t.role = old.role AND t.epoch = old.epoch;
    GET DIAGNOSTICS n = ROW_COUNT;
    gone := gone + n;
    DELETE FROM pgleaderlock.events e WHERE e.event_id IN (
        SELECT o.event_id FROM pgleaderlock.events o
        WHERE o.namespace = p_namespace AND o.at < oldest ORDER BY o.at LIMIT p_limit FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS n = ROW_COUNT;
    gone := gone + n;
    DELETE FROM pgleaderlock.requests r WHERE r.request_id IN (
        SELECT o.request_id FROM pgleaderlock.requests o
        WHERE o.namespace = p_namespace AND o.at < oldest ORDER BY o.at LIMIT p_limit FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS n = ROW_COUNT;
    gone := gone + n;
    DELETE FROM pgleaderlock.sessions s WHERE s.session_id IN (
        SELECT o.session_id FROM pgleaderlock.sessions o
        WHERE o.namespace = p_namespace AND o.last_heartbeat < oldest
          AND NOT EXISTS (SELECT FROM pgleaderlock.leaders l WHERE l.session_id = o.session_id)
        LIMIT p_limit FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN gone + n;
EXCEPTION WHEN lock_not_available THEN
    RETURN 0;
END
$$;

-- PUBLIC has no privileges here: grants.sql grants them to single roles. Roles that were nodes before are granted the
-- new functions, too.
REVOKE ALL ON FUNCTION pgleaderlock.is_live_candidate, pgleaderlock.describe_session, pgleaderlock.tick,
    pgleaderlock.note_drain, pgleaderlock.request_of_node, pgleaderlock.request_drain, pgleaderlock.request_resume,
    pgleaderlock.reserve, pgleaderlock.settle_request, pgleaderlock.prune FROM PUBLIC;
DO $$
DECLARE
    node text;  -- not type name: a quoted name may be longer
BEGIN
    FOR node IN
        SELECT DISTINCT a.grantee::regrole::text
        FROM pg_proc p, aclexplode(p.proacl) a
        WHERE p.oid = 'pgleaderlock.beat(bigint, text[])'::regprocedure AND a.privilege_type = 'EXECUTE'
          AND a.grantee NOT IN (0, p.proowner)
    LOOP
        EXECUTE format(
            'GRANT EXECUTE ON FUNCTION pgleaderlock.describe_session, pgleaderlock.tick, pgleaderlock.note_drain,'
            ' pgleaderlock.request_drain, pgleaderlock.request_resume, pgleaderlock.reserve, pgleaderlock.settle_request,'
            ' pgleaderlock.prune TO %s', node);
    END LOOP;
END
$$;

INSERT INTO pgleaderlock.schema_version (version) VALUES (3);
