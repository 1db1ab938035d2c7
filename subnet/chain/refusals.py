"""Every way the chain says no: its own error name, a plain reason, and what to do about it.

The names are those of the real runtime, so that an operator finds them in its documentation and the same code
handles the local chain and the real one. A name that isn't in :data:`CHAIN_ERRORS` isn't a chain refusal.
"""

from __future__ import annotations

from typing import NamedTuple

from subnet.errors import IotaError


class _Text(NamedTuple):
    reason: str
    hint: str


CHAIN_ERRORS: dict[str, _Text] = {
    # the transaction pool, before anything is dispatched
    "BadProof": _Text("the signature doesn't fit the signer and the payload", "sign with the key named as signer"),
    "Stale": _Text("this nonce was used already", "read the account's nonce and sign anew"),
    "Future": _Text("this nonce is ahead of the account's", "read the account's nonce and sign anew"),
    "AncientBirthBlock": _Text(
        "signed for another chain, or too long ago", "the chain was made anew, or the call waited: sign anew"
    ),
    "Payment": _Text("the account can't pay the fee", "put funds on the account that signs"),
    "PriorityTooLow": _Text("another call with this nonce waits already", "wait a block, then try again"),
    "AlreadyImported": _Text("the node has this very call already", "wait a block, then read what the chain stores"),
    "ExhaustsResources": _Text("the block is full", "wait a block, then try again"),
    "BadRequest": _Text("the node's pool took the call for invalid", "try once more; then check iota doctor --chain"),
    "Dropped": _Text("the node dropped the call from its pool", "wait a block, then try again"),
    "Usurped": _Text("another call with this nonce took its place", "does another process sign with this key?"),
    "Invalid": _Text("the node's pool found the call invalid after taking it", "wait a block, then sign anew"),
    "Retracted": _Text("the block with the call was replaced by another", "read what the chain stores, then try again"),
    "RateLimitExceeded": _Text("a call of this kind was made a short while ago", "wait for the rate limit"),
    "StakeAmountTooLow": _Text("the stake is below what the call needs", "add stake to the hotkey"),
    # set_weights, in the order the runtime checks
    "CommitRevealEnabled": _Text(
        "the subnet wants weights committed first, then revealed", "use the commit-reveal call, or switch it off"
    ),
    "CommitRevealDisabled": _Text("the subnet takes weights in the open", "set them without a commit"),
    "CommittingWeightsTooFast": _Text("weights were committed a short while ago", "wait for the rate limit"),
    "IncorrectCommitRevealVersion": _Text("the chain speaks another version of commit-reveal", "update this software"),
    "TooManyUnrevealedCommits": _Text("ten commits wait for their reveal", "wait until the chain has revealed one"),
    "InvalidRevealRound": _Text("the reveal round is over already", "set this machine's clock; check the block time"),
    "CanNotSetRootNetworkWeights": _Text("weights can't be set on netuid 0", "name your subnet with --netuid"),
    "WeightVecNotEqualSize": _Text("uids and values differ in length", "give one value per uid"),
    "SubnetNotExists": _Text("there is no such subnet", "check --netuid"),
    "MechanismDoesNotExist": _Text("the subnet has no such mechanism", "mechanisms count from 0"),
    "UidsLengthExceedUidsInSubNet": _Text("more weights than neurons", "read the metagraph again"),
    "HotKeyNotRegisteredInSubNet": _Text("the hotkey isn't registered in the subnet", "register it first"),
    "NotEnoughStakeToSetWeights": _Text("the hotkey's stake is below the threshold", "add stake to the hotkey"),
    "IncorrectWeightVersionKey": _Text("the version key is older than the subnet's", "update this software"),
    "SettingWeightsTooFast": _Text("weights were set a short while ago", "wait for the rate limit"),
    "NeuronNoValidatorPermit": _Text(
        "the neuron holds no validator permit", "permits go to the largest stakes once per tempo: add stake and wait"
    ),
    "DuplicateUids": _Text("a uid appears twice", "give one weight per uid"),
    "UidVecContainInvalidOne": _Text("a uid doesn't exist", "read the metagraph again"),
    "WeightVecLengthIsLow": _Text(
        "too few weights above zero", "the subnet's min_allowed_weights asks for more uids; its owner can lower it"
    ),
    "MaxWeightExceeded": _Text("one weight is above the subnet's limit", "spread the weights"),
    # registration
    "RegistrationNotPermittedOnRootSubnet": _Text("nobody registers on netuid 0 this way", "name your subnet"),
    "SubNetRegistrationDisabled": _Text("the subnet takes no registrations", "ask its owner"),
    "TooManyRegistrationsThisBlock": _Text("the block is full of registrations", "try again in the next block"),
    "HotKeyAlreadyRegisteredInSubNet": _Text("the hotkey is registered already", "nothing to do"),
    "NotEnoughBalanceToStake": _Text("the coldkey's balance is too low", "put funds on the coldkey"),
    "NonAssociatedColdKey": _Text("the hotkey belongs to another coldkey", "sign with the coldkey that owns it"),
    "NoNeuronIdAvailable": _Text("the subnet is full and nobody can be replaced", "try again later"),
    # stake and local funds
    "HotKeyAccountNotExists": _Text("the hotkey is unknown to the chain", "register it first"),
    "AmountTooLow": _Text("the amount is too low", "give an amount above zero"),
    "FaucetDisabled": _Text("the faucet is off or has given its share", "put funds on the coldkey in the genesis file"),
    # serving and commitments
    "HotKeyNotRegisteredInNetwork": _Text("the hotkey isn't registered on any subnet", "register it first"),
    "InvalidIpType": _Text("not an IP address", "give an IPv4 or IPv6 address, not a host name"),
    "InvalidIpAddress": _Text("An invalid IP address", "announce an address that others can reach"),
    "InvalidPort": _Text("not a port", "ports go from 1 to 65535"),
    "ServingRateLimitExceeded": _Text("the address was announced a short while ago", "wait for the rate limit"),
    "AccountNotAllowedCommit": _Text("only registered hotkeys may commit", "register the hotkey first"),
    "TooManyFieldsInCommitmentInfo": _Text("a commitment holds 1 to 512 bytes", "commit a hash or an address"),
    "SpaceLimitExceeded": _Text("3100 bytes of commitments in this tempo", "wait for the next tempo"),
}


class ChainRefused(IotaError):
    """The chain said no. ``code`` is the chain's own error name; ``retry_after_s`` is None where waiting can't help."""

    http_status = 422

    def __init__(self, code: str, reason: str = "", *, hint: str = "", retry_after_s: float | None = None) -> None:
        text = CHAIN_ERRORS.get(code, _Text("the chain refused", ""))
        super().__init__(f"{code}: {reason or text.reason}", hint=hint or text.hint, retry_after_s=retry_after_s)
        self.code = code
        self.retryable = retry_after_s is not None
        self.retry_after_s = retry_after_s
