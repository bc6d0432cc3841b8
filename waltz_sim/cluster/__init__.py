"""The parts of a simulated cluster: clients, servers, storages, ZooKeeper, operators."""
