"""The simulated environment: time, randomness, network, disks and processes."""
