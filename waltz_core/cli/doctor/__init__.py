"""`waltz-core doctor`: probe a cluster and print what is wrong, with commands to repair it."""
