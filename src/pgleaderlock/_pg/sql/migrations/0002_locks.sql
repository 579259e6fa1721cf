-- The lock server's store: leases with fencing tokens, and the queues of waiters. Elections do not use it.
--
-- As in the ledger, run-time roles write to these tables by the functions below only. A function that takes several
-- locks takes them in the order of their names (by code point), and for each lock its lease before its token: two
-- batches may wait for each other, but cannot deadlock. A statement that cannot keep to this order skips locked rows.
-- All functions expect READ COMMITTED: each statement inside must see what was committed before it, above all after it
-- has waited for a row's lock.

-- One row per lock that is held or was held lately. The row stays while the lock is free, so that the next acquire
-- updates it in place.
CREATE TABLE pgleaderlock.lock_leases (
    lock_name        text COLLATE "C" PRIMARY KEY,
    owner_id         text,
    lease_id         text,  -- NULL while the lock is free, like owner, token, expiry and key
    fencing_token    bigint,
    lease_expiry     timestamptz,
    ttl_ms           bigint,
    version          bigint NOT NULL,
    idempotency_key  text,
    waited_ms        bigint,
    replayed         boolean NOT NULL DEFAULT false,  -- a repeated request was given this lease, so a client knows it
    freed_at         timestamptz
) WITH (fillfactor = 50);  -- leaves room for HOT updates: a new lease then updates no index

-- One row per lock that was ever granted: its highest token, which must never be forgotten. If the row in lock_leases
-- was pruned, `version` is the version from which a new one continues.
CREATE TABLE pgleaderlock.lock_tokens (
    lock_name          text COLLATE "C" PRIMARY KEY,
    last_token         bigint NOT NULL CHECK (last_token > 0),
    version            bigint NOT NULL DEFAULT 0,
    system_identifier  bigint NOT NULL,
    timeline           integer NOT NULL
) WITH (fillfactor = 50);

-- One row per server that has waiters. One heartbeat keeps all its tickets alive, whatever their number.
CREATE TABLE pgleaderlock.lock_servers (
    server_id    text COLLATE "C" PRIMARY KEY,
    alive_until  timestamptz NOT NULL
) WITH (fillfactor = 50);

-- One row per waiter. The ticket is its place in the queue. It is drawn while the lock's row is locked, so that no
-- transaction sees a later ticket before an earlier one. `waiter` is the number by which its server knew it before it
-- had a ticket.
CREATE TABLE pgleaderlock.lock_waiters (
    lock_name  text COLLATE "C" NOT NULL,
    ticket     bigint GENERATED ALWAYS AS IDENTITY,
    owner_id   text NOT NULL,
    ttl_ms     bigint NOT NULL,
    server_id  text COLLATE "C" NOT NULL,
    waiter     bigint NOT NULL,
    deadline   timestamptz NOT NULL,
    seen_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (lock_name, ticket)
);

-- Which locks were freed by force, and by whom. It has no lease id, because a role that may read this table must not be
-- able to act as the holder.
CREATE TABLE pgleaderlock.lock_breaks (
    break_id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at             timestamptz NOT NULL DEFAULT clock_timestamp(),
    lock_name      text COLLATE "C" NOT NULL,
    broken_by      text NOT NULL,
    database_role  name NOT NULL DEFAULT session_user,
    was_held       boolean NOT NULL,
    owner_id       text,
    fencing_token  bigint
);
CREATE INDEX lock_breaks_at ON pgleaderlock.lock_breaks (at);

-- Notifies the server of the first waiter to look at the lock, unless that server is `p_except`. A hint: it may be
-- lost.
CREATE FUNCTION pgleaderlock.lock_wake(p_lock_name text, p_except text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    server text;
BEGIN
    SELECT w.server_id INTO server
    FROM pgleaderlock.lock_waiters w JOIN pgleaderlock.lock_servers s ON s.server_id = w.server_id
    WHERE w.lock_name = p_lock_name AND w.deadline > clock_timestamp() AND s.alive_until > clock_timestamp()
    ORDER BY w.ticket LIMIT 1;
    IF server IS DISTINCT FROM p_except AND server IS NOT NULL THEN
        -- A payload must be shorter than 8000 bytes; with an empty one, the server looks at all of its waiters.
        PERFORM pg_notify('pgleaderlock_locks_' || server,
                          CASE WHEN octet_length(p_lock_name) < 7000 THEN p_lock_name ELSE '' END);
    END IF;
END
$$;

-- Carries out operations of any number of clients in one transaction, each with its own outcome. Kinds:
--   acquire  grants the lock, or returns its holder
--   wait     the same, and draws a ticket unless the lock is granted. With a ticket: checks whether it is its turn. If
--            the ticket is gone, draws a new one.
--   renew, release
--   abandon  a waiter gives up: deletes its ticket, and ends a lease that it was granted without learning of it, unless a
--            repeated request was given that lease in the meantime.
-- The caller chooses a new lease id for each attempt, before it sends it. `earlier` are the ids of the attempts whose
-- answer was lost: by them a grant is recognised. The ticket of such an attempt is found by the waiter's number.
-- `p_room` is how many rows may be added to lock_leases.
CREATE FUNCTION pgleaderlock.lock_apply(p_server_id text, p_operations jsonb, p_room bigint)
RETURNS TABLE (n bigint, outcome text, owner_id text, lease_id text, fencing_token bigint, expiry_ms bigint,
               remaining_ms bigint, waited_ms bigint, ticket bigint, created boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    op record;
    l pgleaderlock.lock_leases%ROWTYPE;
    first record;
    moment timestamptz;
    expiry timestamptz;
    here_system bigint;
    here_timeline integer;
    here_ticket bigint;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'lock_apply needs READ COMMITTED' USING ERRCODE = 'PGL03';
    END IF;
    IF current_setting('transaction_read_only') = 'on' THEN
        RAISE EXCEPTION 'no lock is granted in a read-only transaction' USING ERRCODE = '25006';
    END IF;
    FOR op IN
        SELECT e.n, o.*
        FROM jsonb_array_elements(p_operations) WITH ORDINALITY AS e (body, n),
             jsonb_to_record(e.body) AS o (kind text, lock text, owner text, lease text, token bigint, ms bigint, key text,
                                           waiter bigint, ticket bigint, wait_ms bigint, waited_ms bigint,
                                           earlier text[])
        ORDER BY o.lock COLLATE "C", e.n
    LOOP
        n := op.n; owner_id := op.owner; lease_id := op.lease; fencing_token := NULL; expiry_ms := NULL;
        remaining_ms := NULL; waited_ms := 0; ticket := NULL; created := false;

        IF op.kind = 'renew' THEN
            -- Lock the row first, then read the time: an UPDATE that waited for a transaction which did not change the
            -- row would go on with the times that it computed before the wait.
            SELECT x.lease_expiry INTO expiry FROM pgleaderlock.lock_leases x
            WHERE x.lock_name = op.lock AND x.lease_id = op.lease AND x.owner_id = op.owner
              AND x.fencing_token = op.token AND x.lease_expiry > clock_timestamp() FOR UPDATE;
            moment := clock_timestamp();
            outcome := 'stale';
            IF expiry > moment THEN
                outcome := 'renewed';
                expiry := moment + op.ms * interval '1 millisecond';
                UPDATE pgleaderlock.lock_leases AS x
                SET lease_expiry = expiry, ttl_ms = op.ms, version = x.version + 1
                WHERE x.lock_name = op.lock;
                expiry_ms := trunc(extract(epoch FROM expiry) * 1000);
            END IF;
            RETURN NEXT;
            CONTINUE;
        ELSIF op.kind = 'release' THEN
            UPDATE pgleaderlock.lock_leases AS x
            SET owner_id = NULL, lease_id = NULL, fencing_token = NULL, lease_expiry = NULL, idempotency_key = NULL,
                freed_at = clock_timestamp(), version = x.version + 1
            WHERE x.lock_name = op.lock AND x.lease_id = op.lease AND x.owner_id = op.owner
              AND x.fencing_token = op.token AND x.lease_expiry > clock_timestamp();
            outcome := 'stale';
            IF FOUND THEN
                outcome := 'released';
                PERFORM pgleaderlock.lock_wake(op.lock);
            END IF;
            RETURN NEXT;
            CONTINUE;
        END IF;

        IF op.kind = 'acquire' OR op.ticket IS NOT NULL THEN
            -- Most requests for a held lock only need the answer that it is held. That needs no row lock and no write.
            SELECT x.owner_id, x.lease_expiry INTO l.owner_id, l.lease_expiry
            FROM pgleaderlock.lock_leases x
            WHERE x.lock_name = op.lock AND x.lease_expiry > clock_timestamp()
              AND (x.lease_id = ANY (op.earlier) OR (x.idempotency_key = op.key AND x.owner_id = op.owner)) IS NOT TRUE
              AND (op.ticket IS NULL OR EXISTS (
                  SELECT FROM pgleaderlock.lock_waiters w WHERE w.lock_name = op.lock AND w.ticket = op.ticket));
            IF FOUND THEN
                outcome := 'held';
                owner_id := l.owner_id;
                expiry_ms := trunc(extract(epoch FROM l.lease_expiry) * 1000);
                remaining_ms := greatest(1, ceil(extract(epoch FROM l.lease_expiry - clock_timestamp()) * 1000));
                ticket := op.ticket;
                RETURN NEXT;
                CONTINUE;
            END IF;
        END IF;

        SELECT x.* INTO l FROM pgleaderlock.lock_leases x WHERE x.lock_name = op.lock FOR UPDATE;

        IF op.kind = 'abandon' THEN
            DELETE FROM pgleaderlock.lock_waiters w
            WHERE w.lock_name = op.lock AND w.server_id = p_server_id AND w.waiter = op.waiter;
            IF l.lease_id = ANY (op.earlier) AND NOT l.replayed THEN
                UPDATE pgleaderlock.lock_leases AS x
                SET owner_id = NULL, lease_id = NULL, fencing_token = NULL, lease_expiry = NULL, idempotency_key = NULL,
                    freed_at = clock_timestamp(), version = x.version + 1
                WHERE x.lock_name = op.lock;
                l.lease_id := NULL;
            END IF;
            PERFORM pgleaderlock.lock_wake(op.lock);
            moment := clock_timestamp();
            IF l.lease_id IS NOT NULL AND l.lease_expiry > moment THEN
                owner_id := l.owner_id;
                expiry_ms := trunc(extract(epoch FROM l.lease_expiry) * 1000);
                remaining_ms := ceil(extract(epoch FROM l.lease_expiry - moment) * 1000);
            ELSE
                owner_id := NULL;
                expiry_ms := trunc(extract(epoch FROM moment) * 1000);
            END IF;
            outcome := 'held';
            RETURN NEXT;
            CONTINUE;
        END IF;

        IF l.lock_name IS NULL THEN
            IF p_room <= 0 THEN
                outcome := 'full';
                RETURN NEXT;
                CONTINUE;
            END IF;
            -- Several transactions may try to insert the row: all go on with the same one. If it is pruned in between,
            -- try again.
            LOOP
                INSERT INTO pgleaderlock.lock_leases (lock_name, version)
                VALUES (op.lock, coalesce((SELECT t.version FROM pgleaderlock.lock_tokens t WHERE t.lock_name = op.lock), 0))
                ON CONFLICT (lock_name) DO NOTHING;
                created := FOUND;
                SELECT x.* INTO l FROM pgleaderlock.lock_leases x WHERE x.lock_name = op.lock FOR UPDATE;
                EXIT WHEN FOUND;
            END LOOP;
            IF created THEN
                p_room := p_room - 1;
            END IF;
        END IF;

        -- Read the time after the row is locked: a transaction that waited for the row must not decide by the time
        -- before.
        moment := clock_timestamp();
        here_ticket := op.ticket;
        IF here_ticket IS NOT NULL AND NOT EXISTS (
            SELECT FROM pgleaderlock.lock_waiters w WHERE w.lock_name = op.lock AND w.ticket = here_ticket)
        THEN
            here_ticket := NULL;
        END IF;
        IF here_ticket IS NULL AND op.earlier IS NOT NULL THEN
            SELECT w.ticket INTO here_ticket FROM pgleaderlock.lock_waiters w
            WHERE w.lock_name = op.lock AND w.server_id = p_server_id AND w.waiter = op.waiter ORDER BY w.ticket LIMIT 1;
        END IF;

        IF l.lease_id IS NOT NULL AND l.lease_expiry > moment THEN
            IF l.lease_id = ANY (op.earlier) OR (l.idempotency_key = op.key AND l.owner_id = op.owner) THEN
                -- An earlier attempt at this request, or an earlier request with its key, was granted this lease:
                -- return it again.
                outcome := CASE WHEN l.lease_id = ANY (op.earlier) THEN 'granted' ELSE 'replayed' END;
                IF outcome = 'replayed' THEN
                    UPDATE pgleaderlock.lock_leases AS x SET replayed = true WHERE x.lock_name = op.lock AND NOT x.replayed;
                END IF;
                DELETE FROM pgleaderlock.lock_waiters w WHERE w.lock_name = op.lock AND w.ticket = here_ticket;
                lease_id := l.lease_id; fencing_token := l.fencing_token; waited_ms := l.waited_ms;
                expiry_ms := trunc(extract(epoch FROM l.lease_expiry) * 1000);
                RETURN NEXT;
                CONTINUE;
            END IF;
            outcome := 'held';
            owner_id := l.owner_id;
            expiry_ms := trunc(extract(epoch FROM l.lease_expiry) * 1000);
            remaining_ms := ceil(extract(epoch FROM l.lease_expiry - moment) * 1000);
        ELSE
            SELECT w.ticket, w.owner_id INTO first
            FROM pgleaderlock.lock_waiters w JOIN pgleaderlock.lock_servers s ON s.server_id = w.server_id
            WHERE w.lock_name = op.lock AND w.deadline > moment AND s.alive_until > moment
            ORDER BY w.ticket LIMIT 1;
            IF first.ticket < here_ticket OR (first.ticket IS NOT NULL AND here_ticket IS NULL) THEN
                -- The lock is free, but it is another waiter's turn.
                outcome := 'held';
                owner_id := first.owner_id;
                expiry_ms := trunc(extract(epoch FROM moment) * 1000);
            ELSE
                outcome := 'granted';
            END IF;
        END IF;

        IF outcome = 'held' THEN
            IF op.kind = 'wait' AND here_ticket IS NULL THEN
                INSERT INTO pgleaderlock.lock_waiters AS w (lock_name, owner_id, ttl_ms, server_id, waiter, deadline)
                VALUES (op.lock, op.owner, op.ms, p_server_id, op.waiter, moment + op.wait_ms * interval '1 millisecond')
                RETURNING w.ticket INTO here_ticket;
            END IF;
            ticket := here_ticket;
            RETURN NEXT;
            CONTINUE;
        END IF;

        IF here_system IS NULL THEN
            SELECT h.system_identifier, h.timeline INTO here_system, here_timeline FROM pgleaderlock.history() h;
        END IF;
        UPDATE pgleaderlock.lock_tokens AS t
        SET last_token = pgleaderlock.next_number(t.last_token, t.system_identifier, t.timeline, here_system, here_timeline),
            system_identifier = here_system, timeline = here_timeline
        WHERE t.lock_name = op.lock
        RETURNING t.last_token INTO fencing_token;
        IF NOT FOUND THEN
            -- The first token of a lock in this store: start above every token that an earlier, lost history may have
            -- issued.
            INSERT INTO pgleaderlock.lock_tokens AS t (lock_name, last_token, system_identifier, timeline)
            VALUES (op.lock, (here_timeline::bigint - 1) * 4294967296 + 1, here_system, here_timeline)
            RETURNING t.last_token INTO fencing_token;
        END IF;
        expiry := moment + op.ms * interval '1 millisecond';
        waited_ms := coalesce(op.waited_ms, 0);
        UPDATE pgleaderlock.lock_leases AS x
        SET owner_id = op.owner, lease_id = op.lease, fencing_token = lock_apply.fencing_token, lease_expiry = expiry,
            ttl_ms = op.ms, version = x.version + 1, idempotency_key = op.key, waited_ms = coalesce(op.waited_ms, 0),
            replayed = false
        WHERE x.lock_name = op.lock;
        expiry_ms := trunc(extract(epoch FROM expiry) * 1000);
        IF here_ticket IS NOT NULL THEN
            DELETE FROM pgleaderlock.lock_waiters w WHERE w.lock_name = op.lock AND w.ticket = here_ticket;
            -- The server of the next waiter must learn when this lease ends. The caller's own server knows that
            -- already.
            PERFORM pgleaderlock.lock_wake(op.lock, p_server_id);
        END IF;
        RETURN NEXT;
    END LOOP;
END
$$;

-- The heartbeat of a server. `p_heads` names, per lock, the first ticket of the server's own waiters. Returns the locks
-- for which no live waiter has an earlier ticket, and in how many milliseconds their leases end.
CREATE FUNCTION pgleaderlock.lock_tick(p_server_id text, p_valid_ms bigint, p_heads jsonb)
RETURNS TABLE (lock_name text, remaining_ms bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO pgleaderlock.lock_servers AS s (server_id, alive_until)
    VALUES (p_server_id, clock_timestamp() + p_valid_ms * interval '1 millisecond')
    ON CONFLICT (server_id) DO UPDATE SET alive_until = excluded.alive_until;
    RETURN QUERY
    SELECT h.lock, greatest(0, coalesce(ceil(extract(epoch FROM l.lease_expiry - clock_timestamp()) * 1000), 0))::bigint
    FROM jsonb_to_recordset(p_heads) AS h (lock text, ticket bigint)
    LEFT JOIN pgleaderlock.lock_leases l ON l.lock_name = h.lock
    WHERE NOT EXISTS (
        SELECT FROM pgleaderlock.lock_waiters w JOIN pgleaderlock.lock_servers s ON s.server_id = w.server_id
        WHERE w.lock_name = h.lock AND w.ticket < h.ticket
          AND w.deadline > clock_timestamp() AND s.alive_until > clock_timestamp());
END
$$;

-- A server stops: deletes its record and its remaining tickets. Skips locked tickets: the transaction that has
-- locked one deals with it.
CREATE FUNCTION pgleaderlock.lock_close(p_server_id text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    waited_for text[];
BEGIN
    WITH mine AS MATERIALIZED (
        SELECT w.lock_name, w.ticket FROM pgleaderlock.lock_waiters w WHERE w.server_id = p_server_id FOR UPDATE SKIP LOCKED
    ), torn AS (
        DELETE FROM pgleaderlock.lock_waiters w USING mine
        WHERE w.lock_name = mine.lock_name AND w.ticket = mine.ticket RETURNING w.lock_name
    )
    SELECT array_agg(DISTINCT t.lock_name) INTO waited_for FROM torn t;
    DELETE FROM pgleaderlock.lock_servers s WHERE s.server_id = p_server_id;
    PERFORM pgleaderlock.lock_wake(name) FROM unnest(waited_for) AS name;
END
$$;

-- Frees a lock by force, and records who did so. Returns the lock as it was before.
CREATE FUNCTION pgleaderlock.lock_break(p_lock_name text, p_by text)
RETURNS TABLE (held boolean, owner_id text, lease_id text, fencing_token bigint, expiry_ms bigint, version bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    l pgleaderlock.lock_leases%ROWTYPE;
    last bigint;
    filed bigint;
BEGIN
    SELECT x.* INTO l FROM pgleaderlock.lock_leases x WHERE x.lock_name = p_lock_name FOR UPDATE;
    SELECT t.last_token, t.version INTO last, filed FROM pgleaderlock.lock_tokens t WHERE t.lock_name = p_lock_name;
    held := coalesce(l.lease_expiry > clock_timestamp(), false);
    IF held THEN
        owner_id := l.owner_id; lease_id := l.lease_id;
        expiry_ms := trunc(extract(epoch FROM l.lease_expiry) * 1000);
    END IF;
    fencing_token := coalesce(last, 0);
    version := coalesce(l.version, filed, 0);
    IF l.lease_id IS NOT NULL THEN
        UPDATE pgleaderlock.lock_leases AS x
        SET owner_id = NULL, lease_id = NULL, fencing_token = NULL, lease_expiry = NULL, idempotency_key = NULL,
            freed_at = clock_timestamp(), version = x.version + 1
        WHERE x.lock_name = p_lock_name;
    END IF;
    INSERT INTO pgleaderlock.lock_breaks (lock_name, broken_by, was_held, owner_id, fencing_token)
    VALUES (p_lock_name, p_by, lock_break.held, lock_break.owner_id, last);
    PERFORM pgleaderlock.lock_wake(p_lock_name);
    RETURN NEXT;
END
$$;

-- One small step of the sweep: clears expired leases, and prunes locks that have been free for long; their token and
-- version are kept. Skips locked rows. No grant depends on it. `more` is true while another step has something to do.
CREATE FUNCTION pgleaderlock.lock_sweep(
    p_step integer, p_free_kept_s double precision, OUT expired bigint, OUT pruned bigint, OUT more boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    names text[];
BEGIN
    -- The store's sessions avoid sequential scans, so that plans made for empty tables stay good. Here the whole table
    -- is read.
    PERFORM set_config('enable_seqscan', 'on', true);
    WITH found AS MATERIALIZED (
        SELECT l.lock_name FROM pgleaderlock.lock_leases l
        WHERE l.lease_expiry <= clock_timestamp() LIMIT p_step FOR UPDATE SKIP LOCKED
    ), cleared AS (
        UPDATE pgleaderlock.lock_leases AS x
        SET owner_id = NULL, lease_id = NULL, fencing_token = NULL, lease_expiry = NULL, idempotency_key = NULL,
            freed_at = x.lease_expiry, version = x.version + 1
        FROM found WHERE x.lock_name = found.lock_name RETURNING x.lock_name
    )
    SELECT array_agg(c.lock_name) INTO names FROM cleared c;
    expired := coalesce(cardinality(names), 0);
    PERFORM pgleaderlock.lock_wake(w.lock_name)
    FROM (SELECT DISTINCT w.lock_name FROM pgleaderlock.lock_waiters w WHERE w.lock_name = ANY (names)) w;
    pruned := 0;
    more := expired = p_step;
    IF more THEN
        RETURN;  -- one scan of the table per step
    END IF;

    WITH found AS MATERIALIZED (
        SELECT l.lock_name, l.version FROM pgleaderlock.lock_leases l
        WHERE l.lease_id IS NULL AND l.freed_at < clock_timestamp() - p_free_kept_s * interval '1 second'
        LIMIT p_step FOR UPDATE SKIP LOCKED
    ), filed AS (
        UPDATE pgleaderlock.lock_tokens AS t SET version = found.version FROM found WHERE t.lock_name = found.lock_name
    ), gone AS (
        DELETE FROM pgleaderlock.lock_leases AS l USING found WHERE l.lock_name = found.lock_name RETURNING 1
    )
    SELECT count(*) INTO pruned FROM gone;

    -- The waiters of a killed server block no others, because only waiters of live servers count. Delete them to save
    -- space.
    DELETE FROM pgleaderlock.lock_waiters w USING (
        SELECT o.lock_name, o.ticket FROM pgleaderlock.lock_waiters o
        WHERE o.deadline < clock_timestamp() - interval '1 minute'
           OR NOT EXISTS (SELECT FROM pgleaderlock.lock_servers s
                          WHERE s.server_id = o.server_id AND s.alive_until > clock_timestamp() - interval '1 minute')
        LIMIT p_step FOR UPDATE SKIP LOCKED) dead
    WHERE w.lock_name = dead.lock_name AND w.ticket = dead.ticket;
    DELETE FROM pgleaderlock.lock_servers s USING (
        SELECT o.server_id FROM pgleaderlock.lock_servers o
        WHERE o.alive_until < clock_timestamp() - interval '1 hour' LIMIT p_step FOR UPDATE SKIP LOCKED) dead
    WHERE s.server_id = dead.server_id;
    DELETE FROM pgleaderlock.lock_breaks b WHERE b.break_id IN (
        SELECT o.break_id FROM pgleaderlock.lock_breaks o
        WHERE o.at < clock_timestamp() - interval '90 days' LIMIT p_step FOR UPDATE SKIP LOCKED);
    more := pruned = p_step;
END
$$;

-- PUBLIC has no privileges here: grants.sql grants them to single roles. Privileges that roles have on the ledger's
-- tables are not changed.
REVOKE ALL ON pgleaderlock.lock_leases, pgleaderlock.lock_tokens, pgleaderlock.lock_servers, pgleaderlock.lock_waiters,
    pgleaderlock.lock_breaks FROM PUBLIC;
REVOKE ALL ON FUNCTION pgleaderlock.lock_wake, pgleaderlock.lock_apply,
    pgleaderlock.lock_tick, pgleaderlock.lock_close, pgleaderlock.lock_break, pgleaderlock.lock_sweep FROM PUBLIC;

INSERT INTO pgleaderlock.schema_version (version) VALUES (2);
