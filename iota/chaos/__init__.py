"""Faults on a swarm by a seeded plan, with a journal of what was done and a verdict."""
