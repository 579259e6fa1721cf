-------------------------------- MODULE Gate --------------------------------
(***************************************************************************)
(* The gate of pgleaderlock (docs/gate.md): of all the gates of one role,  *)
(* at most one is open at any time, on a lock that has no TTL.             *)
(*                                                                         *)
(* One role, one database, some nodes.  Sessions, beats and epochs have    *)
(* their real numbers.  A session has one statement under way at most (the *)
(* engine sends them one after the other); a node that gives up on a       *)
(* statement gives up its session (Abandon).                               *)
(*                                                                         *)
(* What needs no action of its own, because TLC tries every interleaving:  *)
(*   delay    a message that is there may be taken at any later step       *)
(*   loss     ... or never: Abandon gives up on it, Drop removes it        *)
(*   pause    a node that takes no step while Tick goes on; its clock goes *)
(*            on, and so does its gate until the deadline                  *)
(*   cut      both of these                                                *)
(*   database crash   Drop of every session, one after the other           *)
(*   eviction, pg_terminate_backend, T, tcp_user_timeout   Drop            *)
(* The server may end any session at any moment here: for the safety of    *)
(* the gate the lease T is not needed at all ("T serves liveness only").   *)
(*                                                                         *)
(* TIME is one discrete clock; every timer counts down, or up to a bound,  *)
(* in its ticks.  This is sound for dense time: all comparisons are closed *)
(* (a gate counts as open at its deadline, too; a wait is over as soon as  *)
(* it may be), and timed systems with closed integer bounds reach with     *)
(* integer moments whatever they reach with real ones (Henzinger, Manna,   *)
(* Pnueli: digitization).  RATES: each node has a fixed rate, given as     *)
(* ticks for one unit of its own clock; G, T and wait_t are in units of    *)
(* whoever measures them.  Every timer is relative, so nothing else of a   *)
(* node's clock can be seen by anybody.                                    *)
(*                                                                         *)
(* MESSAGES: with Apart, request and reply of each statement travel apart, *)
(* and the request of a session that was given up may be executed later    *)
(* (ghost).  Without, a statement is executed when it is sent and only its *)
(* reply travels, which is sound and has far fewer states: who sends later *)
(* has a later deadline, so the worst of all delays of a request is none;  *)
(* a look that is answered at once is seen earlier, so it opens earlier;   *)
(* and a request that is executed after its node gave up (during which the *)
(* session keeps the lock, and the node's gate is shut) leaves what it     *)
(* leaves when the node gives up a little later, on the reply.             *)
(* A standby always has a try under way: one that is not executed yet is   *)
(* no different from one that is not sent yet.                             *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, TLC

CONSTANTS
  Nodes,        \* model values
  Odd,          \* those of them that have other settings than the rest
  Settings,     \* of each node: [g, t, r]: G and T on its clock, ticks per unit
  Apart,        \* do requests and replies travel apart?
  MaxEpoch,     \* terms in a run; 0: no bound (needs VIEW Shown)
  Instant,      \* nodes with takeover="instant": they open as soon as they win
  Faults,       \* which of "crash" "drain" "idle" "beats" may happen; see there
  None,         \* no session
  Broken        \* the rule that is broken: see Rules; "none" is the protocol

Rules == {
  "none",
  "no_wait",         \* the successor opens at once
  "no_chain",        \* it waits its direct predecessor's T, not the row's wait_t
  "early_clean",     \* clean although the releaser was itself still waiting
  "drain_clean",     \* clean although work was in flight when patience was over
  "clean_kept",      \* the bump does not reset the clean mark
  "clean_late",      \* the mark is written after the unlock, to whatever term
  "from_reply",      \* deadline anchored at the reply, not before the send
  "seen_at_send",    \* first_seen anchored before the look's send
  "stale_read",      \* predecessor read in the winning statement's snapshot
  "grant_no_beat",   \* a grant does not count as a beat
  "settled_early",   \* wait_t lowered by the first beat, waited out or not
  "settled_dropped", \* the bump drops the wait_t of a settled predecessor: it may
                     \* itself still act, so its own T must stay
  "own_blind",       \* follows itself at once, though it was still waiting
  "own_by_node",     \* "myself" decided by the node's name
  "own_by_session",  \* "my last term" decided by its session, not its epoch:
                     \* what the code did until TLC found the trace
  "epoch_kept",      \* who follows itself keeps its epoch
  "lost_commit"}     \* an acknowledged bump may be lost in a crash

ASSUME Broken \in Rules

(************************** Settings to choose from ************************)
Node(g, t, r) == [g |-> g, t |-> t, r |-> r]
Either(odd, even) == [n \in Nodes |-> IF n \in Odd THEN odd ELSE even]
Same == Either(Node(1, 2, 1), Node(1, 2, 1))
\* The shorter T does not cover the longer G.
Mixed == Either(Node(2, 3, 1), Node(1, 2, 1))
\* Rates of 3 : 2, which is less than T : G = 2 : 1.
Skewed == Either(Node(1, 2, 3), Node(1, 2, 2))
\* Not allowed: rates of 2 : 1 = T : G; and T = G.
TooSkewed == Either(Node(1, 2, 2), Node(1, 2, 1))
TooShort == Either(Node(2, 2, 1), Node(2, 2, 1))

G(n) == Settings[n].g * Settings[n].r          \* in ticks
T(n) == Settings[n].t                          \* in units, as the row has it
Ticks(n, units) == units * Settings[n].r
Max(S) == CHOOSE x \in S : \A y \in S : y <= x
Larger(x, y) == IF x > y THEN x ELSE y
Smaller(x, y) == IF x < y THEN x ELSE y
LongestWait(n) == Ticks(n, Max({T(m) : m \in Nodes}))

VARIABLES
  \* The server
  lock,    \* the session <<node, number>> that holds the role's lock, or None
  row,     \* the role's row: epoch, sess(ion), wait (wait_t), clean
  beat,    \* the counter of each node's session (never set back, for brevity)
  live,    \* of each node: does the server have its session?
  ghost,   \* of each node: a request under way of a session that it gave up
  \* Each node
  ses,     \* the number of its latest session
  msg,     \* the statement under way on it: request or reply
  phase,   \* off (no session), standby, locked (won, no term yet), leader,
           \* draining (gate shut, work in flight), ending
  age,     \* ticks since the statement under way was sent
  sight,   \* (session, beat) of the holder, and how long ago it was first seen
  dl,      \* ticks to the gate's deadline; -1 when it is past, or shut
  opens,   \* ticks until its predecessors are waited out (settled_at)
  term,    \* epoch and session of the last term that it has heard of
  work,    \* work that is left of a term that is over for this node: its epoch,
           \* and how many ticks to its deadline (-1: none, or past it)
  \* History, for the properties
  past     \* top: the highest epoch under which anybody has acted; issued: the
           \* highest that was issued; dup: one was issued that is not higher;
           \* old: the row before the last bump (lost_commit only)

vars == <<lock, row, beat, live, ghost, ses, msg, phase, age, sight, dl, opens, term, work, past>>

Session(n) == <<n, ses[n]>>
Owner(s) == s[1]
NoRow == [epoch |-> 0, sess |-> None, wait |-> 0, clean |-> TRUE]
\* k(ind), f(lag); a bump's reply has its epoch and the predecessor's row and beat.
Message(k, f) == [k |-> k, f |-> f, epoch |-> 0, prev |-> NoRow, beat |-> 0]
Quiet == Message("none", FALSE)
Lost == Message("lost", FALSE)
Requests == {"TRY", "BUMP", "BEAT", "END", "MARK"}
Replies == {"try", "bump", "beat", "ended"}
Unseen == [s |-> None, b |-> 0, a |-> 0]
NoTerm == [epoch |-> 0, sess |-> None]
NoWork == [left |-> -1, epoch |-> 0]
InTerm == {"leader", "draining", "ending"}

Init ==
  /\ lock = None
  /\ row = NoRow
  /\ beat = TLCEval([n \in Nodes |-> 0])
  /\ live = TLCEval([n \in Nodes |-> FALSE])
  /\ ghost = TLCEval([n \in Nodes |-> [s |-> None, m |-> Quiet]])
  /\ ses = TLCEval([n \in Nodes |-> 0])
  /\ msg = TLCEval([n \in Nodes |-> Quiet])
  /\ phase = TLCEval([n \in Nodes |-> "off"])
  /\ age = TLCEval([n \in Nodes |-> 0])
  /\ sight = TLCEval([n \in Nodes |-> Unseen])
  /\ dl = TLCEval([n \in Nodes |-> -1])
  /\ opens = TLCEval([n \in Nodes |-> 0])
  /\ term = TLCEval([n \in Nodes |-> NoTerm])
  /\ work = TLCEval([n \in Nodes |-> NoWork])
  /\ past = [top |-> 0, issued |-> 0, dup |-> FALSE, old |-> NoRow]

(***************************** What is promised ****************************)
\* Asked now, would the gate let somebody act?  Closed at both ends: see TIME.
Open(n) == phase[n] = "leader" /\ dl[n] >= 0 /\ (opens[n] = 0 \/ n \in Instant)
\* Work that was let in goes on behind a gate that was shut since, until the
\* deadline that the gate had: a release is clean only when there is none.
InFlight(n) == dl[n] >= 0 /\ (Open(n) \/ phase[n] = "draining")
Leftover(n) == work[n].left >= 0
Under(n) == (IF InFlight(n) THEN {term[n].epoch} ELSE {}) \cup (IF Leftover(n) THEN {work[n].epoch} ELSE {})

\* The promise.  An instant takeover does without it on purpose, as far as
\* those are concerned that it took over from; whoever follows it still waits.
AtMostOne == \A n, m \in Nodes : n # m =>
  \A e \in Under(n), f \in Under(m) : (IF e > f THEN n ELSE m) \in Instant
\* Stronger: nobody acts under an older epoch after somebody did under a newer.
InOrder == \A n \in Nodes : InFlight(n) => (term[n].epoch >= past.top \/ Instant # {})
\* Strictly increasing, never used twice.
Epochs == ~past.dup
Types ==
  /\ \A n \in Nodes :
       /\ phase[n] \in InTerm \cup {"off", "standby", "locked"}
       /\ msg[n].k \in Requests \cup Replies \cup {"none", "lost"}
       /\ dl[n] \in -1..G(n) /\ work[n].left \in -1..G(n)
       /\ dl[n] >= 0 => phase[n] \in {"leader", "draining"}
       /\ opens[n] \in 0..LongestWait(n)
       /\ age[n] \in 0..Larger(G(n) + 1, LongestWait(n))
       /\ live[n] => phase[n] # "off"
       \* Who leads as far as the server knows is in the row, and has the lock.
       /\ live[n] /\ phase[n] \in {"leader", "draining"} => row.sess = Session(n) /\ lock = Session(n)
  /\ lock # None => (live[Owner(lock)] /\ lock = Session(Owner(lock))) \/ ghost[Owner(lock)].s = lock

(****************************** Small helpers ******************************)
\* Somebody may act from this step on.
Acted == past' = [past EXCEPT !.top = Max({@} \cup {term'[n].epoch : n \in {m \in Nodes : InFlight(m)'}})]

Idle(n) == live[n] /\ msg[n].k = "none"
\* May node n have this statement executed now?  Sent before, or just now.
Executes(n, in, request) == live[n] /\ phase[n] \in in /\ msg[n].k = (IF Apart THEN request ELSE "none")
\* The request leaves.  (Without Apart it is executed as it is sent.)
Send(n, k, f) == /\ Apart /\ Idle(n)
                 /\ msg' = [msg EXCEPT ![n] = Message(k, f)]
                 /\ age' = [age EXCEPT ![n] = 0]
Answer(n, m) == /\ msg' = [msg EXCEPT ![n] = m]
                /\ age' = [age EXCEPT ![n] = IF Apart THEN @ ELSE 0]
\* The reply has come; what the session does next is `then`.
Receive(n, k, then) == /\ msg[n].k = k
                       /\ msg' = [msg EXCEPT ![n] = then]
                       /\ age' = [age EXCEPT ![n] = 0]
\* A standby's next try is under way at once, unless its session has ended.
NextTry(n) == IF ~live[n] THEN Lost ELSE IF Apart THEN Message("TRY", FALSE) ELSE Quiet
Free(s) == lock' = IF lock = s THEN None ELSE lock
BeatOf(s) == IF s = None THEN 0 ELSE beat[Owner(s)]

(******************************** The session ******************************)
OpenSession(n) ==
  /\ phase[n] = "off"
  /\ ses' = [ses EXCEPT ![n] = @ + 1]
  /\ live' = [live EXCEPT ![n] = TRUE]
  /\ phase' = [phase EXCEPT ![n] = "standby"]
  /\ msg' = [msg EXCEPT ![n] = IF Apart THEN Message("TRY", FALSE) ELSE Quiet]
  /\ age' = [age EXCEPT ![n] = 0]
  /\ UNCHANGED <<lock, row, beat, ghost, sight, dl, opens, term, work, past>>

\* The gate is shut.  What it had let in is left, and may act until the deadline.
Left(n) == /\ work' = [work EXCEPT ![n] = IF InFlight(n) THEN [left |-> Larger(@.left, dl[n]), epoch |-> term[n].epoch] ELSE @]
           /\ dl' = [dl EXCEPT ![n] = -1]

\* That a session ends which holds no lock makes no difference but for its
\* number.  Fault "idle" lets it end all the same.
Matters(n) == lock = Session(n) \/ "idle" \in Faults

\* The session is gone for its node, and for the server too, unless a request
\* is under way.  (That the server notices later only keeps the lock from being
\* taken, which is no different from nobody trying.)
GoneFor(n) ==
  /\ phase' = [phase EXCEPT ![n] = "off"]
  /\ live' = [live EXCEPT ![n] = FALSE]
  /\ msg' = [msg EXCEPT ![n] = Quiet]
  /\ age' = [age EXCEPT ![n] = 0]
  /\ \/ Free(Session(n)) /\ UNCHANGED ghost
     \/ /\ live[n] /\ msg[n].k \in {"BUMP", "BEAT", "END", "MARK"} /\ ghost[n].s = None
        /\ ghost' = [ghost EXCEPT ![n] = [s |-> Session(n), m |-> msg[n]]]
        /\ UNCHANGED lock

\* Loss noticed, a time-out, an error, a reply that came too late: whatever is
\* unknown is lost.  Every gate first, then the session.
Abandon(n) ==
  /\ phase[n] # "off"
  /\ Matters(n) \/ ~live[n]
  /\ GoneFor(n)
  /\ Left(n)
  /\ UNCHANGED <<row, beat, ses, sight, opens, term, past>>

\* The process ends and is started again: another instance, which remembers
\* nothing.  Its work ended with it.
Crash(n) ==
  /\ "crash" \in Faults
  /\ phase[n] \in InTerm \cup {"locked"} \/ Leftover(n) \/ term[n] # NoTerm \/ sight[n] # Unseen
  /\ IF phase[n] # "off" THEN GoneFor(n) ELSE UNCHANGED <<lock, live, ghost, msg, phase, age>>
  /\ sight' = [sight EXCEPT ![n] = Unseen]
  /\ dl' = [dl EXCEPT ![n] = -1]
  /\ opens' = [opens EXCEPT ![n] = 0]
  /\ term' = [term EXCEPT ![n] = NoTerm]
  /\ work' = [work EXCEPT ![n] = NoWork]
  /\ UNCHANGED <<row, beat, ses, past>>

\* The server ends a session.  A request that it has not executed is lost, a
\* reply that it has sent is not.
Drop(n) ==
  /\ live[n] /\ Matters(n)
  /\ live' = [live EXCEPT ![n] = FALSE]
  /\ Free(Session(n))
  /\ msg' = [msg EXCEPT ![n] = IF @.k \in Requests THEN Lost ELSE @]
  /\ UNCHANGED <<row, beat, ghost, ses, phase, age, sight, dl, opens, term, work, past>>

(*************************** Winning, statement one ************************)
\* Tries the lock, and looks at the holder's (session, beat).  Without the lock
\* and without anything new to see, it need not be executed.
Look == [s |-> row.sess, b |-> BeatOf(row.sess), a |-> 0]
New(n) == row.sess # None /\ <<sight[n].s, sight[n].b>> # <<Look.s, Look.b>>
Saw(n, look) ==
  sight' = [sight EXCEPT ![n] = IF look.s = None \/ <<@.s, @.b>> = <<look.s, look.b>> THEN @
                                ELSE [look EXCEPT !.a = IF Broken = "seen_at_send" THEN age[n] ELSE 0]]

ServeTry(n) ==
  /\ live[n] /\ phase[n] = "standby" /\ msg[n].k = (IF Apart THEN "TRY" ELSE "none")
  /\ lock = None \/ New(n)
  /\ lock' = IF lock = None THEN Session(n) ELSE lock
  /\ LET won == lock = None
         \* Broken "stale_read": who wins is told what there was when its try began.
         shown == IF Broken = "stale_read" /\ won THEN Unseen ELSE Look IN
     IF Apart
     THEN /\ msg' = [msg EXCEPT ![n] = [Message("try", won) EXCEPT !.prev = [row EXCEPT !.sess = shown.s], !.beat = shown.b]]
          /\ UNCHANGED <<phase, age, sight>>
     ELSE /\ phase' = [phase EXCEPT ![n] = IF won THEN "locked" ELSE "standby"]
          /\ Saw(n, shown)
          /\ age' = [age EXCEPT ![n] = 0]
          /\ UNCHANGED msg
  /\ UNCHANGED <<row, beat, live, ghost, ses, dl, opens, term, work, past>>

GetTry(n) ==
  /\ Receive(n, "try", IF msg[n].f THEN Quiet ELSE NextTry(n))
  /\ phase' = [phase EXCEPT ![n] = IF msg[n].f THEN "locked" ELSE "standby"]
  /\ Saw(n, [s |-> msg[n].prev.sess, b |-> msg[n].beat, a |-> 0])
  /\ UNCHANGED <<lock, row, beat, live, ghost, ses, dl, opens, term, work, past>>

(*************************** Winning, statement two ************************)
SendBump(n) ==
  /\ phase[n] = "locked" /\ Send(n, "BUMP", FALSE)
  /\ UNCHANGED <<lock, row, beat, live, ghost, ses, phase, sight, dl, opens, term, work, past>>

\* Is the term in the row the last one that n has heard of, and its own?
IsOwn(n, prev) ==
  CASE Broken = "own_by_node"    -> prev.sess # None /\ Owner(prev.sess) = n
    [] Broken = "own_by_session" -> prev.sess # None /\ prev.sess = term[n].sess
    [] OTHER                     -> prev.sess # None /\ prev.sess = term[n].sess /\ prev.epoch = term[n].epoch

\* Reads the predecessor, raises the epoch.  The lock is held by session s.
BumpBy(s) ==
  LET n == Owner(s)
      epoch == IF Broken = "epoch_kept" /\ IsOwn(n, row) THEN row.epoch ELSE row.epoch + 1 IN
  /\ MaxEpoch = 0 \/ row.epoch < MaxEpoch
  /\ row' = [epoch |-> epoch, sess |-> s,
             wait |-> Larger(T(n), IF row.clean \/ (Broken = "settled_dropped" /\ row.wait = T(Owner(row.sess))) THEN 0 ELSE row.wait),
             clean |-> row.clean /\ Broken = "clean_kept"]
  \* A grant counts as a beat: whoever saw this session lead the role before
  \* must not take that for a look at this term.
  /\ beat' = [beat EXCEPT ![n] = IF Broken = "grant_no_beat" THEN @ ELSE @ + 1]
  /\ past' = [past EXCEPT !.issued = Larger(@, epoch), !.dup = @ \/ epoch <= past.issued,
                          !.old = IF Broken = "lost_commit" THEN row ELSE @]

ServeBump(n) ==
  /\ Executes(n, {"locked"}, "BUMP")
  /\ BumpBy(Session(n))
  /\ Answer(n, [Message("bump", FALSE) EXCEPT !.epoch = row'.epoch, !.prev = row, !.beat = BeatOf(row.sess)])
  /\ UNCHANGED <<lock, live, ghost, ses, phase, sight, dl, opens, term, work>>

\* The rule by which a successor may act: `opens_at` in
\* src/pgleaderlock/_election/role.py.
Way(n, prev, at) ==
  CASE prev.clean \/ Broken = "no_wait" -> "clean"
    [] IsOwn(n, prev)                   -> "own"
    [] sight[n].s # None /\ sight[n].s = prev.sess /\ (sight[n].b = at \/ Broken = "stale_read") -> "seen"
    [] OTHER                            -> "unseen"
WaitFor(prev) == IF Broken = "no_chain" /\ prev.sess # None THEN T(Owner(prev.sess)) ELSE prev.wait

GetBump(n) ==
  /\ Receive(n, "bump", Quiet)
  /\ age[n] <= G(n)             \* else it came too late: only Abandon is left
  /\ LET m == msg[n]
         way == Way(n, m.prev, m.beat) IN
     /\ term' = [term EXCEPT ![n] = [epoch |-> m.epoch, sess |-> Session(n)]]
     /\ dl' = [dl EXCEPT ![n] = IF Broken = "from_reply" THEN G(n) ELSE G(n) - age[n]]
     /\ opens' = [opens EXCEPT ![n] =
          CASE way = "clean"  -> 0
            [] way = "own"    -> IF Broken = "own_blind" THEN 0 ELSE @
            [] way = "seen"   -> Larger(0, Ticks(n, WaitFor(m.prev)) - sight[n].a)
            [] way = "unseen" -> Ticks(n, WaitFor(m.prev))]
  /\ phase' = [phase EXCEPT ![n] = "leader"]
  /\ UNCHANGED <<lock, row, beat, live, ghost, ses, sight, work>>
  /\ Acted

(******************************** The heartbeat ****************************)
\* Also while it drains: the lock is kept until the work has ended.  A standby
\* beats, too, which makes a difference only to who saw it lead, and only later
\* openings: "beats".
Beating == {"leader", "draining"} \cup (IF "beats" \in Faults THEN {"standby", "locked"} ELSE {})
Settled(n) == phase[n] \in {"leader", "draining"} /\ (opens[n] = 0 \/ Broken = "settled_early")

SendBeat(n) ==
  /\ phase[n] \in Beating /\ Send(n, "BEAT", Settled(n))
  /\ UNCHANGED <<lock, row, beat, live, ghost, ses, phase, sight, dl, opens, term, work, past>>

BeatBy(s, settled) ==
  /\ beat' = [beat EXCEPT ![Owner(s)] = @ + 1]
  /\ row' = IF settled /\ row.sess = s THEN [row EXCEPT !.wait = T(Owner(s))] ELSE row

ServeBeat(n) ==
  /\ Executes(n, Beating, "BEAT")
  /\ BeatBy(Session(n), IF Apart THEN msg[n].f ELSE Settled(n))
  /\ Answer(n, Message("beat", FALSE))
  /\ UNCHANGED <<lock, live, ghost, ses, phase, sight, dl, opens, term, work, past>>

GetBeat(n) ==
  /\ Receive(n, "beat", Quiet)
  /\ LET until == IF Broken = "from_reply" THEN G(n) ELSE G(n) - age[n] IN
     dl' = [dl EXCEPT ![n] = IF phase[n] \in {"leader", "draining"} THEN Larger(@, until) ELSE @]
  /\ UNCHANGED <<lock, row, beat, live, ghost, ses, phase, sight, opens, term, work>>
  /\ Acted

(******************************* Giving it up ******************************)
\* Clean only if the releaser had waited its own predecessor out, and nothing
\* of its work is left, of whatever term.
Clean(n, ended) == /\ opens[n] = 0 \/ Broken = "early_clean"
                   /\ (ended /\ ~Leftover(n)) \/ Broken = "drain_clean"

\* Nothing new is let in, and what is in flight goes on.
Drain(n) ==
  /\ "drain" \in Faults
  /\ Idle(n) /\ Open(n)
  /\ phase' = [phase EXCEPT ![n] = "draining"]
  /\ UNCHANGED <<lock, row, beat, live, ghost, ses, msg, age, sight, dl, opens, term, work, past>>

\* The mark belongs to session and epoch.  (No other term of this session can
\* have begun while its request was under way, so the session tells.)  It is
\* committed before the lock is free: one step here, nobody comes in between.
EndBy(s, clean) ==
  /\ row' = IF Broken # "clean_late" /\ row.sess = s THEN [row EXCEPT !.clean = clean] ELSE row
  /\ Free(s)

\* Asked to give it up while nothing is in flight, or the work has ended; or
\* patience has, and what is left goes on.
Release(n) ==
  /\ "drain" \in Faults
  /\ Idle(n) /\ ((phase[n] = "leader" /\ ~Open(n)) \/ phase[n] = "draining")
  /\ \E ended \in {TRUE} \cup {phase[n] = "leader"} :
       /\ IF ended THEN dl' = [dl EXCEPT ![n] = -1] /\ UNCHANGED work ELSE Left(n)
       /\ IF Apart
          THEN /\ Send(n, "END", Clean(n, ended))
               /\ phase' = [phase EXCEPT ![n] = "ending"]
               /\ UNCHANGED <<lock, row>>
          ELSE /\ EndBy(Session(n), Clean(n, ended))
               /\ phase' = [phase EXCEPT ![n] = IF Broken = "clean_late" THEN "ending" ELSE "standby"]
               /\ msg' = [msg EXCEPT ![n] = IF Broken = "clean_late" THEN Message("MARK", Clean(n, ended)) ELSE Quiet]
               /\ age' = [age EXCEPT ![n] = 0]
  /\ UNCHANGED <<beat, live, ghost, ses, sight, opens, term, past>>

ServeEnd(n) ==
  /\ live[n] /\ msg[n].k = "END"
  /\ EndBy(Session(n), msg[n].f)
  /\ msg' = [msg EXCEPT ![n] = Message(IF Broken = "clean_late" THEN "MARK" ELSE "ended", @.f)]
  /\ UNCHANGED <<beat, live, ghost, ses, phase, age, sight, dl, opens, term, work, past>>

\* Broken "clean_late" only: the mark comes after the unlock, and hits whoever
\* leads by then.
ServeMark(n) ==
  /\ live[n] /\ msg[n].k = "MARK"
  /\ row' = [row EXCEPT !.clean = msg[n].f]
  /\ msg' = [msg EXCEPT ![n] = Message("ended", FALSE)]
  /\ UNCHANGED <<lock, beat, live, ghost, ses, phase, age, sight, dl, opens, term, work, past>>

GetEnded(n) ==
  /\ Receive(n, "ended", NextTry(n))
  /\ phase' = [phase EXCEPT ![n] = "standby"]
  /\ UNCHANGED <<lock, row, beat, live, ghost, ses, sight, dl, opens, term, work, past>>

WorkEnds(n) ==
  /\ Leftover(n)
  /\ work' = [work EXCEPT ![n] = NoWork]
  /\ UNCHANGED <<lock, row, beat, live, ghost, ses, msg, phase, age, sight, dl, opens, term, past>>

(************************ Of sessions that were given up *******************)
\* The request is executed after all, or never; then the session has ended.
ServeGhost(n) ==
  /\ ghost[n].s # None
  /\ LET s == ghost[n].s  m == ghost[n].m IN
     CASE m.k = "BUMP" -> BumpBy(s) /\ Free(s)
       [] m.k = "BEAT" -> BeatBy(s, m.f) /\ Free(s) /\ UNCHANGED past
       [] m.k = "END"  -> EndBy(s, m.f) /\ UNCHANGED <<beat, past>>
       [] m.k = "MARK" -> row' = [row EXCEPT !.clean = m.f] /\ Free(s) /\ UNCHANGED <<beat, past>>
  /\ ghost' = [ghost EXCEPT ![n] = [s |-> None, m |-> Quiet]]
  /\ UNCHANGED <<live, ses, msg, phase, age, sight, dl, opens, term, work>>

DropGhost(n) ==
  /\ ghost[n].s # None
  /\ Free(ghost[n].s)
  /\ ghost' = [ghost EXCEPT ![n] = [s |-> None, m |-> Quiet]]
  /\ UNCHANGED <<row, beat, live, ses, msg, phase, age, sight, dl, opens, term, work, past>>

(************************************ Time *********************************)
\* Of which statements the moment of the send counts, and how long.
Older(n, d) ==
  CASE msg[n].k \in {"BUMP", "bump", "BEAT", "beat"}           -> Smaller(age[n] + d, G(n) + 1)
    [] Broken = "seen_at_send" /\ phase[n] = "standby"         -> Smaller(age[n] + d, LongestWait(n))
    [] OTHER                                                   -> age[n]

Pass(d) ==
  /\ age' = TLCEval([n \in Nodes |-> Older(n, d)])
  /\ dl' = TLCEval([n \in Nodes |-> Larger(dl[n] - d, -1)])
  /\ work' = TLCEval([n \in Nodes |-> IF work[n].left >= d THEN [work[n] EXCEPT !.left = @ - d] ELSE NoWork])
  /\ opens' = TLCEval([n \in Nodes |-> Larger(opens[n] - d, 0)])
  /\ sight' = TLCEval([n \in Nodes |-> IF sight[n].s = None THEN Unseen
                                       ELSE [sight[n] EXCEPT !.a = Smaller(@ + d, LongestWait(n))]])
  /\ UNCHANGED <<lock, row, beat, live, ghost, ses, msg, phase, term>>
  /\ Acted
Tick == Pass(1)

\* Broken "lost_commit" only: a crash of the server that loses the last bump.
Forgetful ==
  /\ Broken = "lost_commit" /\ row.epoch > past.old.epoch
  /\ row' = past.old
  /\ lock' = None
  /\ live' = TLCEval([n \in Nodes |-> FALSE])
  /\ msg' = TLCEval([n \in Nodes |-> IF msg[n].k \in Requests THEN Lost ELSE msg[n]])
  /\ UNCHANGED <<beat, ghost, ses, phase, age, sight, dl, opens, term, work, past>>

Next ==
  \/ Tick \/ Forgetful
  \/ \E n \in Nodes :
       \/ OpenSession(n) \/ Abandon(n) \/ Crash(n) \/ Drop(n)
       \/ ServeTry(n) \/ GetTry(n)
       \/ SendBump(n) \/ ServeBump(n) \/ GetBump(n)
       \/ SendBeat(n) \/ ServeBeat(n) \/ GetBeat(n)
       \/ Drain(n) \/ Release(n) \/ ServeEnd(n) \/ ServeMark(n) \/ GetEnded(n) \/ WorkEnds(n)
       \/ ServeGhost(n) \/ DropGhost(n)

Spec == Init /\ [][Next]_vars

(*************************** Without a bound on runs ***********************)
(* TLC is shown what can make a difference, and not the numbers: so a run  *)
(* may have any number of terms, sessions and beats, and still there are   *)
(* finitely many states.  Of epochs only their order can be told: shown are*)
(* their ranks.  A sight counts if it is of the row's session at its latest*)
(* beat; if it is not, it never will be again, for numbers only grow and a *)
(* grant is a beat.  A term that is over, and is not the one in the row, is*)
(* never looked at again, nor is what its node was waiting for.  And nodes *)
(* with the same settings may change places: shown is how many there are in*)
(* which condition, and not who.                                           *)
(***************************************************************************)
Counts(n) == sight[n].s # None /\ sight[n].s = row.sess /\ (sight[n].b = BeatOf(row.sess) \/ Broken = "stale_read")
Latest(n) == phase[n] \in InTerm \/ (row.epoch # 0 /\ term[n].epoch = row.epoch)
\* Of work that is left the epoch makes a difference to instant takeovers only.
WorkOf(n) == IF Instant = {} THEN 0 ELSE work[n].epoch
\* The statement under way, and the ghost: 0 when there is none.
ShownTry(m) == IF m.k # "try" THEN 0 ELSE IF m.prev.sess = None THEN 1 ELSE IF m.prev.sess = row.sess /\ m.beat = BeatOf(row.sess) THEN 2 ELSE 3
ShownGhost(g) == IF g.s = None THEN 0 ELSE 1 + (IF g.m.f THEN 1 ELSE 0) + (IF g.s = row.sess THEN 2 ELSE 0) + (IF g.s = lock THEN 4 ELSE 0)
\* Broken rules that look at more have to be shown more.
More(n) ==
  CASE Broken \in {"no_chain", "own_by_node", "settled_dropped"} -> IF row.sess # None /\ Owner(row.sess) = n THEN 1 ELSE 0
    [] Broken = "own_by_session" -> (IF term[n].sess = row.sess THEN 1 ELSE 0) + (IF term[n].sess = Session(n) THEN 2 ELSE 0) + 4 * opens[n]
    [] OTHER -> 0
Literal == Broken \in {"grant_no_beat", "epoch_kept", "lost_commit"}
\* What is common, and the condition of each node.
Whole ==
  LET way == TLCEval([n \in Nodes |-> IF msg[n].k = "bump" THEN Way(n, msg[n].prev, msg[n].beat) ELSE ""])
      known == TLCEval([n \in Nodes |-> IF Latest(n) THEN term[n].epoch ELSE 0])
      numbers == TLCEval({0, row.epoch, past.top, past.issued} \cup {known[n] : n \in Nodes} \cup {WorkOf(n) : n \in Nodes} \cup {msg[n].epoch : n \in Nodes})
      Rank(e) == Cardinality({x \in numbers : x < e})
      Condition(n) == <<
        phase[n], live[n], age[n], dl[n], work[n].left, Rank(WorkOf(n)), n \in Odd, n \in Instant, Rank(known[n]),
        IF known[n] # 0 \/ way[n] = "own" THEN opens[n] ELSE 0,
        IF way[n] = "seen" \/ (way[n] = "" /\ Counts(n)) THEN sight[n].a ELSE -1,
        lock = Session(n), msg[n].k, msg[n].f, Rank(msg[n].epoch),
        way[n], IF way[n] \in {"seen", "unseen"} THEN WaitFor(msg[n].prev) ELSE 0,
        IF Apart THEN ShownTry(msg[n]) ELSE 0, ghost[n].m.k, IF Apart THEN ShownGhost(ghost[n]) ELSE 0, More(n)>>
  IN <<row.wait, row.clean, Rank(row.epoch), Rank(past.top), Rank(past.issued), past.dup,
       TLCEval([n \in Nodes |-> Condition(n)])>>
Shown ==
  IF Literal THEN vars
  ELSE LET whole == TLCEval(Whole)
           each == whole[7] IN
       <<whole[1], whole[2], whole[3], whole[4], whole[5], whole[6],
         {<<each[n], Cardinality({m \in Nodes : each[m] = each[n]})>> : n \in Nodes}>>

\* To see that Shown hides nothing that matters: the same without it, but with
\* bounds on all numbers, must come to the same verdicts (run.sh literal).
Bounded == \A n \in Nodes : ses[n] <= 2 /\ beat[n] <= 3

(****************************** Is it not empty? ***************************)
\* Each of these must be violated: what it denies can be reached.
NoThirdTerm == past.top < 3
NoChain == \A n \in Nodes : ~(phase[n] = "leader" /\ opens[n] > 0 /\ row.wait > T(n))
NoCleanHandover == ~\E n, m \in Nodes : n # m /\ phase[n] = "standby" /\ Open(m) /\ term[m].epoch = term[n].epoch + 1 /\ dl[m] = G(m)
NoLateWork == ~\E n \in Nodes : phase[n] = "standby" /\ Leftover(n)
NoUnheard == ~\E n \in Nodes : row.sess # None /\ Owner(row.sess) = n /\ phase[n] = "standby" /\ 0 < term[n].epoch /\ term[n].epoch < row.epoch
=============================================================================
