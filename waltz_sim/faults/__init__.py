"""What can go wrong: `kinds` lists all faults, the other files do them."""
