"""Checkers for the guarantees of Waltz, with one file for each subject.

    checker_state
                the state that all checkers share: the reference history, the counters, and failures
    replica_guarantees
                3 PromiseMono, 4 SingleWriter, 7 GateCAS2 (on disk), 9 NoCutCommitted, 10 LwmFull,
                21 NoRotServed (of storages), 22 Identity, 23 LogMatching, 24 Fixed
    session_guarantees
                2 AckQuorum, 4 SingleWriter, 5 FenceFirst, 6 DecisionCovers, 8 EngagedOnly,
                20 MetaShape
    response_guarantees
                7 GateCAS2 (to clients), 15 HwmMono, 21 NoRotServed (of servers), stale marks,
                flush, rows that overtake a lost row
    outcome_guarantees
                1 AckUnique, 11 OutcomeTruth, 12 AtMostOnce, 13 Dense, 14 ClientPrefix, 15 HwmMono,
                16 NotAhead, 17 LockSerial and Serializable, dependent appends, commit stamps
    lock_guarantees
                18 LockBound, 19 ReserveHeld
    archive_guarantees
                28 Archived, 29 ArchiveMono, 30 StartBound, 31 NoTrustedReset
    limit_guarantees
                26 Bounded
    required_states
                27 Sometimes
    history     the reference history of a run
    ledger      the state of the simulated applications
    data_loss_budget
                which losses of data the model allows

The numbers and names are those of docs/design/correctness.md 3.2. 25 Converged is checked in
`checkers.Checks.check_final_state`.

Rules:
    1. A checker reads messages, disks and the data in ZooKeeper. It never reads a machine's own
       view of its state.
    2. A checker changes nothing and draws no random numbers, so a run is the same without it.
"""
