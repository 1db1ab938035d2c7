"""``iota doctor``: whether this machine, its wallet, the network and a store are fit for a role, and what to do where not."""
