"""The simulator: the project's own machines in a world of virtual time and seeded chance."""
