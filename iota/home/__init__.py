"""A miner at home: its identity, the run that fits its card, a settings file, one process a GPU, a unit, and a clean end."""
