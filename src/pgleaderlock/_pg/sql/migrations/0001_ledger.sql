-- The ledger: who leads which role, since when and under which epoch, and what happened before.
--
-- Only the functions below write to these tables. A run-time role may read the tables and call the functions. A
-- function that takes a session checks that it is the session of the caller's backend; one that begins a term also
-- checks that the backend holds the lock. The functions that write are SECURITY DEFINER with a fixed search_path, so
-- that the caller cannot substitute a table or an operator of its own. They expect READ COMMITTED: each statement
-- inside must see what was committed before it.

-- A DBA may have created the schema for an owner that may not create one. IF NOT EXISTS would need that privilege even
-- then.
DO $$
BEGIN
    IF to_regnamespace('pgleaderlock') IS NULL THEN
        CREATE SCHEMA pgleaderlock;
    END IF;
END
$$;

CREATE TABLE pgleaderlock.schema_version (
    version     integer PRIMARY KEY,
    applied_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- One row per session of a node. `beat` is a counter, not a time, because clocks of different hosts are never compared.
CREATE TABLE pgleaderlock.sessions (
    session_id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    namespace        text NOT NULL,
    instance         uuid NOT NULL,
    node_id          text NOT NULL,
    host             text NOT NULL,
    os_pid           integer NOT NULL,
    holder_identity  text NOT NULL,
    backend_pid      integer NOT NULL,
    backend_start    timestamptz NOT NULL,
    database_role    name NOT NULL,
    gate_s           double precision NOT NULL CHECK (gate_s > 0),
    lease_s          double precision NOT NULL CHECK (lease_s > gate_s),
    candidate        boolean NOT NULL DEFAULT true,
    library_version  text NOT NULL,
    beat             bigint NOT NULL DEFAULT 1,
    last_heartbeat   timestamptz NOT NULL DEFAULT clock_timestamp(),
    started_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at         timestamptz
) WITH (fillfactor = 50);  -- leaves room for HOT updates: a heartbeat then updates no index

-- One row per role. The unique constraint on the keys refuses a second name with the keys of another one.
CREATE TABLE pgleaderlock.leaders (
    namespace          text NOT NULL,
    role               text NOT NULL,
    key1               integer NOT NULL,
    key2               integer NOT NULL,
    epoch              bigint NOT NULL DEFAULT 0 CHECK (epoch >= 0),
    session_id         bigint,
    wait_t             double precision NOT NULL DEFAULT 0 CHECK (wait_t >= 0),
    clean              boolean NOT NULL DEFAULT true,
    ended              boolean NOT NULL DEFAULT true,
    acquired_at        timestamptz,
    system_identifier  bigint,
    timeline           integer,
    PRIMARY KEY (namespace, role),
    UNIQUE (key1, key2)
) WITH (fillfactor = 50);
CREATE INDEX leaders_session ON pgleaderlock.leaders (session_id);

-- One row per term: who led, from when to when, and why it ended.
CREATE TABLE pgleaderlock.terms (
    namespace        text NOT NULL,
    role             text NOT NULL,
    epoch            bigint NOT NULL,
    session_id       bigint NOT NULL,
    node_id          text NOT NULL,
    holder_identity  text NOT NULL,
    began_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at         timestamptz,
    reason           text CHECK (reason IN ('released', 'lost', 'evicted', 'superseded')),
    PRIMARY KEY (namespace, role, epoch)
);
CREATE INDEX terms_began ON pgleaderlock.terms (began_at);

-- The events, for operators.
CREATE TABLE pgleaderlock.events (
    event_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    kind       text NOT NULL,
    namespace  text NOT NULL,
    role       text,
    node_id    text,
    epoch      bigint,
    detail     text
);
CREATE INDEX events_at ON pgleaderlock.events (at);

-- Requests of operators and nodes. They are durable: a notification only wakes the node that has to read them.
CREATE TABLE pgleaderlock.requests (
    request_id  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    kind        text NOT NULL CHECK (kind IN ('step_down', 'drain')),
    namespace   text NOT NULL,
    role        text,
    node_id     text,
    to_node_id  text,
    asked_by    name NOT NULL DEFAULT session_user,
    done_at     timestamptz
);
CREATE INDEX requests_open ON pgleaderlock.requests (namespace) WHERE done_at IS NULL;

-- Who leads, one row per role, for programs that read the ledger by scope key.
CREATE VIEW pgleaderlock.leader_state AS
SELECT (l.key1::bigint << 32) | (l.key2::bigint & 4294967295) AS scope_key,
       l.epoch,
       coalesce(s.holder_identity, '') AS holder_identity,
       s.last_heartbeat,
       l.namespace,
       l.role,
       s.node_id,
       CASE WHEN NOT l.ended THEN l.acquired_at END AS acquired_at
FROM pgleaderlock.leaders l LEFT JOIN pgleaderlock.sessions s ON s.session_id = l.session_id AND NOT l.ended;

-- The history that this server writes. A promoted standby has another timeline, and so has a copy that was restored to
-- a point in time. A new cluster has another identifier. Epochs jump when either differs, because two histories may
-- have issued the same epoch.
CREATE FUNCTION pgleaderlock.history(OUT system_identifier bigint, OUT timeline integer)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.system_identifier, ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer
    FROM pg_control_system() c
$$;

-- The next epoch or fencing token after `p_last`. If `p_last` was issued in another history, the result is far above
-- every number that another history may have issued as well: one step of 2^32 for each timeline since then, because a
-- timeline in between may have issued numbers that left no trace.
CREATE FUNCTION pgleaderlock.next_number(
    p_last bigint, p_system_identifier bigint, p_timeline integer, p_here_system_identifier bigint, p_here_timeline integer)
RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN p_system_identifier = p_here_system_identifier AND p_timeline = p_here_timeline
                THEN p_last + 1
                ELSE (p_last / 4294967296
                      + CASE WHEN p_system_identifier = p_here_system_identifier AND p_timeline < p_here_timeline
                             THEN p_here_timeline - p_timeline ELSE p_here_timeline END) * 4294967296 END
$$;

-- The advisory key of a role's fence, in the key space of single bigints; the lock itself is in the space of pairs. It
-- is computed from the names alone, so no lookup is needed first. Two roles with the same key would wait for each
-- other's transactions, which is slow, but not unsafe. It is never stored, because another version of PostgreSQL may
-- hash differently.
CREATE FUNCTION pgleaderlock.fence_key(p_namespace text, p_role text) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT pg_catalog.hashtextextended(p_role, pg_catalog.hashtextextended(p_namespace, 0))
$$;

CREATE FUNCTION pgleaderlock.open_session(
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
    UPDATE pgleaderlock.sessions s SET ended_at = clock_timestamp()
    WHERE (s.instance = p_instance AND s.database_role = session_user OR s.backend_pid = pg_backend_pid())
      AND s.session_id <> open_session.session_id AND s.ended_at IS NULL;
    SELECT h.system_identifier, h.timeline INTO open_session.system_identifier, open_session.timeline
    FROM pgleaderlock.history() h;
    -- Delete old rows in small steps, at each opening of a session.
    DELETE FROM pgleaderlock.sessions s WHERE s.session_id IN (
        SELECT o.session_id FROM pgleaderlock.sessions o
        WHERE o.last_heartbeat < clock_timestamp() - interval '7 days'
          AND NOT EXISTS (SELECT FROM pgleaderlock.leaders l WHERE l.session_id = o.session_id)
        LIMIT 500);
    DELETE FROM pgleaderlock.events e WHERE e.event_id IN (
        SELECT o.event_id FROM pgleaderlock.events o WHERE o.at < clock_timestamp() - interval '30 days' LIMIT 1000);
END
$$;

-- One heartbeat per node, whatever the number of roles. `p_settled` names the roles whose predecessor this node has
-- waited out since the last beat: a successor then no longer has to wait for that predecessor as well. Returns how many
-- roles this session leads and the sum of their epochs, so that a leader notices when it has lost an epoch; and the
-- requests to step down from these roles. It refuses a session that is not the caller's.
CREATE FUNCTION pgleaderlock.beat(
    p_session_id bigint, p_settled text[], OUT beat bigint, OUT roles bigint, OUT epochs numeric, OUT requests jsonb)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE pgleaderlock.sessions s SET beat = s.beat + 1, last_heartbeat = clock_timestamp()
    WHERE s.session_id = p_session_id AND s.backend_pid = pg_backend_pid() AND s.ended_at IS NULL
    RETURNING s.beat INTO beat.beat;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'session % is not recorded for this backend', p_session_id USING ERRCODE = 'PGL03';
    END IF;
    IF cardinality(p_settled) > 0 THEN
        UPDATE pgleaderlock.leaders l SET wait_t = s.lease_s
        FROM pgleaderlock.sessions s
        WHERE s.session_id = p_session_id AND l.session_id = p_session_id
          AND l.namespace = s.namespace AND l.role = ANY (p_settled) AND NOT l.ended;
    END IF;
    SELECT count(*), coalesce(sum(l.epoch), 0) INTO beat.roles, beat.epochs
    FROM pgleaderlock.leaders l WHERE l.session_id = p_session_id AND NOT l.ended;
    SELECT jsonb_agg(jsonb_build_object('request_id', r.request_id, 'role', r.role)) INTO beat.requests
    FROM pgleaderlock.requests r
    JOIN pgleaderlock.leaders l ON l.namespace = r.namespace AND l.role = r.role
    WHERE r.done_at IS NULL AND r.kind = 'step_down' AND l.session_id = p_session_id AND NOT l.ended;
END
$$;

-- Begins terms: the second of the two statements that win a role. An earlier statement took the lock, so the snapshot
-- of this one is newer than the grant, and the predecessor that it reads is the last one. The fence is taken
-- exclusively first, so every fenced transaction of an older epoch has ended when the epoch changes. `p_wait_ms` is how
-- long to wait for a busy fence. With 0, the role is reported as busy at once, and does not delay the others.
CREATE FUNCTION pgleaderlock.bump(
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

    -- Entitled: the roles whose lock this backend holds, and whose key belongs to no other name.
    SELECT array_agg(a.role) INTO entitled
    FROM unnest(p_roles, p_key1, p_key2) AS a (role, key1, key2)
    JOIN pg_locks k ON k.locktype = 'advisory' AND k.granted AND k.objsubid = 2 AND k.pid = pg_backend_pid()
        AND k.classid = (a.key1::bigint & 4294967295)::oid AND k.objid = (a.key2::bigint & 4294967295)::oid
    WHERE NOT EXISTS (
        SELECT FROM pgleaderlock.leaders o
        WHERE o.key1 = a.key1 AND o.key2 = a.key2 AND (o.namespace, o.role) <> (me.namespace, a.role));
    RETURN QUERY
    SELECT a.role,
           CASE WHEN EXISTS (
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
    ), opened AS (
        INSERT INTO pgleaderlock.terms (namespace, role, epoch, session_id, node_id, holder_identity)
        SELECT me.namespace, b.role, b.epoch, me.session_id, me.node_id, me.holder_identity FROM bumped b
    ), noted AS (
        INSERT INTO pgleaderlock.events (kind, namespace, role, node_id, epoch)
        SELECT 'acquired', me.namespace, b.role, me.node_id, b.epoch FROM bumped b
    )
    SELECT b.role, 'won', b.epoch, here.system_identifier, here.timeline,
           prev.session_id, prev.beat, prev.wait_t, prev.clean, prev.instance
    FROM bumped b JOIN prev ON prev.role = b.role;

    IF cardinality(fenced) > 0 THEN
        PERFORM pg_notify(p_channel, 'acquired');
    END IF;
END
$$;

-- Ends terms. Matches session and epoch: a late call cannot end a newer term. The caller commits it before it releases
-- the lock, so that the next leader sees it. `p_clean` is true only if the leader had waited its own predecessor out
-- and has no work in flight: the successor's gate then opens at once.
CREATE FUNCTION pgleaderlock.end_term(
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
    WITH ended AS (
        UPDATE pgleaderlock.leaders l SET clean = a.clean, ended = true
        FROM unnest(p_roles, p_epochs, p_clean) AS a (role, epoch, clean)
        WHERE l.namespace = me.namespace AND l.role = a.role AND l.session_id = p_session_id AND l.epoch = a.epoch
          AND NOT l.ended
        RETURNING l.role, l.epoch, l.clean
    ), closed AS (
        UPDATE pgleaderlock.terms t SET ended_at = clock_timestamp(), reason = p_reason
        FROM ended e
        WHERE t.namespace = me.namespace AND t.role = e.role AND t.epoch = e.epoch AND t.ended_at IS NULL
    ), noted AS (
        INSERT INTO pgleaderlock.events (kind, namespace, role, node_id, epoch, detail)
        SELECT p_reason, me.namespace, e.role, me.node_id, e.epoch, CASE WHEN e.clean THEN 'clean' ELSE 'not clean' END
        FROM ended e
    )
    SELECT e.role FROM ended e;
END
$$;

CREATE FUNCTION pgleaderlock.close_session(p_session_id bigint) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    UPDATE pgleaderlock.sessions SET ended_at = clock_timestamp()
    WHERE session_id = p_session_id AND backend_pid = pg_backend_pid() AND ended_at IS NULL
$$;

-- Records that a standby has ended a silent session. The caller ends the session itself, with its own privileges.
CREATE FUNCTION pgleaderlock.note_eviction(p_by_session_id bigint, p_session_id bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    me pgleaderlock.sessions%ROWTYPE;
BEGIN
    SELECT * INTO me FROM pgleaderlock.sessions s
    WHERE s.session_id = p_by_session_id AND s.backend_pid = pg_backend_pid() AND s.ended_at IS NULL;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'session % is not recorded for this backend', p_by_session_id USING ERRCODE = 'PGL03';
    END IF;
    -- Refuse while the backend still runs, whatever the caller says. A backend whose start time is not visible here
    -- counts as running.
    IF EXISTS (
        SELECT FROM pgleaderlock.sessions s, pg_stat_get_activity(s.backend_pid) a
        WHERE s.session_id = p_session_id AND (a.backend_start IS NULL OR a.backend_start = s.backend_start))
    THEN
        RAISE EXCEPTION 'session % has not ended', p_session_id USING ERRCODE = 'PGL03';
    END IF;
    UPDATE pgleaderlock.sessions s SET ended_at = clock_timestamp() WHERE s.session_id = p_session_id AND s.ended_at IS NULL;
    UPDATE pgleaderlock.terms t SET ended_at = greatest(t.began_at, s.last_heartbeat), reason = 'evicted'
    FROM pgleaderlock.sessions s
    WHERE t.session_id = p_session_id AND s.session_id = p_session_id AND t.ended_at IS NULL;
    INSERT INTO pgleaderlock.events (kind, namespace, node_id, detail)
    SELECT 'evicted', s.namespace, s.node_id, 'silent session ' || s.session_id || ' ended by ' || me.node_id
    FROM pgleaderlock.sessions s WHERE s.session_id = p_session_id;
END
$$;

-- Asks the leader of a role to step down; the notification only wakes it.
CREATE FUNCTION pgleaderlock.request_step_down(p_role text, p_namespace text, p_to_node_id text, p_channel text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    asked bigint;
BEGIN
    INSERT INTO pgleaderlock.requests (kind, namespace, role, to_node_id)
    VALUES ('step_down', p_namespace, p_role, p_to_node_id) RETURNING request_id INTO asked;
    PERFORM pg_notify(p_channel, 'requested');
    RETURN asked;
END
$$;

CREATE FUNCTION pgleaderlock.finish_request(p_session_id bigint, p_request_id bigint) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    UPDATE pgleaderlock.requests r SET done_at = clock_timestamp()
    FROM pgleaderlock.sessions s
    WHERE r.request_id = p_request_id AND s.session_id = p_session_id AND s.backend_pid = pg_backend_pid()
      AND s.ended_at IS NULL AND r.namespace = s.namespace AND r.done_at IS NULL
$$;

-- Moves the epoch of a role far ahead, above every epoch that was issued in lost commits. For operators, after the
-- restore of a backup or a loss of commits; no run-time role may call it. The leader notices at its next beat, and a
-- successor waits as after a loss.
CREATE FUNCTION pgleaderlock.advance_epoch(
    p_role text, p_namespace text, p_channel text, OUT old_epoch bigint, OUT new_epoch bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(pgleaderlock.fence_key(p_namespace, p_role));
    SELECT l.epoch INTO old_epoch FROM pgleaderlock.leaders l WHERE l.namespace = p_namespace AND l.role = p_role FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'role % is not known in namespace %', p_role, p_namespace USING ERRCODE = 'PGL01';
    END IF;
    UPDATE pgleaderlock.terms t SET ended_at = clock_timestamp(), reason = 'superseded'
    WHERE t.namespace = p_namespace AND t.role = p_role AND t.ended_at IS NULL;
    UPDATE pgleaderlock.leaders l
    SET epoch = (l.epoch / 4294967296 + 1) * 4294967296, session_id = NULL, clean = false, ended = true
    WHERE l.namespace = p_namespace AND l.role = p_role
    RETURNING l.epoch INTO new_epoch;
    INSERT INTO pgleaderlock.events (kind, namespace, role, epoch, detail)
    VALUES ('advanced', p_namespace, p_role, new_epoch, 'by ' || session_user);
    PERFORM pg_notify(p_channel, 'advanced');
END
$$;

-- The fence. The caller runs it in its own transaction, before it writes. It holds back the bump of a newer epoch until
-- this transaction ends, and refuses an epoch that is no longer current. It notes the epoch in a setting of the
-- transaction, for the triggers of fenced tables; they do not trust the note, and fence again. `p_holder`, if given,
-- must be the holder that won this epoch in this database, because two databases may have issued the same epoch.
--
-- Nearly every transaction needs this function only, so it has just two statements: the snapshot of the second one is
-- newer than the lock. It runs with the privileges of its caller, because changing user and search_path would cost as
-- much as the lookup itself. So every name has its schema: otherwise an object of the caller's could be found first.
CREATE FUNCTION pgleaderlock.fence(
    p_role text, p_epoch bigint, p_namespace text DEFAULT 'pgleaderlock', p_holder text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    noted text;
BEGIN
    PERFORM pg_catalog.pg_advisory_xact_lock_shared(pgleaderlock.fence_key(p_namespace, p_role));
    SELECT CASE WHEN l.epoch OPERATOR(pg_catalog.=) p_epoch AND p_holder IS NULL
                     AND pg_catalog.current_setting('transaction_isolation') OPERATOR(pg_catalog.=) 'read committed'
                     AND pg_catalog.current_setting('transaction_read_only') OPERATOR(pg_catalog.=) 'off'
                THEN pg_catalog.set_config(
                    pg_catalog.textcat('pgleaderlock.fenced_', pg_catalog.to_hex(pgleaderlock.fence_key(p_namespace, p_role))),
                    p_epoch::pg_catalog.text, true) END
    INTO noted
    FROM pgleaderlock.leaders l
    WHERE l.namespace OPERATOR(pg_catalog.=) p_namespace AND l.role OPERATOR(pg_catalog.=) p_role;
    IF noted IS NULL THEN
        PERFORM pgleaderlock.fence_strictly(p_role, p_epoch, p_namespace, p_holder);
    END IF;
END
$$;

-- The rest of the fence: it explains a refusal, checks `p_holder`, and serves the other isolation levels. At these, a
-- plain read would not be safe, because it sees the snapshot from the start of the transaction. FOR KEY SHARE fails
-- (40001) if the epoch has changed since, and needs a privilege that no run-time role has. The epoch is part of a key
-- for that reason: FOR SHARE, which is stronger, would block the heartbeat that settles the term, and fail after any
-- change of the row. The epoch is the first column of the index, so that a lookup by name uses the primary key instead.
CREATE UNIQUE INDEX leaders_epoch ON pgleaderlock.leaders (epoch, namespace, role);
CREATE FUNCTION pgleaderlock.fence_strictly(p_role text, p_epoch bigint, p_namespace text, p_holder text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    key bigint := pgleaderlock.fence_key(p_namespace, p_role);
    latest bigint;
    holder text;
BEGIN
    IF current_setting('transaction_read_only') = 'on' THEN
        RAISE EXCEPTION 'a read-only transaction cannot be fenced: it writes nothing' USING ERRCODE = '25006';
    END IF;
    PERFORM pg_advisory_xact_lock_shared(key);
    IF current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') THEN
        SELECT l.epoch INTO latest FROM pgleaderlock.leaders l WHERE l.namespace = p_namespace AND l.role = p_role;
    ELSE
        SELECT l.epoch INTO latest FROM pgleaderlock.leaders l WHERE l.namespace = p_namespace AND l.role = p_role FOR KEY SHARE;
    END IF;
    IF latest IS NULL THEN
        RAISE EXCEPTION 'role % has never been led in namespace % of this database', p_role, p_namespace
            USING ERRCODE = 'PGL01', HINT = 'Above READ COMMITTED: not before this transaction took its snapshot.';
    END IF;
    IF latest IS DISTINCT FROM p_epoch THEN
        RAISE EXCEPTION 'epoch % of role % is stale: the current one is %', p_epoch, p_role, latest USING ERRCODE = 'PGL02';
    END IF;
    IF p_holder IS NOT NULL THEN
        SELECT t.holder_identity INTO holder FROM pgleaderlock.terms t
        WHERE t.namespace = p_namespace AND t.role = p_role AND t.epoch = p_epoch;
        IF holder <> p_holder THEN
            RAISE EXCEPTION 'epoch % of role % was won by % in this database, not by %', p_epoch, p_role, holder, p_holder
                USING ERRCODE = 'PGL05', HINT = 'Connect to the database that elected the leader.';
        END IF;
    END IF;
    PERFORM set_config('pgleaderlock.fenced_' || to_hex(key), p_epoch::text, true);
END
$$;

-- The trigger of a fenced table. It runs once per statement, whatever the number of rows.
CREATE FUNCTION pgleaderlock.check_fence() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    key bigint := pgleaderlock.fence_key(TG_ARGV[1], TG_ARGV[0]);
    claimed text := nullif(current_setting('pgleaderlock.fenced_' || to_hex(key), true), '');
BEGIN
    IF claimed IS NULL OR claimed !~ '^[0-9]{1,18}$' THEN
        RAISE EXCEPTION 'a write to %.% must be fenced for role %', TG_TABLE_SCHEMA, TG_TABLE_NAME, TG_ARGV[0]
            USING ERRCODE = 'PGL04', HINT = 'Call pgleaderlock.fence(role, epoch) in this transaction first.';
    END IF;
    PERFORM pgleaderlock.fence(TG_ARGV[0], claimed::bigint, TG_ARGV[1]);
    RETURN NULL;
END
$$;

-- Fences a table and each of its partitions, because a write directly to a partition does not fire the parent's
-- trigger. Runs with the privileges of its caller, which must own the table. Call it again after adding a partition: an
-- existing trigger is replaced in place, so readers are not blocked, and no moment passes without it. Returns the
-- number of tables that were fenced.
CREATE FUNCTION pgleaderlock.fence_table(p_table regclass, p_role text, p_namespace text DEFAULT 'pgleaderlock') RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    part regclass;
    name text := 'pgleaderlock_fence_' || left(encode(sha256(convert_to(p_namespace || E'\n' || p_role, 'UTF8')), 'hex'), 12);
    parts integer := 0;
BEGIN
    FOR part IN
        WITH RECURSIVE tree AS (
            SELECT p_table::oid AS relid
            UNION SELECT i.inhrelid FROM pg_inherits i JOIN tree ON tree.relid = i.inhparent
        )
        SELECT t.relid::regclass FROM tree t JOIN pg_class c ON c.oid = t.relid WHERE c.relkind IN ('r', 'p', 'f')
    LOOP
        EXECUTE format(
            'CREATE OR REPLACE TRIGGER %I BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON %s '
            'FOR EACH STATEMENT EXECUTE FUNCTION pgleaderlock.check_fence(%L, %L)', name, part, p_role, p_namespace);
        parts := parts + 1;
    END LOOP;
    IF parts = 0 THEN
        RAISE EXCEPTION '% is not a table: fence the tables below it', p_table USING ERRCODE = '42809';
    END IF;
    RETURN parts;
END
$$;

-- Removes the triggers of this role from a table and its partitions. Returns the number of tables that had one.
CREATE FUNCTION pgleaderlock.unfence_table(p_table regclass, p_role text, p_namespace text DEFAULT 'pgleaderlock') RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    part regclass;
    name text := 'pgleaderlock_fence_' || left(encode(sha256(convert_to(p_namespace || E'\n' || p_role, 'UTF8')), 'hex'), 12);
    parts integer := 0;
BEGIN
    FOR part IN
        WITH RECURSIVE tree AS (
            SELECT p_table::oid AS relid
            UNION SELECT i.inhrelid FROM pg_inherits i JOIN tree ON tree.relid = i.inhparent
        )
        SELECT t.relid::regclass FROM tree t JOIN pg_trigger g ON g.tgrelid = t.relid AND g.tgname = name
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', name, part);
        parts := parts + 1;
    END LOOP;
    RETURN parts;
END
$$;

-- PUBLIC has no privileges here: grants.sql grants them to single roles.
REVOKE ALL ON SCHEMA pgleaderlock FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA pgleaderlock FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA pgleaderlock FROM PUBLIC;

INSERT INTO pgleaderlock.schema_version (version) VALUES (1);
