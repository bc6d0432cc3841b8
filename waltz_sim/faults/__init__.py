"""Fault injection: `kinds` lists all faults, the other files implement them."""
