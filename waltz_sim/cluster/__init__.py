"""Who lives in a simulated world: clients, servers, storages, ZooKeeper, operators."""
