------------------------------ MODULE GateTrace -----------------------------
(***************************************************************************)
(* Is a recorded history of real elections one that Gate allows?           *)
(*                                                                         *)
(* History.tla is written by tests/support/gate_trace.py: what each node   *)
(* sent and heard, ordered by the clock, in milliseconds.  It does not say *)
(* what the server did: a statement counts as executed when it was sent (a *)
(* try, when it was answered), and TLC finds out when sessions must have   *)
(* ended.  A node that has lost its session says when nothing is left of   *)
(* its work (quiet).  Judged are the decisions that the promise rests on:  *)
(* no gate opens earlier, nor stays open longer, than Gate allows; no term *)
(* is called settled, and no release clean, that is not; no epoch differs. *)
(* (A look may count for nothing: a standby's own beats, of which Gate     *)
(* knows nothing, can make it worthless.)                                  *)
(*                                                                         *)
(* TLC must find Refused violated: then the whole history was explained.   *)
(* If it ends without, the history is refused, and what was printed last   *)
(* tells where.                                                            *)
(***************************************************************************)
EXTENDS Gate, Sequences, History

VARIABLES i, now
both == <<vars, i, now>>
Recorded == Either(Node(1000, 1500, 1), Node(1000, 1500, 1))     \* as in gate_trace.py
ASSUME ~Apart /\ TLCSet(1, 0)

E == History[i]
Is(what) == i <= Len(History) /\ now = E.t /\ E.a = what
\* What is sent on a session that the server has ended goes nowhere.
Nowhere == ~live[E.n] /\ UNCHANGED vars

\* A try that did not win shows what the row says.  The lock was held when the
\* server executed it, but may be free by the time that the answer is noted.
Looks(n) ==
  /\ live[n] /\ phase[n] = "standby" /\ msg[n].k = "none"
  /\ New(n) /\ Saw(n, Look)
  /\ UNCHANGED <<lock, row, beat, live, ghost, ses, msg, phase, age, dl, opens, term, work, past>>

Heard ==
  /\ \/ Is("open") /\ OpenSession(E.n)
     \/ Is("look") /\ (Looks(E.n) \/ UNCHANGED vars)
     \/ Is("won") /\ lock = None /\ ServeTry(E.n)
     \/ Is("bump") /\ (ServeBump(E.n) \/ Nowhere)
     \/ Is("bumped") /\ msg[E.n].epoch = E.epoch /\ GetBump(E.n) /\ opens'[E.n] <= E.opens + 1 /\ dl'[E.n] >= E.deadline - 1
     \/ Is("beat") /\ (E.settled => opens[E.n] <= 1) /\ (ServeBeat(E.n) \/ Nowhere)
     \/ Is("beaten") /\ GetBeat(E.n) /\ dl'[E.n] >= E.deadline - 1
     \/ Is("drain") /\ (IF Open(E.n) /\ live[E.n] THEN Drain(E.n) ELSE UNCHANGED vars)
     \/ Is("end") /\ ((Release(E.n) /\ (E.clean => row'.clean)) \/ Nowhere)
     \/ Is("ended") /\ UNCHANGED vars
     \/ Is("quiet") /\ (IF Leftover(E.n) THEN WorkEnds(E.n) ELSE UNCHANGED vars)
     \/ Is("lost") /\ Abandon(E.n)
  /\ i' = i + 1 /\ now' = now

\* Milliseconds pass until the next thing that was heard.
Passes == i <= Len(History) /\ now < E.t /\ Pass(E.t - now) /\ now' = E.t /\ i' = i
Server == i <= Len(History) /\ (\E n \in Nodes : lock = Session(n) /\ Drop(n)) /\ UNCHANGED <<i, now>>

TraceSpec == Init /\ i = 1 /\ now = 0 /\ [][Heard \/ Passes \/ Server]_both

Refused == i <= Len(History)
Far == IF i > TLCGet(1) THEN TLCSet(1, i) /\ PrintT(<<"explained", i - 1, "of", Len(History)>>) ELSE TRUE
=============================================================================
