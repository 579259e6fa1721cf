-- Slots: work that runs once per tick, in the first process that claims it. Gates: when the leader of a term could act.
-- Declared roles: which roles a session competes for, and which roles an operator has forgotten.
--
-- Libraries of version 4 go on working: no function that they call changes its arguments or its result. Their leaders
-- do not report gates (`gate` is NULL), and their sessions do not declare roles (`wants` is NULL): such a session
-- counts for every role.

SELECT set_config('lock_timeout', '1s', true);

-- One row per tick of a name. `epoch` is the term of the last claim, so the leader of a later term knows that the
-- runner of an open slot is gone. `outcome` is NULL while the slot runs, and stays NULL if its runner was lost.
CREATE TABLE pgleaderlock.slots (
    namespace        text NOT NULL,
    name             text NOT NULL,
    slot             text NOT NULL,
    epoch            bigint NOT NULL,
    holder_identity  text NOT NULL,
    attempts         integer NOT NULL DEFAULT 1,
    claimed_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at         timestamptz,
    outcome          text CHECK (outcome IN ('done', 'failed')),
    detail           text,
    PRIMARY KEY (namespace, name, slot)
);
CREATE INDEX slots_latest ON pgleaderlock.slots (namespace, name, claimed_at DESC);

-- The tick in which a moment lies. Ticks of more than an hour follow the local clock, as in a crontab, from midnight of
-- a Monday on; one of them may last an hour more or less. Shorter ones are counted from local midnight in elapsed time.
-- So a change to summer time neither skips nor doubles a tick.
CREATE FUNCTION pgleaderlock.tick_of(
    p_at timestamptz, p_every interval, p_time_zone text, OUT begins timestamptz, OUT ends timestamptz)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    every_s numeric := extract(epoch FROM p_every);
    local_time timestamp := p_at AT TIME ZONE p_time_zone;
    today timestamp := date_trunc('day', local_time);
    midnight timestamptz := today AT TIME ZONE p_time_zone;
BEGIN
    IF every_s > 3600 THEN
        local_time := date_bin(p_every, local_time, timestamp '2001-01-01');
        begins := local_time AT TIME ZONE p_time_zone;
        ends := (local_time + p_every) AT TIME ZONE p_time_zone;
    ELSE
        begins := midnight + floor(extract(epoch FROM p_at - midnight) / every_s) * p_every;
        ends := least(begins + p_every, (today + interval '1 day') AT TIME ZONE p_time_zone);
    END IF;
END
$$;

-- Claims a slot for the leader of this term, or returns its state. The fence ensures that the term is the current one,
-- and that no later one begins before this transaction has committed. With `p_retry`, a slot that has failed, or whose
-- runner was lost, is claimed again. An open slot that this term has claimed itself may always be claimed again: only
-- one caller leads the term, and the answer may have been lost. The newest thousand slots of each name are kept.
CREATE FUNCTION pgleaderlock.claim_slot(
    p_namespace text, p_name text, p_slot text, p_epoch bigint, p_holder text, p_retry boolean,
    OUT claimed boolean, OUT attempts integer, OUT outcome text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    PERFORM pgleaderlock.fence(p_name, p_epoch, p_namespace, p_holder);
    -- In one statement, because an earlier claim of this term, whose answer was lost, may commit at this moment.
    INSERT INTO pgleaderlock.slots AS s (namespace, name, slot, epoch, holder_identity)
    VALUES (p_namespace, p_name, p_slot, p_epoch, p_holder)
    ON CONFLICT (namespace, name, slot) DO UPDATE
    SET epoch = p_epoch, holder_identity = p_holder, attempts = s.attempts + 1, claimed_at = clock_timestamp(),
        ended_at = NULL, outcome = NULL, detail = NULL
    WHERE s.outcome IS NULL AND s.epoch = p_epoch
       OR p_retry AND (s.outcome = 'failed' OR s.outcome IS NULL AND s.epoch < p_epoch)
    RETURNING s.attempts INTO attempts;
    claimed := FOUND;
    IF NOT claimed THEN  -- ON CONFLICT has locked the row anyway, so it is unchanged
        SELECT s.attempts, s.outcome INTO attempts, outcome FROM pgleaderlock.slots s
        WHERE s.namespace = p_namespace AND s.name = p_name AND s.slot = p_slot;
    ELSIF attempts = 1 THEN
        DELETE FROM pgleaderlock.slots s
        WHERE s.namespace = p_namespace AND s.name = p_name AND s.claimed_at < (
            SELECT o.claimed_at FROM pgleaderlock.slots o WHERE o.namespace = p_namespace AND o.name = p_name
            ORDER BY o.claimed_at DESC OFFSET 999 LIMIT 1);
    END IF;
END
$$;

-- Records the outcome of a slot, reported by the runner that has claimed it. Not fenced: as long as no later term has
-- claimed the slot, its runner's report is true, even if the runner's term was over when the work ended. Returns false
-- if another term has claimed the slot.
CREATE FUNCTION pgleaderlock.finish_slot(
    p_namespace text, p_name text, p_slot text, p_epoch bigint, p_holder text, p_outcome text, p_detail text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE pgleaderlock.slots s SET outcome = p_outcome, detail = p_detail, ended_at = clock_timestamp()
    WHERE s.namespace = p_namespace AND s.name = p_name AND s.slot = p_slot AND s.epoch = p_epoch
      AND s.holder_identity = p_holder AND (s.outcome IS NULL OR s.outcome = p_outcome);  -- a repeat is accepted
    RETURN FOUND;
END
$$;

-- The gate of each term, as its leader reports it. `gate` is `open`, or why the gate is shut; NULL if the leader has
-- not reported it, as with a library of version 4. `opened_at`: when the gate first opened. `opens_at`: when a waiting
-- gate will open. `shut_at`: the last moment at which the leader could act, NULL while the gate is open. `gaps`: when
-- the gate was shut in between, as arrays of two times in milliseconds since 1970 and the reason; the newest hundred.
ALTER TABLE pgleaderlock.terms
    ADD COLUMN gate         text,
    ADD COLUMN opened_at    timestamptz,
    ADD COLUMN opens_at     timestamptz,
    ADD COLUMN shut_at      timestamptz,
    ADD COLUMN in_flight    integer,
    ADD COLUMN work_failed  boolean NOT NULL DEFAULT false,
    ADD COLUMN gaps         jsonb NOT NULL DEFAULT '[]';

-- Records a leader's reports of its gates. Returns the roles that were recorded and, for a gate that has opened for the
-- first time in its term, how long no node could act before (as `history_terms` counts it). A separate statement, for
-- people only: no decision depends on it, and it may fail. Times are sent as ages, in seconds before the send, so that
-- no two clocks are compared. It locks only rows of terms (5 in the order of 0004), and waits for none of them: the
-- leader reports a skipped role again.
CREATE FUNCTION pgleaderlock.report_gates(p_session_id bigint, p_reports jsonb)
RETURNS TABLE (role text, failover_s double precision)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    me pgleaderlock.sessions%ROWTYPE;
    at constant timestamptz := clock_timestamp();
BEGIN
    SELECT * INTO me FROM pgleaderlock.sessions s
    WHERE s.session_id = p_session_id AND s.backend_pid = pg_backend_pid() AND s.ended_at IS NULL;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'session % is not recorded for this backend', p_session_id USING ERRCODE = 'PGL03';
    END IF;
    -- Neither a lock nor the disk nor a standby may delay this for long. But a message of a lease also beats, and a
    -- beat that other nodes have seen must never be issued again: so a lease does wait for the disk.
    PERFORM set_config('lock_timeout', '50ms', true);
    IF me.hold = 'session' THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    RETURN QUERY
    WITH told AS MATERIALIZED (
        SELECT r.role, r.epoch, r.gate, r.in_flight, r.work_failed,
               CASE WHEN r.opened_age_s >= 0 THEN at - make_interval(secs => r.opened_age_s) END AS opened_at,
               at + make_interval(secs => r.opens_in_s) AS opens_at,
               CASE WHEN r.shut_age_s >= 0 THEN at - make_interval(secs => r.shut_age_s) END AS shut_at,
               (SELECT jsonb_agg(jsonb_build_array(
                    (extract(epoch FROM at - make_interval(secs => (g.gap ->> 0)::float8)) * 1000)::bigint,
                    (extract(epoch FROM at - make_interval(secs => (g.gap ->> 1)::float8)) * 1000)::bigint,
                    g.gap ->> 2) ORDER BY g.n)
                FROM jsonb_array_elements(r.gaps) WITH ORDINALITY AS g (gap, n)) AS gaps
        FROM jsonb_to_recordset(p_reports) AS r (
            role text, epoch bigint, gate text, in_flight integer, work_failed boolean,
            opened_age_s float8, opens_in_s float8, shut_age_s float8, gaps jsonb)
    ), open_terms AS MATERIALIZED (
        SELECT t.role, t.epoch, t.opened_at IS NULL AND r.opened_at IS NOT NULL AS opens
        FROM pgleaderlock.terms t JOIN told r ON r.role = t.role AND r.epoch = t.epoch
        WHERE t.namespace = me.namespace AND t.session_id = p_session_id AND t.ended_at IS NULL
        ORDER BY t.role, t.epoch FOR NO KEY UPDATE OF t SKIP LOCKED
    )
    UPDATE pgleaderlock.terms t
    SET gate = r.gate, in_flight = r.in_flight, work_failed = coalesce(r.work_failed, false), opens_at = r.opens_at,
        opened_at = coalesce(t.opened_at, CASE WHEN r.opened_at IS NOT NULL THEN greatest(t.began_at, r.opened_at) END),
        shut_at = CASE WHEN r.shut_at IS NOT NULL THEN greatest(t.began_at, r.shut_at) END,
        gaps = CASE WHEN r.gaps IS NULL THEN t.gaps
                    ELSE jsonb_path_query_array(t.gaps || r.gaps, '$[last - 99 to last]') END
    FROM open_terms o JOIN told r ON r.role = o.role AND r.epoch = o.epoch
    WHERE t.namespace = me.namespace AND t.role = o.role AND t.epoch = o.epoch
    RETURNING t.role, CASE WHEN o.opens THEN (
        SELECT extract(epoch FROM t.opened_at - CASE
                   WHEN p.gate IS NULL THEN p.ended_at
                   ELSE coalesce(p.shut_at, greatest(p.opened_at, p.ended_at)) END)::float8
        FROM pgleaderlock.terms p
        WHERE p.namespace = t.namespace AND p.role = t.role AND p.epoch < t.epoch
          AND (p.gate IS NULL OR p.opened_at IS NOT NULL)
        ORDER BY p.epoch DESC LIMIT 1) END;
END
$$;

-- The roles that a session competes for, as it declares them: for people who ask which node could take a role over.
-- NULL: it has not declared any. It is an array on the session's own row: a heartbeat does not touch it, and a long one
-- is stored outside of the row.
ALTER TABLE pgleaderlock.sessions ADD COLUMN wants text[];

-- Records them. A separate statement, which may fail: no decision depends on it. Writes to the caller's own row only.
CREATE FUNCTION pgleaderlock.declare_roles(p_session_id bigint, p_roles text[]) RETURNS boolean
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    UPDATE pgleaderlock.sessions SET wants = p_roles
    WHERE session_id = p_session_id AND backend_pid = pg_backend_pid() AND ended_at IS NULL
    RETURNING true
$$;

-- How long a node that is asked to drain waits for its work; NULL: without a limit. A heartbeat does not return it,
-- because libraries of version 4 read that result as well: a node looks it up when it gets the request.
ALTER TABLE pgleaderlock.requests ADD COLUMN work_timeout_s double precision CHECK (work_timeout_s > 0);

-- As request_drain, with a time limit for the work.
CREATE FUNCTION pgleaderlock.request_drain_within(p_node_id text, p_namespace text, p_work_timeout_s double precision)
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    asked constant bigint := pgleaderlock.request_of_node('drain', p_node_id, p_namespace, NULL);
BEGIN
    UPDATE pgleaderlock.requests r SET work_timeout_s = p_work_timeout_s WHERE r.request_id = asked;
    RETURN asked;
END
$$;

-- The last epoch of a role at the moment when an operator forgot the role. While no later term has begun and no node
-- leads the role, lists leave it out: see `role_forgotten` in history.sql.
ALTER TABLE pgleaderlock.leaders ADD COLUMN forgotten_epoch bigint;

-- Forgets a role in the state that the operator saw; returns false if another term has begun since.
CREATE FUNCTION pgleaderlock.forget_role(p_role text, p_namespace text, p_epoch bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE pgleaderlock.leaders l SET forgotten_epoch = l.epoch
    WHERE l.namespace = p_namespace AND l.role = p_role AND l.epoch = p_epoch;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO pgleaderlock.events (kind, namespace, role, epoch, detail)
    VALUES ('forgotten', p_namespace, p_role, p_epoch, 'by ' || session_user);
    RETURN true;
END
$$;

-- PUBLIC has no privileges here: grants.sql grants them to single roles. Roles that were nodes before are granted the
-- new functions, too, and roles that could read the ledger can read the slots.
REVOKE ALL ON pgleaderlock.slots FROM PUBLIC;
REVOKE ALL ON FUNCTION pgleaderlock.tick_of, pgleaderlock.claim_slot, pgleaderlock.finish_slot, pgleaderlock.report_gates,
    pgleaderlock.declare_roles, pgleaderlock.request_drain_within, pgleaderlock.forget_role FROM PUBLIC;
DO $$
DECLARE
    node text;  -- not type name: a quoted name may be longer
BEGIN
    FOR node IN
        SELECT DISTINCT a.grantee::regrole::text
        FROM pg_class c, aclexplode(c.relacl) a
        WHERE c.oid = 'pgleaderlock.terms'::regclass AND a.privilege_type = 'SELECT' AND a.grantee NOT IN (0, c.relowner)
    LOOP
        EXECUTE format('GRANT SELECT ON pgleaderlock.slots TO %s', node);
    END LOOP;
    FOR node IN
        SELECT DISTINCT a.grantee::regrole::text
        FROM pg_proc p, aclexplode(p.proacl) a
        WHERE p.oid = 'pgleaderlock.heartbeat(bigint, text[], boolean)'::regprocedure AND a.privilege_type = 'EXECUTE'
          AND a.grantee NOT IN (0, p.proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION pgleaderlock.tick_of, pgleaderlock.claim_slot, pgleaderlock.finish_slot,'
                       ' pgleaderlock.report_gates, pgleaderlock.declare_roles, pgleaderlock.request_drain_within,'
                       ' pgleaderlock.forget_role TO %s', node);
    END LOOP;
END
$$;

-- LEASES: nodes without a dedicated session, behind a pooler that may run each transaction on any backend.
--
-- A lease is a row of sessions, and nothing else. Everything that its owner sends is one message and one transaction,
-- which begins with lease_begin and ends with lease_done. Between the two, the row is recorded for this backend, so
-- every function of a session serves a lease unchanged. `number` is the number of the last message that was carried
-- out. It only rises: a late or duplicate message changes nothing, and after the answer to a message no earlier one can
-- be carried out any more. `ended_at` is final. A lease holds no lock between its messages: until it has ended, its
-- roles are its own by the rows. A node that wants a role of a silent lease first ends the lease, at the beat at which
-- it stopped.
--
-- Sessions and leases exclude each other: both begin a term only with the role's advisory lock, which a lease keeps
-- until the commit, and bump does not begin a term for a role of a lease that has not ended.

ALTER TABLE pgleaderlock.sessions
    ADD COLUMN hold      text NOT NULL DEFAULT 'session' CHECK (hold IN ('session', 'lease')),
    ADD COLUMN number    bigint NOT NULL DEFAULT 0,
    ADD COLUMN key_hash  bytea UNIQUE;  -- of the lease's secret: a reader of this table cannot act as the lease

-- As in version 4. New: a lease has no backend of its own, so it counts as running; `ended_at` says whether it has
-- ended.
CREATE OR REPLACE FUNCTION pgleaderlock.is_there(p_session pgleaderlock.sessions) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT p_session.hold = 'lease' OR EXISTS (
        SELECT FROM pg_stat_get_activity(p_session.backend_pid) a
        WHERE a.datid = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
          AND (a.backend_start IS NULL OR p_session.backend_start IN (a.backend_start, '-infinity')))
$$;

-- The settings that a lease's transaction depends on, whatever the pooler or the DBA has set; they end with the
-- transaction. A commit must be on disk before it is acknowledged, and the warning about a cancelled wait for a standby
-- must reach the client.
CREATE FUNCTION pgleaderlock.lease_settings() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'a lease needs READ COMMITTED' USING ERRCODE = 'PGL03';
    END IF;
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM set_config('client_min_messages', 'warning', true), set_config('lock_timeout', '1s', true);
END
$$;

-- Records a lease. Idempotent by the caller's key, because the message may arrive twice. Ends `p_previous`, the lease
-- that this process has lost before.
CREATE FUNCTION pgleaderlock.lease_open(
    p_namespace text, p_instance uuid, p_key uuid, p_previous bigint, p_node_id text, p_host text, p_os_pid integer,
    p_holder_identity text, p_gate_s double precision, p_lease_s double precision, p_candidate boolean,
    p_library_version text, p_draining boolean,
    OUT session_id bigint, OUT system_identifier bigint, OUT timeline integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    here record;
    own bigint;
    key_hash_of bytea := sha256(uuid_send(p_key));
BEGIN
    PERFORM pgleaderlock.lease_settings();
    SELECT h.system_identifier, h.timeline INTO here FROM pgleaderlock.history() h;
    INSERT INTO pgleaderlock.histories (system_identifier, timeline) VALUES (here.system_identifier, here.timeline)
    ON CONFLICT DO NOTHING;
    INSERT INTO pgleaderlock.sessions AS s (
        namespace, instance, node_id, host, os_pid, holder_identity, backend_pid, backend_start, database_role,
        gate_s, lease_s, candidate, library_version, draining, system_identifier, timeline, hold, key_hash)
    VALUES (p_namespace, p_instance, p_node_id, p_host, p_os_pid, p_holder_identity, 0, clock_timestamp(), session_user,
        p_gate_s, p_lease_s, p_candidate, p_library_version, p_draining, here.system_identifier, here.timeline,
        'lease', key_hash_of)
    ON CONFLICT (key_hash) DO NOTHING
    RETURNING s.session_id INTO own;
    IF own IS NOT NULL THEN
        WITH ended AS (
            UPDATE pgleaderlock.sessions s SET ended_at = clock_timestamp()
            WHERE s.session_id = p_previous AND s.instance = p_instance AND s.database_role = session_user
              AND s.hold = 'lease' AND s.ended_at IS NULL
            RETURNING s.session_id, s.namespace, s.node_id
        )
        INSERT INTO pgleaderlock.events (kind, namespace, node_id, detail)
        SELECT e.kind, e.namespace, e.node_id, e.detail
        FROM (
            SELECT 1 AS n, 'session_ended' AS kind, o.namespace, o.node_id, 'lease ' || o.session_id || ' was lost' AS detail
            FROM ended o
            UNION ALL
            SELECT 2, 'session_opened', p_namespace, p_node_id,
                   'lease ' || own || ' of ' || p_holder_identity || ', version ' || p_library_version
        ) e ORDER BY e.n;
    ELSE
        SELECT s.session_id INTO own FROM pgleaderlock.sessions s WHERE s.key_hash = key_hash_of;
    END IF;
    lease_open.session_id := own;
    lease_open.system_identifier := here.system_identifier;
    lease_open.timeline := here.timeline;
END
$$;

-- Begins every message of a lease: updates its own row, which stays locked until the commit. PGL06: the lease is over.
-- PGL07: a later message was carried out before this one.
CREATE FUNCTION pgleaderlock.lease_begin(p_session_id bigint, p_key uuid, p_number bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    here record;
BEGIN
    PERFORM pgleaderlock.lease_settings();
    SELECT h.system_identifier, h.timeline INTO here FROM pgleaderlock.history() h;
    UPDATE pgleaderlock.sessions s
    SET number = p_number, beat = s.beat + 1, last_heartbeat = clock_timestamp(), backend_pid = pg_backend_pid()
    WHERE s.session_id = p_session_id AND s.key_hash = sha256(uuid_send(p_key)) AND s.ended_at IS NULL
      AND s.number < p_number AND (s.system_identifier, s.timeline) = (here.system_identifier, here.timeline);
    IF FOUND THEN
        RETURN;
    END IF;
    IF EXISTS (SELECT FROM pgleaderlock.sessions s
               WHERE s.session_id = p_session_id AND s.key_hash = sha256(uuid_send(p_key)) AND s.ended_at IS NULL
                 AND s.number >= p_number) THEN
        RAISE EXCEPTION 'message % of lease % comes too late', p_number, p_session_id USING ERRCODE = 'PGL07';
    END IF;
    RAISE EXCEPTION 'lease % is over', p_session_id USING ERRCODE = 'PGL06';
END
$$;

-- Ends every message of a lease: its row no longer names the backend, which serves another client next.
CREATE FUNCTION pgleaderlock.lease_done(p_session_id bigint, p_key uuid) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    UPDATE pgleaderlock.sessions s SET backend_pid = 0
    WHERE s.session_id = p_session_id AND s.key_hash = sha256(uuid_send(p_key))
$$;

-- Ends silent leases, each only at the beat that the caller saw last. A session or a lease may call it. A lease whose
-- row is locked is not silent: its owner beats, or another node ends it. After the commit, no message of an ended lease
-- is carried out. Each successor compares the beat at which the lease stopped with the one that it has seen itself.
CREATE FUNCTION pgleaderlock.end_silent_leases(p_session_id bigint, p_silent bigint[], p_beats bigint[])
RETURNS SETOF bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    me pgleaderlock.sessions%ROWTYPE;
BEGIN
    SELECT * INTO me FROM pgleaderlock.sessions s
    WHERE s.session_id = p_session_id AND s.backend_pid = pg_backend_pid() AND s.ended_at IS NULL;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'session % is not recorded for this backend', p_session_id USING ERRCODE = 'PGL03';
    END IF;
    RETURN QUERY
    WITH silent AS MATERIALIZED (
        SELECT s.session_id
        FROM unnest(p_silent, p_beats) AS a (session_id, beat)
        JOIN pgleaderlock.sessions s ON s.session_id = a.session_id AND s.beat = a.beat
        WHERE s.hold = 'lease' AND s.ended_at IS NULL AND s.namespace = me.namespace AND s.session_id <> me.session_id
        ORDER BY s.session_id FOR NO KEY UPDATE OF s SKIP LOCKED
    ), ended AS (
        UPDATE pgleaderlock.sessions s SET ended_at = clock_timestamp()
        FROM silent x WHERE s.session_id = x.session_id
        RETURNING s.session_id, s.namespace, s.node_id
    ), noted AS (
        INSERT INTO pgleaderlock.events (kind, namespace, node_id, detail)
        SELECT 'evicted', e.namespace, e.node_id, 'silent lease ' || e.session_id || ' ended by ' || me.node_id FROM ended e
    )
    SELECT e.session_id FROM ended e;
END
$$;

-- Takes the locks of the roles that a lease is about to take, until the commit: a role is not free while a session
-- holds its lock. If a role is recorded under another key than the caller's, that key's lock is taken as well. Later
-- statements read the ledger's rows of the role.
CREATE FUNCTION pgleaderlock.lease_lock(p_session_id bigint, p_roles text[], p_key1 integer[], p_key2 integer[])
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    unused bigint;
BEGIN
    SELECT count(*) FILTER (WHERE x.locked) INTO unused
    FROM (
        SELECT CASE WHEN l.key1 IS NULL OR (l.key1, l.key2) = (a.key1, a.key2) THEN pg_try_advisory_xact_lock(a.key1, a.key2)
                    WHEN pg_try_advisory_xact_lock(l.key1, l.key2) THEN pg_try_advisory_xact_lock(a.key1, a.key2)
                    ELSE false END AS locked
        FROM pgleaderlock.sessions me, unnest(p_roles, p_key1, p_key2) AS a (role, key1, key2)
        LEFT JOIN pgleaderlock.leaders l
            ON l.role = a.role AND l.namespace = (SELECT s.namespace FROM pgleaderlock.sessions s WHERE s.session_id = p_session_id)
        WHERE me.session_id = p_session_id AND me.backend_pid = pg_backend_pid() AND me.ended_at IS NULL
        OFFSET 0
    ) x;
END
$$;

-- As in version 4, whose function it calls. New: a role of a lease that has not ended is not free, although its lock
-- was. Meanwhile no node can begin a term of such a role, because the caller holds the lock that this takes. If the
-- caller is a session, the lock is released here, because an older library would keep it. An older library holds the
-- lock once, a newer one twice.
-- A key does not move to a new name, either, while a lease leads under the old one. No lock shows whether it does. So a
-- lease that has been silent for long is ended first: otherwise it could wake up and lead beside the new leader. A
-- lease that still beats keeps its key.
ALTER FUNCTION pgleaderlock.bump(bigint, text[], integer[], integer[], integer, text) RENAME TO bump_unleased;
CREATE FUNCTION pgleaderlock.bump(
    p_session_id bigint, p_roles text[], p_key1 integer[], p_key2 integer[], p_wait_ms integer, p_channel text)
RETURNS TABLE (
    role text, outcome text, epoch bigint, system_identifier bigint, timeline integer,
    prev_session_id bigint, prev_beat bigint, prev_wait_t double precision, prev_clean boolean, prev_instance uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    leased text[];
    named text[];
BEGIN
    WITH asleep AS MATERIALIZED (
        SELECT s.session_id
        FROM unnest(p_roles, p_key1, p_key2) AS a (role, key1, key2)
        JOIN pgleaderlock.sessions me ON me.session_id = p_session_id
        JOIN pgleaderlock.leaders l
            ON l.key1 = a.key1 AND l.key2 = a.key2 AND (l.namespace, l.role) <> (me.namespace, a.role) AND NOT l.ended
        JOIN pgleaderlock.sessions s ON s.session_id = l.session_id AND s.hold = 'lease' AND s.ended_at IS NULL
        WHERE s.session_id <> p_session_id AND NOT pgleaderlock.is_live(s)
        ORDER BY s.session_id FOR NO KEY UPDATE OF s SKIP LOCKED
    ), ended AS (
        UPDATE pgleaderlock.sessions s SET ended_at = clock_timestamp()
        FROM asleep x WHERE s.session_id = x.session_id
        RETURNING s.session_id, s.namespace, s.node_id
    )
    INSERT INTO pgleaderlock.events (kind, namespace, node_id, detail)
    SELECT 'evicted', e.namespace, e.node_id, 'silent lease ' || e.session_id || ' ended: its key has a new name' FROM ended e;
    SELECT coalesce(array_agg(a.role), '{}') INTO named
    FROM unnest(p_roles, p_key1, p_key2) AS a (role, key1, key2)
    JOIN pgleaderlock.sessions me ON me.session_id = p_session_id
    JOIN pgleaderlock.leaders l
        ON l.key1 = a.key1 AND l.key2 = a.key2 AND (l.namespace, l.role) <> (me.namespace, a.role) AND NOT l.ended
    JOIN pgleaderlock.sessions s ON s.session_id = l.session_id AND s.hold = 'lease' AND s.ended_at IS NULL
    WHERE s.session_id <> p_session_id;
    SELECT coalesce(array_agg(l.role), '{}') INTO leased
    FROM pgleaderlock.sessions me
    JOIN pgleaderlock.leaders l ON l.namespace = me.namespace AND l.role = ANY (p_roles) AND NOT l.ended
    JOIN pgleaderlock.sessions s ON s.session_id = l.session_id AND s.hold = 'lease' AND s.ended_at IS NULL
    WHERE me.session_id = p_session_id AND s.session_id <> p_session_id;
    IF cardinality(leased) > 0 THEN
        FOR round IN 1..2 LOOP
            PERFORM pg_advisory_unlock(a.key1, a.key2)
            FROM unnest(p_roles, p_key1, p_key2) AS a (role, key1, key2)
            JOIN pgleaderlock.sessions me ON me.session_id = p_session_id AND me.hold = 'session'
            WHERE a.role = ANY (leased) AND EXISTS (  -- otherwise PostgreSQL warns of a lock that is not held
                SELECT FROM pg_locks k
                WHERE k.locktype = 'advisory' AND k.granted AND k.objsubid = 2 AND k.pid = pg_backend_pid()
                  AND k.classid = (a.key1::bigint & 4294967295)::oid AND k.objid = (a.key2::bigint & 4294967295)::oid);
        END LOOP;
        RETURN QUERY
        SELECT r.role, 'not_held', NULL::bigint, NULL::bigint, NULL::integer, NULL::bigint, NULL::bigint,
               NULL::double precision, NULL::boolean, NULL::uuid
        FROM unnest(leased) AS r (role);
    END IF;
    RETURN QUERY
    SELECT r.role, 'collision', NULL::bigint, NULL::bigint, NULL::integer, NULL::bigint, NULL::bigint,
           NULL::double precision, NULL::boolean, NULL::uuid
    FROM unnest(named) AS r (role) WHERE r.role <> ALL (leased);
    RETURN QUERY
    SELECT b.*
    FROM (SELECT coalesce(array_agg(a.role), '{}') AS roles, array_agg(a.key1) AS key1, array_agg(a.key2) AS key2
          FROM unnest(p_roles, p_key1, p_key2) AS a (role, key1, key2) WHERE a.role <> ALL (leased || named)) free,
         LATERAL pgleaderlock.bump_unleased(p_session_id, free.roles, free.key1, free.key2, p_wait_ms, p_channel) b;
END
$$;

-- PUBLIC has no privileges here: grants.sql grants them to single roles. Roles that were nodes before are granted the
-- new functions, too.
REVOKE ALL ON FUNCTION pgleaderlock.lease_settings, pgleaderlock.lease_open, pgleaderlock.lease_begin, pgleaderlock.lease_done,
    pgleaderlock.end_silent_leases, pgleaderlock.lease_lock, pgleaderlock.bump FROM PUBLIC;
DO $$
DECLARE
    node text;  -- not type name: a quoted name may be longer
BEGIN
    FOR node IN
        SELECT DISTINCT a.grantee::regrole::text
        FROM pg_proc p, aclexplode(p.proacl) a
        WHERE p.oid = 'pgleaderlock.heartbeat(bigint, text[], boolean)'::regprocedure AND a.privilege_type = 'EXECUTE'
          AND a.grantee NOT IN (0, p.proowner)
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION pgleaderlock.bump_unleased FROM %s', node);
        EXECUTE format('GRANT EXECUTE ON FUNCTION pgleaderlock.bump, pgleaderlock.lease_open, pgleaderlock.lease_begin,'
                       ' pgleaderlock.lease_done, pgleaderlock.end_silent_leases, pgleaderlock.lease_lock TO %s', node);
    END LOOP;
END
$$;

INSERT INTO pgleaderlock.schema_version (version) VALUES (5);
