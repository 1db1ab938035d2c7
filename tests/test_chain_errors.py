"""Every exception of the two libraries becomes one of ours, at one border; pool errors have the runtime's names."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

from subnet.chain.pool_errors import (
    CUSTOM_ERRORS,
    SENTENCES,
    SIGN_ANEW,
    STATUSES,
    TRY_SOON,
    pool_error_name,
    refusal_named,
)
from subnet.chain.refusals import CHAIN_ERRORS, ChainRefused
from subnet.chain.subtensor_link import RuntimeMismatch
from subnet.errors import ConfigError, DeadlinePassed, InputError, IotaError, Unreachable


def exceptions(*modules: ModuleType) -> list[type[Exception]]:
    found: dict[str, type[Exception]] = {}
    for module in modules:
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, Exception) and kind.__module__.split(".")[0] == module.__name__.split(".")[0]:
                found[kind.__qualname__] = kind
    assert found
    return list(found.values())


def made(kind: type[Exception]) -> Exception:
    for arguments in (("it broke",), (), ("it broke", 0), ([],)):
        try:
            return kind(*arguments)
        except TypeError:
            continue
    raise AssertionError(f"{kind} can't be made")


def test_each_exception_of_the_sdk_is_translated():
    from bittensor import result
    from bittensor._transport import errors

    from subnet.chain.bittensor_sdk import translate

    for kind in exceptions(result, errors):
        said = translate(made(kind), "ws://node", "reading")
        assert isinstance(said, (Unreachable, ChainRefused, RuntimeMismatch)), kind
        assert "\n" not in str(said)
        assert isinstance(said, RuntimeMismatch) == issubclass(kind, ValueError), kind


def test_the_sdks_codes_without_a_name_become_the_runtimes_names():
    from bittensor.result import ChainError, ErrorCode

    from subnet.chain.bittensor_sdk import PREFLIGHT_NAMES, translate

    for code in ErrorCode:
        said = translate(ChainError("no", code=code), "ws://node", "set_weights")
        if code.value in PREFLIGHT_NAMES:
            assert isinstance(said, ChainRefused)
            assert said.code == PREFLIGHT_NAMES[code.value]
            assert said.code in CHAIN_ERRORS
        else:
            assert isinstance(said, Unreachable), "no verdict"
    named = translate(ChainError("Not enough.", "SubtokenDisabled"), "ws://node", "x")
    assert isinstance(named, ChainRefused)
    assert str(named) == "SubtokenDisabled: Not enough."


def test_each_exception_of_substrate_interface_is_translated():
    substrateinterface = pytest.importorskip("substrateinterface", reason="pip install -e '.[chain]'")
    import scalecodec.exceptions
    import websocket

    from subnet.chain.substrate import translate

    known = exceptions(substrateinterface.exceptions, scalecodec.exceptions, websocket._exceptions)
    contracts = ("Contract", "Deploy", "ExtensionCall", "Configuration", "ExtrinsicFailed", "InvalidScaleType")
    for kind in known:
        if kind.__name__.startswith(contracts):
            continue  # of contracts and options that aren't used
        said = translate(made(kind), "ws://node", "reading")
        assert isinstance(said, IotaError), kind


def test_our_own_errors_pass_both_borders():
    from subnet.chain.bittensor_sdk import translate as of_sdk

    translators = [of_sdk]
    try:
        from subnet.chain.substrate import translate as of_substrate

        translators.append(of_substrate)
    except ImportError:
        pass
    for translate in translators:
        for own in (DeadlinePassed("late"), ChainRefused("Stale"), ConfigError("no"), InputError("no")):
            assert translate(own, "ws://node", "x") is None
        assert isinstance(translate(ConnectionRefusedError(111, "refused"), "ws://node", "x"), Unreachable)
        assert isinstance(translate(KeyError("SubtensorModule"), "ws://node", "x"), RuntimeMismatch)


@pytest.mark.parametrize(
    ("error", "name"),
    [
        ({"code": 1010, "message": "Invalid Transaction", "data": "Custom error: 6"}, "RateLimitExceeded"),
        ({"code": 1010, "message": "Invalid Transaction", "data": {"Custom": 19}}, "HotKeyNotRegisteredInSubNet"),
        ({"code": 1010, "message": "Invalid Transaction with custom error: 12"}, "ServingRateLimitExceeded"),
        ({"code": 1010, "message": "Invalid Transaction", "data": "Transaction is outdated"}, "Stale"),
        ({"code": 1014, "message": "Priority is too low: (1 vs 2)", "data": "..."}, "PriorityTooLow"),
        ({"code": 1013, "message": "Transaction Already Imported", "data": "..."}, "AlreadyImported"),
        ({"code": 1010, "message": "Invalid Transaction", "data": "Custom error: 200"}, None),
        ({"code": -32603, "message": "Internal error"}, None),
        ("Transaction has a bad signature", "BadProof"),
        (None, None),
    ],
)
def test_pool_refusals_have_the_runtimes_names(error, name):
    assert pool_error_name(error) == name


def test_every_name_that_can_come_has_words_for_it():
    names = {*CUSTOM_ERRORS.values(), *(name for _, name in SENTENCES), *STATUSES.values()}
    assert names <= set(CHAIN_ERRORS)
    assert not SIGN_ANEW & TRY_SOON
    assert refusal_named("Dropped", "", 12.0).retry_after_s == 12.0
    assert refusal_named("NeuronNoValidatorPermit", "", 12.0).retry_after_s is None
    unknown = refusal_named("SomethingNew", "The docs\nof it.", 12.0)
    assert str(unknown) == "SomethingNew: The docs of it."
