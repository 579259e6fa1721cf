-- The least privileges of a run-time role. {role} is replaced by the quoted name of the role. The role reads the ledger
-- and calls functions that check the caller; it cannot write to a table, and cannot advance an epoch by hand.

-- name: grants
-- Not granted: advance_epoch (for operators); functions that only other functions call (history, is_there, is_live,
-- is_live_candidate, request_targets, request_of_node, longest_wait_s, bump_unleased, lease_settings); and everything
-- of the lock server: a role that can read a lease's id can act as its holder.
GRANT USAGE ON SCHEMA pgleaderlock TO {role};
GRANT SELECT ON
    pgleaderlock.schema_version,
    pgleaderlock.sessions,
    pgleaderlock.leaders,
    pgleaderlock.terms,
    pgleaderlock.events,
    pgleaderlock.requests,
    pgleaderlock.histories,
    pgleaderlock.slots,
    pgleaderlock.leader_state
TO {role};
GRANT EXECUTE ON FUNCTION
    pgleaderlock.open_session,
    pgleaderlock.beat,
    pgleaderlock.bump,
    pgleaderlock.end_term,
    pgleaderlock.close_session,
    pgleaderlock.note_eviction,
    pgleaderlock.request_step_down,
    pgleaderlock.finish_request,
    pgleaderlock.describe_session,
    pgleaderlock.tick,
    pgleaderlock.heartbeat,
    pgleaderlock.note_drain,
    pgleaderlock.request_drain,
    pgleaderlock.request_resume,
    pgleaderlock.reserve,
    pgleaderlock.settle_request,
    pgleaderlock.prune,
    pgleaderlock.tick_of,
    pgleaderlock.claim_slot,
    pgleaderlock.finish_slot,
    pgleaderlock.report_gates,
    pgleaderlock.lease_open,
    pgleaderlock.lease_begin,
    pgleaderlock.lease_done,
    pgleaderlock.lease_lock,
    pgleaderlock.end_silent_leases,
    pgleaderlock.declare_roles,
    pgleaderlock.request_drain_within,
    pgleaderlock.forget_role,
    pgleaderlock.fence,
    pgleaderlock.fence_strictly,
    pgleaderlock.fence_key
TO {role}

-- name: grants_reader
-- For a role that only reads: dashboards, and the commands that show something.
GRANT USAGE ON SCHEMA pgleaderlock TO {role};
GRANT SELECT ON
    pgleaderlock.schema_version,
    pgleaderlock.sessions,
    pgleaderlock.leaders,
    pgleaderlock.terms,
    pgleaderlock.events,
    pgleaderlock.requests,
    pgleaderlock.histories,
    pgleaderlock.slots,
    pgleaderlock.leader_state
TO {role}

-- name: grants_fence_only
-- For a role that writes behind the fence but never leads.
GRANT USAGE ON SCHEMA pgleaderlock TO {role};
GRANT SELECT (namespace, role, epoch) ON pgleaderlock.leaders TO {role};
GRANT EXECUTE ON FUNCTION pgleaderlock.fence, pgleaderlock.fence_strictly, pgleaderlock.fence_key TO {role}

-- name: grants_table_owner
-- For a role that owns tables and fences them: these functions run with the caller's privileges, and the role that
-- creates a trigger must be allowed to execute the trigger's function.
GRANT USAGE ON SCHEMA pgleaderlock TO {role};
GRANT EXECUTE ON FUNCTION pgleaderlock.fence_table, pgleaderlock.unfence_table, pgleaderlock.check_fence TO {role}

-- name: grants_lock_server
-- For the role of `pgleaderlock serve`. It reads the locks and calls functions; it cannot set a token by hand.
GRANT USAGE ON SCHEMA pgleaderlock TO {role};
GRANT SELECT ON
    pgleaderlock.schema_version,
    pgleaderlock.lock_leases,
    pgleaderlock.lock_tokens,
    pgleaderlock.lock_servers,
    pgleaderlock.lock_waiters,
    pgleaderlock.lock_breaks
TO {role};
GRANT EXECUTE ON FUNCTION
    pgleaderlock.lock_apply,
    pgleaderlock.lock_tick,
    pgleaderlock.lock_close,
    pgleaderlock.lock_break,
    pgleaderlock.lock_sweep
TO {role}
