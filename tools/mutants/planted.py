"""Defects that are planted by hand: each breaks one promise in one way that no generator would find."""

from tools.mutants.model import Edit, Mutant

__all__ = ["PLANTED"]

SQL, SESSION, LIFECYCLE, DRIVER, FSM = (
    "_pg/sql/lock.sql",
    "_pg/session.py",
    "_lock/lifecycle.py",
    "_lock/driver.py",
    "_lock/fsm.py",
)
SCRIPTED = "tests/lock/test_fsm_live.py::test_a_lock_in_a_scripted_world_follows_the_table"
ON_POSTGRES = "tests/lock/test_fsm_live.py::test_a_lock_on_postgresql_follows_the_table"

PLANTED = (
    # --- The lock and the lease at the server
    Mutant(
        "late-grant-not-looked-for",
        (Edit(SQL, "held := EXISTS (", "held := false AND EXISTS ("),),
        ("tests/pg/test_lease.py::test_a_slice_that_ends_as_it_is_granted_is_a_grant",),
    ),
    Mutant(
        "late-grant-without-lease",
        (
            Edit(
                SQL, "held := true;", "held := true; PERFORM set_config('idle_session_timeout', '%(lease_ms)s', false);"
            ),
            Edit(
                SQL,
                "        PERFORM set_config('idle_session_timeout', '%(lease_ms)s', false);\n    END IF;",
                "    END IF;",
            ),
        ),
        ("tests/pg/test_lease.py::test_a_slice_that_ends_as_it_is_granted_is_a_grant",),
    ),
    Mutant(
        "late-grant-held-twice",
        (Edit(SQL, "            PERFORM pg_advisory_unlock(%(key1)s, %(key2)s);\n", ""),),
        ("tests/pg/test_lease.py::test_a_slice_that_ends_as_it_is_granted_is_a_grant",),
    ),
    Mutant(
        "waited-grant-without-lease",
        (Edit(SQL, "PERFORM set_config('idle_session_timeout', '%(lease_ms)s', false);", "NULL;"),),
        (
            "tests/pg/test_lease.py::test_case_three_lock_and_lease_come_into_force_together",
            "tests/pg/test_lease.py::test_a_frozen_parked_waiter_does_not_keep_the_lock_it_is_granted",
        ),
    ),
    Mutant(
        "grant-without-lease",
        (
            Edit(
                SQL,
                "THEN set_config('idle_session_timeout', %(lease_ms)s::text, false)",
                "THEN 'held'",
                "-- name: take\n",
            ),
        ),
        (
            "tests/pg/test_lease.py::test_case_three_lock_and_lease_come_into_force_together",
            "tests/pg/test_lease.py::test_a_frozen_leader_is_replaced_and_knows_it_at_its_first_instruction",
        ),
    ),
    Mutant(
        "pooled-grant-without-lease",
        (
            Edit(
                SQL,
                "THEN set_config('idle_session_timeout', %(lease_ms)s::text, false)",
                "THEN 'held'",
                "-- name: take_pooled\n",
            ),
        ),
        ("tests/pg/test_lease.py::test_behind_an_allowed_pooler_lock_and_lease_come_into_force_together",),
    ),
    Mutant(
        "pooler-pid-check-off",
        (Edit(SQL, "pg_backend_pid() = %(backend_pid)s", "true", "-- name: take\n"),),
        ("tests/pg/test_explain.py::test_a_pooler_is_refused_though_the_session_behind_it_has_every_setting",),
    ),
    Mutant(
        "already-held-check-off",
        (Edit(SQL, "WHERE locktype", "WHERE false AND locktype", "-- name: take_pooled\n"),),
        ("tests/pg/test_explain.py::test_behind_an_allowed_pooler_two_clients_of_one_backend_never_both_lead",),
    ),
    Mutant(
        "shared-pool-check-off",
        (Edit("_pg/connect.py", "if moved:", "if False:"),),
        ("tests/pg/test_explain.py::test_a_pool_that_shares_sessions_is_refused_even_when_poolers_are_allowed",),
    ),
    Mutant(
        "mark-of-another-client-ignored",
        (Edit("_pg/connect.py", "(marked and found.mark == ours.mark)", "False"),),
        ("tests/lock/test_guard_pooler.py::test_a_pooler_that_shows_each_client_its_own_session_is_found_by_the_mark",),
    ),
    Mutant(
        "probe-does-not-ask-for-the-lock",
        (Edit(SQL, "THEN CASE WHEN pg_advisory_unlock(", "THEN CASE WHEN true OR pg_advisory_unlock(", "PREPARE"),),
        ("tests/lock/test_moved.py::test_a_session_that_has_lost_the_lock_without_ending_does_not_lead",),
    ),
    Mutant(
        "probe-believes-any-session",
        (Edit(SESSION, "== [self._probe_name]", "!= [None]"),),
        ("tests/lock/test_moved.py::test_a_lock_that_was_moved_to_the_session_of_another_leader_stops_leading",),
    ),
    Mutant(
        "standby-check-off",
        (
            Edit(SESSION, 'if pgconn.parameter_status(b"in_hot_standby") == b"on":', "if False:"),
            Edit(SQL, "AND NOT pg_is_in_recovery()", "", "-- name: take\n"),
        ),
        ("tests/pg/test_explain.py::test_a_standby_is_refused_and_a_list_of_hosts_finds_the_primary",),
    ),
    Mutant(
        "standby-found-by-the-first-message-alone",
        (Edit(SQL, "AND NOT pg_is_in_recovery()", "", "-- name: take\n"),),
        ("tests/pg/test_explain.py::test_a_standby_is_refused_by_the_statement_itself",),
    ),
    Mutant(
        "startup-options-not-sent",
        (
            Edit(
                "_pg/conninfo.py",
                'ours["options"] = " ".join(filter(None, [_options(settings), user_options, _as_options(FORCED)]))',
                "pass",
            ),
        ),
        ("tests/pg/test_explain.py::test_the_dbas_timeouts_do_not_reach_our_session",),
    ),
    Mutant(
        "settings-not-verified",
        (Edit(SQL, "AND current_setting('idle_session_timeout') = '0'", "", "-- name: take\n"),),
        ("tests/pg/test_explain.py::test_a_setting_that_was_changed_behind_our_back_is_refused",),
    ),
    Mutant(
        "parameters-at-the-server",
        (Edit("_pg/connect.py", "cursor_factory=psycopg.AsyncClientCursor", "cursor_factory=psycopg.AsyncCursor"),),
        ("tests/pg/test_lease.py::test_case_one_nothing_is_sent_but_whole_simple_queries",),
    ),
    Mutant(
        "slices-as-long-as-the-wait",
        (Edit(SESSION, "min(wait_s, self._deadlock_timeout_s / 2, self._settings.statement_timeout_s / 2)", "wait_s"),),
        (
            "tests/pg/test_lease.py::test_an_idle_standby_writes_no_error_into_the_servers_log",
            "tests/pg/test_lease.py::test_a_parked_waiter_holds_no_snapshot_longer_than_a_slice",
        ),
    ),
    # --- The session and its end
    Mutant(
        "connection-kept-after-a-timeout",
        (
            Edit(
                SESSION,
                "                await self._abandon(inner)\n"
                '                raise self._lose(ConnectionError(f"the server did not answer',
                '                raise (ConnectionError(f"the server did not answer',
            ),
            Edit(
                LIFECYCLE,
                "await self._close_session(remember=error is not None)",
                "await (asyncio.sleep(0) if error else self._close_session())",
            ),
        ),
        (
            "tests/lock/test_outages.py::test_a_frozen_server_costs_leadership_after_the_probes_timeout",
            "tests/lock/test_outages.py::test_a_lost_reply_to_the_winning_statement_leaves_no_lock_behind",
        ),
    ),
    Mutant(
        "statement-not-abandoned-after-a-timeout",
        (
            Edit(
                SESSION,
                "                await self._abandon(inner)\n                raise self._lose",
                "                raise self._lose",
            ),
        ),
        ("tests/lock/test_leaks.py::test_a_statement_that_timed_out_leaves_no_task_and_no_descriptor",),
    ),
    Mutant(
        "socket-not-watched",
        (Edit(SESSION, "asyncio.get_running_loop().add_reader(self._watched_fd, self._readable)", "pass"),),
        (
            "tests/lock/test_contenders.py::test_a_session_ended_by_the_server_is_noticed_at_the_socket",
            "tests/lock/test_outages.py::test_reset_and_half_closed_connections_are_noticed_without_a_probe",
        ),
    ),
    Mutant(
        "fork-handler-removed",
        (Edit(SESSION, "os.register_at_fork(after_in_child=_let_go_in_child)", ""),),
        ("tests/pg/test_lease.py::test_a_forked_child_does_not_keep_the_session_and_leads_nothing",),
    ),
    Mutant(
        "watch-survives-the-fork",
        (Edit(SESSION, "        os.dup2(null, self._watched_fd)\n", ""),),
        ("tests/pg/test_lease.py::test_a_forked_child_does_not_keep_the_session_and_leads_nothing",),
    ),
    Mutant(
        "own-zombie-not-ended",
        (Edit(LIFECYCLE, "if zombie is None or not await session.end_zombie(zombie):", "if True:"),),
        ("tests/lock/test_outages.py::test_a_cut_leader_ends_its_own_zombie_and_leads_again",),
    ),
    Mutant(
        "zombie-known-by-pid-alone",
        (Edit(SQL, "WHERE extract(epoch FROM backend_start)::text = %(zombie_start)s", "WHERE true"),),
        ("tests/lock/test_outages.py::test_a_backend_that_only_has_the_zombies_pid_is_left_alone",),
    ),
    # --- Trust
    Mutant(
        "probe-trusted-from-its-reply",
        (Edit(LIFECYCLE, "self._trust(sent_at)", "self._trust(self._clock.now())", "async def _probe("),),
        ("tests/lock/test_leadership.py::test_a_probe_extends_trust_from_before_it_was_sent",),
    ),
    Mutant(
        "grant-trusted-from-its-reply",
        (Edit(LIFECYCLE, "self._trust(sent_at)", "self._trust(self._clock.now())", "async def _take("),),
        ("tests/lock/test_leadership.py::test_a_grant_that_comes_after_the_trust_window_is_not_believed",),
    ),
    Mutant(
        "waited-grant-trusted-from-its-reply",
        (Edit(LIFECYCLE, "self._trust(sent_at)", "self._trust(self._clock.now())", "async def _take_or_wait("),),
        ("tests/lock/test_leadership.py::test_a_grant_at_the_server_is_trusted_from_before_its_slice_was_sent",),
    ),
    Mutant(
        "late-answer-believed",
        (Edit(LIFECYCLE, "if self._clock.now() >= self.trusted_until:", "if False:"),),
        (
            "tests/lock/test_leadership.py::test_an_answer_that_comes_after_the_trust_window_is_no_answer",
            "tests/lock/test_leadership.py::test_a_grant_that_comes_after_the_trust_window_is_not_believed",
        ),
    ),
    Mutant(
        "trust-window-ignored",
        (Edit("lock.py", "and self._clock.now() < run.trusted_until", ""),),
        (
            "tests/lock/test_leadership.py::test_a_leader_whose_trust_window_is_past_says_no_in_its_first_instruction",
            "tests/pg/test_lease.py::test_a_frozen_leader_is_replaced_and_knows_it_at_its_first_instruction",
        ),
    ),
    Mutant(
        "forked-child-leads",
        (Edit("lock.py", "os.register_at_fork(", "(lambda **_: None)("),),
        ("tests/lock/test_leadership.py::test_a_forked_child_leads_nothing",),
    ),
    # --- Release and step-down
    Mutant(
        "released-before-the-work-has-ended",
        (
            Edit(
                LIFECYCLE,
                "        await self.works.ended()\n        await self.dispatcher.drained()",
                "        await self.dispatcher.drained()",
            ),
        ),
        (
            "tests/lock/test_lead.py::test_the_work_has_ended_before_the_lock_is_released",
            "tests/lock/test_lead.py::test_at_the_server_the_lock_is_held_until_the_work_has_ended",
        ),
    ),
    Mutant(
        "released-before-the-callbacks-have-heard",
        (
            Edit(
                LIFECYCLE,
                "        await self.works.ended()\n        await self.dispatcher.drained()",
                "        await self.works.ended()",
            ),
        ),
        ("tests/lock/test_callbacks.py::test_the_unlock_waits_for_the_callbacks_of_the_release",),
    ),
    Mutant(
        "no-probes-while-the-release-waits",
        (
            Edit(
                LIFECYCLE,
                "            while not quiet.done():",
                "            await asyncio.wait([quiet])\n            while not quiet.done():",
            ),
        ),
        ("tests/lock/test_lead.py::test_work_that_needs_long_to_clean_up_keeps_the_lock_and_the_probes_go_on",),
    ),
    Mutant(
        "work-not-cancelled-on-loss",
        (Edit(LIFECYCLE, "left_leader=self.works.interrupt", "left_leader=lambda: None"),),
        ("tests/lock/test_lead.py::test_the_work_is_cancelled_in_the_turn_in_which_leadership_is_lost",),
    ),
    Mutant(
        "release-request-survives-the-term",
        (Edit(LIFECYCLE, "self._release_term == self.driver.term", "self._release_term is not None"),),
        ("tests/lock/test_leadership.py::test_a_step_down_that_runs_out_of_time_frees_the_lock_by_force",),
    ),
    Mutant(
        "force-survives-the-release",
        (Edit(LIFECYCLE, "self._force_term in (ANY_TERM, self.driver.term)", "self._force_term is not None"),),
        ("tests/lock/test_leadership.py::test_the_force_of_a_step_down_does_not_reach_the_next_term",),
    ),
    Mutant(
        "step-down-without-back-off",
        (Edit(FSM, "(event, A.CLOSE, A.BACK_OFF)", "(event, A.CLOSE, A.ATTEMPT_NOW)"),),
        ("tests/lock/test_retry.py::test_after_a_step_down_at_least_one_delay_passes_before_the_next_attempt",),
    ),
    # --- Callbacks
    Mutant(
        "callbacks-side-by-side",
        (Edit("_lock/callbacks.py", "await self._call_all(*entry)", "asyncio.ensure_future(self._call_all(*entry))"),),
        ("tests/lock/test_callbacks.py::test_callbacks_never_overlap",),
    ),
    Mutant(
        "callbacks-last-in-first-out",
        (Edit("_lock/callbacks.py", "self._queue.popleft()", "self._queue.pop()"),),
        ("tests/lock/test_callbacks.py::test_callbacks_that_had_to_wait_run_in_the_order_of_the_transitions",),
    ),
    Mutant(
        "callbacks-before-the-state",
        (
            Edit(
                "_lock/callbacks.py",
                "self._queue.append((event, args))",
                "[callback(*args) for callback in self._registry.of(event)]",
            ),
            Edit(DRIVER, "        self.state = row.target\n", ""),
            Edit(
                LIFECYCLE,
                "        finally:\n",
                "        finally:\n            self.driver.state = row.target\n",
                "async def _apply(",
            ),
        ),
        ("tests/lock/test_callbacks.py::test_inside_on_lost_the_lock_is_a_follower_already",),
    ),
    Mutant(
        "failed-attempt-without-on-error",
        (
            Edit(
                FSM,
                "(A.EMIT_LOST, A.EMIT_ERROR, A.CLOSE, A.BACK_OFF_JITTERED)",
                "(A.EMIT_LOST, A.CLOSE, A.BACK_OFF_JITTERED)",
            ),
        ),
        (
            f"{SCRIPTED}[ACQUIRING x DbError, auto_reacquire]",
            f"{ON_POSTGRES}[ACQUIRING x DbError, auto_reacquire]",
        ),
    ),
    # --- Grace and retry
    Mutant(
        "grace-without-end",
        (
            Edit(
                LIFECYCLE,
                "if left_s <= 0:\n            return Input.GRACE_EXPIRED",
                "if False:\n            return Input.GRACE_EXPIRED",
            ),
            Edit(LIFECYCLE, "first_of(reacquiring, self._clock.sleep(left_s))", "first_of(reacquiring)"),
        ),
        (f"{ON_POSTGRES}[RECONNECTING x GraceExpired, auto_reacquire]",),
    ),
    Mutant(
        "grace-bounds-no-connect",
        (Edit(LIFECYCLE, "first_of(reacquiring, self._clock.sleep(left_s))", "first_of(reacquiring)"),),
        ("tests/lock/test_leadership.py::test_a_connect_that_hangs_does_not_outlast_the_grace",),
    ),
    Mutant(
        "failed-connect-ends-the-grace",
        (
            Edit(
                FSM,
                "Row(S.RECONNECTING, IN.DB_ERROR, S.RECONNECTING, (A.CLOSE, A.BACK_OFF_JITTERED))",
                "Row(S.RECONNECTING, IN.DB_ERROR, S.FOLLOWER, (A.EMIT_LOST, A.CLOSE, A.BACK_OFF_JITTERED))",
            ),
        ),
        ("tests/lock/test_outages.py::test_a_grace_that_is_long_enough_outlasts_a_restart",),
    ),
    Mutant(
        "giving-up-ignored",
        (Edit(DRIVER, "            self.due_at = None\n", "            self.due_at = now + 1.0\n"),),
        ("tests/lock/test_retry.py::test_a_strategy_that_gives_up_stops_the_lock",),
    ),
    Mutant(
        "no-jitter",
        (Edit("retry.py", "return rng.uniform(0.0, max(JITTER_S_MIN, delay_s * JITTER_FRACTION))", "return 0.0"),),
        ("tests/lock/test_retry.py::test_a_reconnect_is_jittered_whatever_the_strategy",),
    ),
    Mutant(
        "strategy-shared-between-locks",
        (Edit("lock.py", "return copy() if callable(copy) else strategy", "return strategy"),),
        ("tests/lock/test_retry.py::test_each_lock_gets_a_jitter_with_a_memory_of_its_own",),
    ),
    # --- Secrets
    Mutant(
        "error-text-not-scrubbed",
        (Edit("_pg/conninfo.py", 'text = text.replace(secret, "***")', "pass"),),
        ("tests/pg/test_conninfo.py::test_a_secret_is_blanked_wherever_it_stands",),
    ),
    Mutant(
        "error-text-of-a-connect-not-scrubbed",
        (Edit("_pg/explain.py", "text = scrub(str(error), params)", "text = str(error)"),),
        ("tests/pg/test_conninfo.py::test_a_secret_in_the_servers_answer_is_not_passed_on",),
    ),
    Mutant(
        "cause-shows-the-secret",
        (
            Edit(
                "_pg/explain.py",
                'return error if " ".join(text.split()) == scrub(text, params) else None',
                "return error",
            ),
        ),
        ("tests/pg/test_conninfo.py::test_a_secret_in_the_servers_answer_is_not_passed_on",),
    ),
)
