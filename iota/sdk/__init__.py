"""The model builder's side of a swarm as a few lines of Python; the public names are those of :mod:`iota`."""
