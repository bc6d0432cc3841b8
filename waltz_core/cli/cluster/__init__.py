"""`waltz-core cluster`: create, show and change a cluster."""
