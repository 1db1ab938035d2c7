"""The parameters a local chain starts from, checked on construction; a genesis file is this struct in TOML.

Amounts in a genesis are TAO; inside the chain they are whole rao (10^-9 TAO).
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from subnet.errors import ConfigError

RAO_PER_TAO = 1_000_000_000


def to_rao(tao: float) -> int:
    return round(tao * RAO_PER_TAO)


def _check(ok: bool, key: str, value: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"genesis: {key} = {value!r} is not allowed", hint=f"allowed: {allowed}")


class GenesisNeuron(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Somebody who is registered, and may hold stake and so a permit, from block 0."""

    hotkey: str
    coldkey: str
    stake: float = 0.0


class SubnetGenesis(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One subnet's rules. The defaults are those of a local swarm; :data:`REALISTIC_GENESIS` has a real network's."""

    netuid: int = 1
    owner_hotkey: str = "5FP6LeoMf1HQznLNZgGtwPL71aLNZwsFjWuk9zQQ6r562TkA"
    """Registered as uid 0, the sink for burned weight. The default is the well-known development key ``//Owner//hot``;
    empty: nobody owns the subnet."""
    owner_coldkey: str = "5FTyuyEQQZs8tCcPTUFqotkm2SYfDnpefn9FitRgmTHnFDBD"
    tempo: int = 20
    immunity_period: int = 200
    max_uids: int = 256
    min_non_immune_uids: int = 0
    """Below this many slots past immunity the newest comers are replaced instead."""
    min_allowed_weights: int = 1
    weights_rate_limit: int = 10
    weights_version_key: int = 0
    serving_rate_limit: int = 0
    max_validators: int = 64
    activity_cutoff: int = 5000
    """Blocks after which a validator that set no weights no longer counts."""
    commit_reveal: bool = False
    """Weights are committed, and revealed by the chain ``reveal_period`` tempos later."""
    reveal_period: int = 1
    kappa: float = 32_767 / 65_535
    """Part of the stake that must back a weight, else it is clipped."""
    bonds_moving_average: float = 0.9
    bonds_penalty: float = 1.0
    yuma3: bool = False
    liquid_alpha: tuple[float, float, float] | None = None
    """Lowest and highest share of a new bond, and steepness (Yuma 3 only)."""
    owner_permit: bool = False
    """The owner validates whatever its stake, as on newer runtimes."""
    emission_per_block: float = 1.0
    """What the subnet pays out, in its own token: the owner's cut first, then half to miners, half to validators."""
    owner_cut: float = 11_796 / 65_535
    registration_allowed: bool = True
    registration_cost: float = 1.0
    max_registrations_per_block: int = 1024
    mechanisms: int = 1
    neurons: tuple[GenesisNeuron, ...] = ()

    def __post_init__(self) -> None:
        _check(1 <= self.netuid <= 4095, "netuid", self.netuid, "1 to 4095")
        _check(1 <= self.tempo <= 65_535, "tempo", self.tempo, "1 to 65535")
        _check(1 <= self.max_uids <= 65_535, "max_uids", self.max_uids, "1 to 65535")
        _check(1 <= self.mechanisms <= 16, "mechanisms", self.mechanisms, "1 to 16")
        for key in ("immunity_period", "min_non_immune_uids", "min_allowed_weights", "weights_rate_limit",
                    "weights_version_key", "serving_rate_limit", "max_validators", "activity_cutoff",
                    "registration_cost", "max_registrations_per_block", "emission_per_block"):  # fmt: skip
            _check(getattr(self, key) >= 0, key, getattr(self, key), "0 or more")
        _check(1 <= self.reveal_period <= 100, "reveal_period", self.reveal_period, "1 to 100")
        for key in ("kappa", "bonds_moving_average", "bonds_penalty", "owner_cut"):
            _check(0 <= getattr(self, key) <= 1, key, getattr(self, key), "0 to 1")
        hotkeys = [neuron.hotkey for neuron in self.neurons]
        hotkeys += [self.owner_hotkey] if self.owner_hotkey and self.owner_hotkey not in hotkeys else []
        _check(len(set(hotkeys)) == len(hotkeys), "neurons", len(hotkeys), "each hotkey once")
        _check(len(hotkeys) <= self.max_uids, "neurons", len(hotkeys), f"at most max_uids = {self.max_uids}")


class Genesis(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole chain's start."""

    block_time_s: float = 1.0
    allow_loopback_addresses: bool = True
    stake_threshold: float = 0.0
    """TAO below which a hotkey gets no permit and sets no weights, on every subnet."""
    faucet: float = 0.0
    """TAO that any account may take once in all; 0 switches the faucet off."""
    balances: dict[str, float] = {}
    """TAO by coldkey address."""
    subnets: tuple[SubnetGenesis, ...] = (SubnetGenesis(),)

    def __post_init__(self) -> None:
        _check(0.01 <= self.block_time_s <= 3600, "block_time_s", self.block_time_s, "0.01 to 3600")
        _check(self.stake_threshold >= 0, "stake_threshold", self.stake_threshold, "0 or more")
        _check(self.faucet >= 0, "faucet", self.faucet, "0 or more")
        _check(all(v >= 0 for v in self.balances.values()), "balances", self.balances, "amounts of 0 or more")
        netuids = [subnet.netuid for subnet in self.subnets]
        _check(len(set(netuids)) == len(netuids) >= 1, "subnets", netuids, "at least one, each netuid once")


DEFAULT_LOCAL_GENESIS = Genesis(faucet=100_000.0)
"""A swarm on one machine: 1-second blocks, tempo 20, rate limit 10, loopback addresses, funds for the asking."""

REALISTIC_GENESIS = Genesis(
    block_time_s=12.0,
    allow_loopback_addresses=False,
    stake_threshold=1000.0,
    subnets=(
        SubnetGenesis(
            tempo=360,
            immunity_period=4096,
            min_non_immune_uids=10,
            min_allowed_weights=8,
            weights_rate_limit=100,
            serving_rate_limit=50,
            max_validators=128,
            max_registrations_per_block=1,
            commit_reveal=True,
        ),
    ),
)
"""The paces, refusals and sealed weights of a real network."""


def load_genesis(path: Path) -> Genesis:
    """Read a genesis file; whatever is wrong with it is said in one line."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        return msgspec.convert(table, Genesis)
    except FileNotFoundError:
        raise ConfigError(f"there is no genesis file {path}") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"genesis file {path}: {error}") from error
