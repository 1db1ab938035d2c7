"""What a new user gets wrong is one line with the remedy and exit status 2: no traceback, nothing half-written."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from iota.cli.main import app, main
from subnet.protocol.messages import Hello
from subnet.protocol.signing import create_wallet
from subnet.words import PROTOCOL_VERSION

ROOT = Path(__file__).resolve().parent.parent
TEXT = "It is a way I have of driving off the spleen, and regulating the circulation. " * 200

RUN = """
[run]
name = "small"
steps = 2
[model.config]
model_type = "llama"
vocab_size = 300
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
max_position_embeddings = 64
[data]
sources = ["book.txt"]
sequence_length = 32
holdout_fraction = 0.1
[pipeline]
stages = 2
microbatches = 2
microbatch_rows = 2
"""


def failing(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Run a command that must fail as a person's mistake; its one line."""
    status = main([str(argument) for argument in arguments])
    error = capsys.readouterr().err
    assert status == 2, error
    lines = error.strip().splitlines()
    assert len(lines) == 1, error
    assert lines[0].startswith("error: ")
    assert "Traceback" not in error
    return lines[0]


def write_run(directory: Path, text: str = RUN, book: str | None = TEXT) -> Path:
    if book is not None:
        (directory / "book.txt").write_text(book)
    path = directory / "run.toml"
    path.write_text(text)
    return path


@contextmanager
def serving(answer: bytes, content_type: str) -> Iterator[str]:
    """A server that answers everything with the same bytes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def validator() -> Iterator[str]:
    """Somebody who says hello like a validator, and no more."""
    hello = Hello(PROTOCOL_VERSION, PROTOCOL_VERSION, 0, "5FP6LeoMf1HQznLNZgGtwPL71aLNZwsFjWuk9zQQ6r562TkA", 0, 0, None)
    with serving(msgspec.msgpack.encode(hello), "application/msgpack") as url:
        yield url


@pytest.fixture
def submit(tmp_path: Path, validator: str) -> list[str]:
    """``iota run submit`` with a wallet and a validator, but for the run file."""
    create_wallet("owner", "default", tmp_path / "wallets")
    flags = ["--wallet.name", "owner", "--wallet.path", str(tmp_path / "wallets")]
    return ["run", "submit", "--validator.url", validator, *flags, "--work-dir", str(tmp_path / "work")]


def left_in(directory: Path) -> list[str]:
    return (
        [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]
        if directory.exists()
        else []
    )


# ---- help


def test_help_is_quick_because_it_loads_nothing_heavy() -> None:
    heavy = ("torch", "bittensor", "transformers", "aiohttp", "matplotlib")
    code = f"import sys, iota.cli.main as m; m.main(['--help']); print([x for x in {heavy} if x in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip().endswith("[]")
    for command in ("demo", "up", "miner", "validator", "chain", "store", "wallet", "data", "plan", "run", "version"):
        assert command in done.stdout


def every_command(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from every_command(inner, (*words, name))


@pytest.mark.parametrize("words", list(every_command(typer.main.get_command(app))), ids=" ".join)
def test_every_command_has_help(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """A text with brackets is markup to what draws the help, and may end it."""
    try:
        status = main([*words, "--help"])
    except SystemExit as ended:  # of argparse, which the neurons' flags go through
        status = ended.code  # type: ignore[assignment]
    assert status == 0
    assert "usage" in capsys.readouterr().out.lower()


@pytest.mark.parametrize("script", ["neurons/miner.py", "neurons/validator.py"])
def test_neurons_run_as_scripts_with_every_subnets_flags(script: str) -> None:
    done = subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    for flag in (
        "--netuid",
        "--subtensor.network",
        "--wallet.name",
        "--wallet.hotkey",
        "--wallet.path",
        "--logging.debug",
    ):
        assert flag in done.stdout


def test_neurons_load_no_torch_before_they_start() -> None:
    code = "import sys, neurons.miner as m; m.main(['--wallet.path', '/nowhere']); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nope"], "No such command"),
        (["run", "submit"], "Missing argument"),
        (["run", "status", "--nope"], "No such option"),
        (["miner", "--nope", "1"], "--nope"),
        (["miner", "--peer.port", "70000"], "--peer.port = 70000"),
        (["miner", "--peer.announce_port", "-1"], "--peer.announce_port = -1"),
        (["miner", "--limit.graph_memory_gib", "0"], "graph_memory_bytes"),
        (["validator", "--policy", "nowhere.toml"], "nowhere.toml does not exist"),
        (["validator", "--axon.port", "x"], "--axon.port"),
        (["run", "list", "--validator.url", "ftp://x"], "base URL"),
        (["plan", "nowhere.toml"], "does not exist"),
    ],
)
def test_flags(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert said in failing(capsys, *arguments)


def test_a_typo_in_the_run_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, submit: list[str]) -> None:
    run = write_run(tmp_path, RUN.replace("microbatches = 2", "microbatchs = 2"))
    for command in (["plan"], submit, ["up", "--dir", str(tmp_path / "swarm")]):
        line = failing(capsys, *command, run)
        assert "microbatchs" in line
        assert "did you mean microbatches" in line
    assert not (tmp_path / "swarm").exists()
    assert not (tmp_path / "work").exists()


def test_an_empty_corpus(capsys: pytest.CaptureFixture[str], tmp_path: Path, submit: list[str]) -> None:
    run = write_run(tmp_path, book="")
    assert "no text" in failing(capsys, *submit, run)
    assert "no text" in failing(
        capsys, "data", "prepare", tmp_path / "book.txt", "-o", tmp_path / "out", "--vocab-size", "300"
    )
    assert left_in(tmp_path / "work") == []
    assert not (tmp_path / "out").exists()


def test_a_corpus_shorter_than_a_sequence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, submit: list[str]
) -> None:
    run = write_run(tmp_path, book="Call me Ishmael.")
    line = failing(capsys, *submit, run)
    assert "tokens" in line
    assert "sequence_length" in line
    assert not list((tmp_path / "work").glob(".*"))


def test_a_vocabulary_larger_than_the_models(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, submit: list[str]
) -> None:
    write_run(tmp_path)
    assert (
        main(["data", "prepare", str(tmp_path / "book.txt"), "-o", str(tmp_path / "big"), "--vocab-size", "300"]) == 0
    )
    capsys.readouterr()
    small = RUN.replace("vocab_size = 300", "vocab_size = 260")
    tokenizer = small.replace('sources = ["book.txt"]', 'sources = ["book.txt"]\ntokenizer = "big/tokenizer.json"')
    prepared = small.replace('sources = ["book.txt"]', 'sources = ["big"]')
    for text in (tokenizer, prepared):
        line = failing(capsys, *submit, write_run(tmp_path, text))
        assert "vocab_size" in line
        assert "260" in line
    assert left_in(tmp_path / "work") == []


def test_more_stages_than_layers(capsys: pytest.CaptureFixture[str], tmp_path: Path, submit: list[str]) -> None:
    run = write_run(tmp_path, RUN.replace("stages = 2", "stages = 5"))
    for command in (["plan"], submit):
        line = failing(capsys, *command, run)
        assert "pipeline.stages = 5" in line
        assert "2 layers" in line


def test_a_wallet_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = write_run(tmp_path)
    flags = ["--wallet.name", "nobody", "--wallet.path", str(tmp_path / "wallets")]
    for command in (
        ["run", "submit", run, *flags],
        ["miner", *flags],
        ["validator", *flags],
        ["chain", "register", *flags],
    ):
        assert "wallet nobody/default" in failing(capsys, *command)
    assert not (tmp_path / "wallets").exists()


def test_a_wallet_is_never_overwritten(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--wallet.name", "me", "--wallet.path", str(tmp_path)]
    assert main(["wallet", "new", *flags]) == 0
    capsys.readouterr()
    before = (tmp_path / "me" / "hotkeys" / "default").read_bytes()
    assert "already exists" in failing(capsys, "wallet", "new", *flags)
    assert (tmp_path / "me" / "hotkeys" / "default").read_bytes() == before


def test_a_port_in_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for command in (
            ["chain", "serve", "--dir", tmp_path / "chain", "--port", port],
            ["store", "serve", "--dir", tmp_path / "store", "--port", port],
            ["up", "--dir", tmp_path / "swarm", "--validator.port", port],
        ):
            status = main([str(part) for part in command])
            error = capsys.readouterr().err
            assert status == 2
            assert error.strip().splitlines()[-1].startswith("error: can't listen on")
            assert str(port) in error
            assert "Traceback" not in error


def test_a_validator_url_that_answers_html(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = write_run(tmp_path)
    create_wallet("owner", "default", tmp_path / "wallets")
    flags = ["--wallet.name", "owner", "--wallet.path", str(tmp_path / "wallets")]
    with serving(b"<!doctype html><title>It works!</title>", "text/html") as url:
        for command in (
            ["run", "list"],
            ["run", "status"],
            ["run", "export", "small", tmp_path / "model", *flags],
            ["run", "submit", run, "--work-dir", tmp_path / "work", *flags],
        ):
            line = failing(capsys, *command, "--validator.url", url)
            assert "check the URL" in line
    assert not (tmp_path / "work").exists()
    assert not (tmp_path / "model").exists()


@contextmanager
def tiny_disk(path: Path) -> Iterator[None]:
    path.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting isn't allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk(capsys: pytest.CaptureFixture[str], tmp_path: Path, submit: list[str]) -> None:
    run = write_run(tmp_path, book=TEXT * 10)
    disk = tmp_path / "disk"
    with tiny_disk(disk):
        line = failing(capsys, "data", "prepare", tmp_path / "book.txt", "-o", disk / "out", "--vocab-size", "300")
        assert "no space left" in line
        assert left_in(disk) == []
        submit[submit.index("--work-dir") + 1] = str(disk / "work")
        assert "space" in failing(capsys, *submit, run)
        assert left_in(disk) == []


def test_a_foreign_directory_is_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for command in ("up", "demo"):
        assert str(tmp_path) in failing(capsys, command, "--dir", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
