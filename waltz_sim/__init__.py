"""The simulator: the product's own machines in a world of virtual time and seeded chance.

It is a tool of development and no part of the installed product. `docs/testing.md` explains it.

    cli, swarm, report, coverage   many seeds on all cores, and what they covered
    run, schedule, shrink          one seed: what it is made of, what came of it, a shorter one
    stage, scenario, telling       stories that are told step by step, for the scenario table
    faults/                        what can go wrong
    cluster/                       clients, servers, storages, ZooKeeper and operators
    promises/                      what must hold, checked from outside
    world/                         virtual time, chance, network, disks, processes
"""
