"""The storage daemon: its ports, its registration in ZooKeeper, its metrics and its shutdown."""
