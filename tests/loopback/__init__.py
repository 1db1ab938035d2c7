"""A Subtensor node for tests on loopback: real metadata, real SCALE, real signatures. See README.md for what it isn't."""
