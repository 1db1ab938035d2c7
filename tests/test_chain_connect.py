"""The endpoint alone chooses the adapter; a wrong one is one line; the local chain needs neither SDK nor substrate-interface."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from subnet.chain.connect import connect_chain, register_command, resolve
from subnet.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("network", "endpoint", "adapter", "where"),
    [
        ("local", None, "LocalChain", "http://127.0.0.1:9944"),
        ("local", "http://127.0.0.1:1", "LocalChain", "http://127.0.0.1:1"),
        ("http://127.0.0.1:2", None, "LocalChain", "http://127.0.0.1:2"),
        ("local", "ws://127.0.0.1:3", "BittensorChain", "ws://127.0.0.1:3"),
        ("wss://node.example", None, "BittensorChain", "wss://node.example"),
        ("finney", None, "BittensorChain", "the SDK's"),
        ("finney", "wss://mine.example", "BittensorChain", "wss://mine.example"),
        ("test", "substrate+wss://mine.example", "SubstrateChain", "wss://mine.example"),
        ("substrate+test", None, "SubstrateChain", "the SDK's"),
    ],
)
async def test_the_endpoint_chooses_the_adapter(network, endpoint, adapter, where):
    if adapter == "SubstrateChain":
        pytest.importorskip("substrateinterface", reason="install the extra: pip install -e '.[chain]'")
    chain = connect_chain(network, endpoint)
    assert type(chain).__name__ == adapter
    at = chain.url if adapter == "LocalChain" else chain.link.endpoint
    assert at == (resolve(network.removeprefix("substrate+")) if where == "the SDK's" else where)
    await chain.close()


@pytest.mark.parametrize(
    ("network", "endpoint", "match"),
    [
        ("finney", "http://127.0.0.1:1", "URL of a local chain"),
        ("finny", None, "names no chain"),
        ("local", "ftp://127.0.0.1", "names no chain"),
        ("substrate+finny", None, "names no chain"),
    ],
)
def test_what_names_no_chain_is_one_line_with_what_would(network, endpoint, match):
    with pytest.raises(ConfigError, match=match) as caught:
        connect_chain(network, endpoint)
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def test_a_missing_library_is_said_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "substrateinterface", None)
    monkeypatch.delitem(sys.modules, "subnet.chain.substrate", raising=False)
    with pytest.raises(ConfigError, match="substrate-interface") as caught:
        connect_chain("substrate+ws://127.0.0.1:1")
    assert "iota-open[chain]" in caught.value.hint


def test_the_command_to_register_is_that_of_the_chain():
    assert register_command("local", None, 1, "me", "hot") == (
        "iota chain register --netuid 1 --wallet.name me --wallet.hotkey hot"
    )
    assert register_command("local", "http://127.0.0.1:7", 1, "me", "hot").endswith(
        "--subtensor.chain_endpoint http://127.0.0.1:7"
    )
    assert register_command("finney", None, 9, "me", "hot") == (
        "btcli subnets register --netuid 9 --network finney --wallet me --wallet-hotkey hot"
    )
    assert "--network wss://mine.example " in register_command("test", "substrate+wss://mine.example", 9, "a", "b")


def test_the_local_chain_needs_neither_the_sdks_client_nor_substrate_interface():
    code = (
        "import sys\n"
        "from subnet.chain.connect import connect_chain\n"
        "import subnet.chain.local_server, subnet.chain.subtensor\n"
        "connect_chain('local')\n"
        "print([m for m in ('substrateinterface', 'scalecodec', 'subnet.chain.bittensor_sdk',"
        " 'subnet.chain.substrate') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
