"""The simulator: it runs the product's own machines with virtual time and seeded randomness.

It is a development tool, and not part of the installed product. `docs/testing.md` explains it.

    cli, swarm, report, coverage   run many seeds on all cores, and report what they covered
    run, schedule, shrink          one seed: its schedule, its verdict, a shorter schedule
    scenario, scenario_commands, milestones
                                   the scenarios of docs/scenarios.md, step by step
    faults/                        the kinds of faults
    cluster/                       clients, servers, storages, ZooKeeper and operators
    guarantees/                    the guarantees, checked from outside the machines
    world/                         virtual time, randomness, network, disks, processes
"""
