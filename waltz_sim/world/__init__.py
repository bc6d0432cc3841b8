"""The machine that is simulated: its time and chance, its network, disks and processes."""
