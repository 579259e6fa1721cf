-------------------------------- MODULE Fence -------------------------------
(***************************************************************************)
(* The fence of pgleaderlock (docs/fence.md): no write of an older epoch   *)
(* commits after a newer epoch began, that is, after its bump has          *)
(* committed.                                                              *)
(*                                                                         *)
(* One role, one database; no clock at all.  Writers are transactions of   *)
(* whoever holds a token, of any age, at READ COMMITTED ("RC") or with one *)
(* snapshot for the transaction ("SI": REPEATABLE READ and SERIALIZABLE).  *)
(* Bumpers are the transactions that raise the epoch: `bump` of whoever won*)
(* the role's lock, `advance_epoch` of an operator; nothing but the fence  *)
(* keeps two of them apart here.                                           *)
(*                                                                         *)
(* What is taken from PostgreSQL:                                          *)
(*  - the advisory key: shared or exclusive, to the transaction's end, or  *)
(*    to a rollback to an older savepoint; a fair queue;                   *)
(*  - at RC each statement has a snapshot of its own, taken when it begins,*)
(*    so a statement that waits for a lock reads what there was before;    *)
(*  - at SI the first statement's snapshot serves all; FOR KEY SHARE waits *)
(*    for an uncommitted change of the key, fails (40001) if the key has   *)
(*    changed since the snapshot, and lets no change of it through until   *)
(*    the end; it has nothing against other changes of the row (the        *)
(*    heartbeat that settles a term), which therefore are not modelled;    *)
(*  - a commit is visible first, and gives its locks back then.            *)
(* A transaction may be rolled back at any moment: errors, time-outs       *)
(* (idle_in_transaction_session_timeout), the end of a session, a crash.   *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, Sequences, TLC

CONSTANTS
  Writers,      \* model values
  Bumpers,      \* model values
  Levels,       \* isolation levels of the writers: a subset of {"RC", "SI"}
  MaxEpoch,     \* bumps in a run; 0: no bound (needs VIEW Shown)
  None,
  Broken        \* the rule that is broken: see Rules; "none" is the fence

Rules == {
  "none",
  "no_shared",        \* writers take no key: a plain look before the write
  "no_exclusive",     \* the bump takes no key
  "read_first",       \* RC: key and epoch in one statement, whose snapshot is older than the grant
  "plain_si",         \* SI: the epoch is read without FOR KEY SHARE
  "no_key",           \* SI: the epoch is part of no key, so FOR KEY SHARE has nothing against its change
  "no_compare",       \* the key is taken, the epoch is not compared
  "early_unlock",     \* the writer gives the key back before it commits
  "bump_unlock",      \* the bump does
  "savepoint",        \* writes go on after a rollback to a savepoint older than the fence, and no trigger asks
  "trust_note",       \* the trigger of a fenced table believes the note and does not fence again
  "bump_read_first",  \* the bump reads the epoch before it has the key
  "unfair"}           \* sharers pass an exclusive one that waits: safe, and starves the bump

ASSUME Broken \in Rules

VARIABLES
  epoch,    \* of the role's row, as committed
  shared,   \* who has the key shared
  excl,     \* who has it exclusively, or None
  queue,    \* who waits for it, in the order in which they came
  held,     \* who has the row FOR KEY SHARE
  changing, \* who has changed the row and not committed, or None
  w,        \* of each writer: pc, level, token's epoch, snapshot, writes and not fenced
  b,        \* of each bumper: pc, new epoch
  late,     \* a write of an older epoch was committed after a newer one began
  dup,      \* an epoch was issued twice
  lied      \* an RC writer with the current epoch was refused

vars == <<epoch, shared, excl, queue, held, changing, w, b, late, dup, lied>>

Away == [pc |-> "away", level |-> "RC", token |-> 0, snap |-> 0]
AtRest == [pc |-> "rest", new |-> 0]

Init ==
  /\ epoch = 2            \* so that there is a stale token from the beginning
  /\ shared = {}
  /\ excl = None
  /\ queue = <<>>
  /\ held = {}
  /\ changing = None
  /\ w = TLCEval([x \in Writers |-> Away])
  /\ b = TLCEval([x \in Bumpers |-> AtRest])
  /\ late = FALSE
  /\ dup = FALSE
  /\ lied = FALSE

(***************************** What is promised ****************************)
\* No write of an older epoch commits after a newer epoch began.
NoLateCommit == ~late
\* The same from inside: from its fence until its end, no newer epoch begins.
Inside == \A x \in Writers : w[x].pc \in {"fenced", "wrote"} => w[x].token = epoch
Epochs == ~dup
\* At READ COMMITTED the answer is definite.
Definite == ~lied
Types ==
  /\ excl = None \/ shared = {}
  /\ \A x \in Writers : w[x].pc \in {"away", "begun", "asking", "locked", "fenced", "wrote", "bare", "bare_wrote", "done"}
  /\ \A x \in Bumpers : b[x].pc \in {"rest", "asking", "locked", "changed", "done"}
  /\ \A x \in Writers : x \in shared => w[x].pc \in {"locked", "fenced", "wrote", "done"}
  /\ Len(queue) = Cardinality({x \in Writers : w[x].pc = "asking"} \cup {x \in Bumpers : b[x].pc = "asking"})

(****************************** The advisory key ***************************)
Waiting(q) == {q[i] : i \in 1..Len(q)}
Without(q, x) == SelectSeq(q, LAMBDA y : y # x)
\* May the one at place i be served?  Fair: only if nobody who came earlier waits.
MayHave(i) ==
  /\ i = 1 \/ Broken = "unfair"
  /\ excl = None
  /\ queue[i] \in Bumpers => shared = {}
  \* Several sharers at the head are all served, one after the other.

Grant ==
  \E i \in 1..Len(queue) :
    /\ MayHave(i)
    /\ LET x == queue[i] IN
       /\ queue' = Without(queue, x)
       /\ IF x \in Writers
          THEN /\ shared' = shared \cup {x}
               /\ w' = [w EXCEPT ![x].pc = "locked"]
               /\ UNCHANGED <<excl, b>>
          ELSE /\ excl' = x
               /\ b' = [b EXCEPT ![x].pc = "locked"]
               /\ UNCHANGED <<shared, w>>
  /\ UNCHANGED <<epoch, held, changing, late, dup, lied>>

(******************************** A writer *********************************)
Begin(x) ==
  /\ w[x].pc = "away"
  /\ \E level \in Levels, token \in 1..epoch :
       w' = [w EXCEPT ![x] = [pc |-> "begun", level |-> level, token |-> token, snap |-> 0]]
  /\ UNCHANGED <<epoch, shared, excl, queue, held, changing, b, late, dup, lied>>

\* The first statement of the transaction: the caller's own, or the fence.
Snapshot(x) ==
  /\ w[x].pc = "begun" /\ w[x].level = "SI" /\ w[x].snap = 0
  /\ w' = [w EXCEPT ![x].snap = epoch]
  /\ UNCHANGED <<epoch, shared, excl, queue, held, changing, b, late, dup, lied>>

\* fence(): its first statement asks for the key.
Ask(x) ==
  /\ w[x].pc \in {"begun", "bare"}
  /\ w[x].level = "SI" => w[x].snap # 0
  /\ IF Broken = "no_shared"
     THEN w' = [w EXCEPT ![x].pc = "locked"] /\ UNCHANGED queue
     ELSE /\ w' = [w EXCEPT ![x].pc = "asking",
                            ![x].snap = IF Broken = "read_first" /\ w[x].level = "RC" THEN epoch ELSE @]
          /\ queue' = Append(queue, x)
  /\ UNCHANGED <<epoch, shared, excl, held, changing, b, late, dup, lied>>

LetGo(x) == /\ shared' = shared \ {x}
            /\ held' = held \ {x}
            /\ queue' = Without(queue, x)

\* fence(): its second statement reads the epoch and compares.
Read(x) ==
  /\ w[x].pc = "locked"
  /\ LET si == w[x].level = "SI"
         keyed == si /\ Broken \notin {"plain_si", "no_key"}
         seen == IF si \/ Broken = "read_first" THEN w[x].snap ELSE epoch
         ok == (seen = w[x].token \/ Broken = "no_compare") /\ (keyed => w[x].snap = epoch) IN
     /\ keyed => changing = None                          \* else it waits
     /\ IF ok
        THEN /\ w' = [w EXCEPT ![x].pc = "fenced"]
             /\ held' = IF keyed THEN held \cup {x} ELSE held
             /\ UNCHANGED <<shared, queue, lied>>
        ELSE /\ w' = [w EXCEPT ![x] = Away]               \* refused: rolled back
             /\ LetGo(x)
             /\ lied' = (lied \/ (~si /\ w[x].token = epoch))
  /\ UNCHANGED <<epoch, excl, changing, b, late, dup>>

Write(x) ==
  /\ w[x].pc = "fenced"
  /\ w' = [w EXCEPT ![x].pc = "wrote"]
  /\ IF Broken = "early_unlock" THEN LetGo(x) ELSE UNCHANGED <<shared, queue, held>>
  /\ UNCHANGED <<epoch, excl, changing, b, late, dup, lied>>

\* ROLLBACK TO a savepoint older than the fence takes the fence back, and what
\* was written since; the transaction goes on.
RollBackTo(x) ==
  /\ w[x].pc \in {"fenced", "wrote"}
  /\ w' = [w EXCEPT ![x].pc = "bare"]
  /\ LetGo(x)
  /\ UNCHANGED <<epoch, excl, changing, b, late, dup, lied>>

\* A fenced table refuses what is written then: its trigger fences again.  The
\* note that it finds may be of anybody's making.
WriteBare(x) ==
  /\ Broken \in {"savepoint", "trust_note"}
  /\ w[x].pc = "bare" \/ (Broken = "trust_note" /\ w[x].pc = "begun")
  /\ w' = [w EXCEPT ![x].pc = "bare_wrote"]
  /\ UNCHANGED <<epoch, shared, excl, queue, held, changing, b, late, dup, lied>>

Commit(x) ==
  /\ w[x].pc \in {"wrote", "bare_wrote"}
  /\ late' = (late \/ w[x].token < epoch)
  /\ w' = [w EXCEPT ![x].pc = "done"]
  /\ UNCHANGED <<epoch, shared, excl, queue, held, changing, b, dup, lied>>

\* After its commit was visible; or instead of it, at any moment.
End(x) ==
  /\ w[x].pc # "away"
  /\ w' = [w EXCEPT ![x] = Away]
  /\ LetGo(x)
  /\ UNCHANGED <<epoch, excl, changing, b, late, dup, lied>>

(********************************* A bumper ********************************)
\* `bump` tries once without waiting, then queues up for a moment and may give
\* up: EndBump.
AskBump(x) ==
  /\ b[x].pc = "rest"
  /\ MaxEpoch = 0 \/ epoch < MaxEpoch
  /\ b' = [b EXCEPT ![x] = [pc |-> IF Broken = "no_exclusive" THEN "locked" ELSE "asking",
                            new |-> IF Broken = "bump_read_first" THEN epoch + 1 ELSE 0]]
  /\ queue' = IF Broken = "no_exclusive" THEN queue ELSE Append(queue, x)
  /\ UNCHANGED <<epoch, shared, excl, held, changing, w, late, dup, lied>>

\* A statement of its own: its snapshot is younger than the key.  The epoch is
\* part of a key of the row, so its change waits for whoever has it FOR KEY
\* SHARE, and for another change.
Change(x) ==
  /\ b[x].pc = "locked"
  /\ changing = None
  /\ held = {} \/ Broken = "no_key"
  /\ changing' = x
  /\ b' = [b EXCEPT ![x] = [pc |-> "changed", new |-> IF Broken = "bump_read_first" THEN @.new ELSE epoch + 1]]
  /\ excl' = IF Broken = "bump_unlock" THEN None ELSE excl
  /\ UNCHANGED <<epoch, shared, queue, held, w, late, dup, lied>>

\* The newer epoch begins.
CommitBump(x) ==
  /\ b[x].pc = "changed"
  /\ epoch' = b[x].new
  /\ dup' = (dup \/ b[x].new <= epoch)
  /\ changing' = None
  /\ b' = [b EXCEPT ![x].pc = "done"]
  /\ UNCHANGED <<shared, excl, queue, held, w, late, lied>>

EndBump(x) ==
  /\ b[x].pc # "rest"
  /\ b' = [b EXCEPT ![x] = AtRest]
  /\ queue' = Without(queue, x)
  /\ excl' = IF excl = x THEN None ELSE excl
  /\ changing' = IF changing = x THEN None ELSE changing
  /\ UNCHANGED <<epoch, shared, held, w, late, dup, lied>>

Next ==
  \/ Grant
  \/ \E x \in Writers : \/ Begin(x) \/ Snapshot(x) \/ Ask(x) \/ Read(x) \/ Write(x)
                        \/ RollBackTo(x) \/ WriteBare(x) \/ Commit(x) \/ End(x)
  \/ \E x \in Bumpers : AskBump(x) \/ Change(x) \/ CommitBump(x) \/ EndBump(x)

Spec == Init /\ [][Next]_vars

(***************************** Nobody starves ******************************)
\* Every transaction that has begun ends some day, and whoever may go on does;
\* only a bumper never gives up.  Then a bump that waits is served.
Ends(x) == w[x].pc \in {"locked", "fenced", "wrote", "bare", "bare_wrote", "done"} /\ End(x)
Live == /\ Spec
        /\ WF_vars(Grant)
        /\ \A x \in Writers : WF_vars(Ends(x))
        /\ \A x \in Bumpers : WF_vars(Change(x)) /\ WF_vars(CommitBump(x)) /\ WF_vars(b[x].pc = "done" /\ EndBump(x))
Served == \A x \in Bumpers : b[x].pc = "asking" ~> b[x].pc # "asking"

(*************************** Without a bound on runs ***********************)
\* Of an epoch it can only be told whether it is the current one, and of a
\* snapshot and a token whether they are the same: a token that is stale when
\* its transaction begins equals nothing that comes later.  Who is who among
\* writers, and among bumpers, makes no difference.
Kind(e) == IF e = 0 THEN 0 ELSE IF e < epoch THEN 1 ELSE e - epoch + 2
Place(x) == IF x \in Waiting(queue) THEN CHOOSE i \in 1..Len(queue) : queue[i] = x ELSE 0
OfWriter(x) == <<w[x].pc, w[x].level, Kind(w[x].token), Kind(w[x].snap), w[x].snap = w[x].token, x \in shared, x \in held, Place(x)>>
OfBumper(x) == <<b[x].pc, Kind(b[x].new), excl = x, changing = x, Place(x)>>
Shown == LET writers == [x \in Writers |-> OfWriter(x)]
             bumpers == [x \in Bumpers |-> OfBumper(x)] IN
  <<late, dup, lied,
    {<<writers[x], Cardinality({y \in Writers : writers[y] = writers[x]})>> : x \in Writers},
    {<<bumpers[x], Cardinality({y \in Bumpers : bumpers[y] = bumpers[x]})>> : x \in Bumpers}>>

(****************************** Is it not empty? ***************************)
\* Each of these must be violated: what it denies can be reached.
NoCommit == \A x \in Writers : w[x].pc # "done"
NoSecondBump == epoch < 4
NoStaleAsker == ~\E x \in Writers : w[x].pc = "locked" /\ w[x].token < epoch
NoneBehindBump == ~\E x \in Writers, y \in Bumpers : w[x].pc = "asking" /\ b[y].pc = "changed" /\ w[x].token = epoch
NoSharers == Cardinality(shared) < 2
=============================================================================
