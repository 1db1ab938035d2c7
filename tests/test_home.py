"""A miner at home: settings of its own, an identity that travels and overwrites nothing, a run that fits, a clean end."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from iota.cli.main import main
from iota.home import pick
from iota.home.identity import export_identity, import_identity
from iota.home.look import status_of, words
from iota.home.places import all_miners, find_miners, settings_folder, write_settings
from iota.home.remove import carry_out, plan_removal
from iota.home.service import UNIT, Unit
from iota.home.setup import Part, Setup, parts_of, values_of
from miner.claim import claimed, running
from miner.told import ToldKeeper, in_words, read_told
from neurons.config_file import parse_with_file
from neurons.miner import build_parser, settings_from
from subnet.errors import ConfigError, Refusal
from subnet.protocol.signing import create_wallet, load_wallet
from subnet.timing import ManualClock

ROOT = Path(__file__).resolve().parent.parent
KEYLESS = b'{"iota_identity":1,"wallet":"w","hotkey":"h","address":"5","hotkey_file":"{}"}'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path


def set_up(name: str, **changes: object) -> Part:
    setup = Setup(name=name, urls=("http://127.0.0.1:8091",), limits={"upload": "2MB"}, **changes)  # type: ignore[arg-type]
    part = parts_of(setup)[0]
    write_settings(settings_folder() / f"{part.name}.toml", values_of(setup, part, setup.urls))
    return part


def test_what_setup_writes_is_what_a_miner_starts_with(home: Path):
    set_up("miner", idle_only=True, page_port=8200)
    path = settings_folder() / "miner.toml"
    assert path == home / ".config" / "iota" / "miners" / "miner.toml"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    settings = settings_from(parse_with_file(build_parser(), ["--config", str(path)]))
    assert (settings.wallet_name, settings.page_port, settings.idle.only) == ("miner", 8200, True)
    assert settings.urls == ("http://127.0.0.1:8091",)
    assert settings.upload_bytes_per_s == 2e6
    assert settings.directory == home / ".iota" / "miner"
    other = ["--validator.url", "http://a", "http://b", "--page.port=0", "--config", str(path)]
    settings = settings_from(parse_with_file(build_parser(), other))
    assert (settings.urls, settings.page_port) == (("http://a", "http://b"), 0), "a flag beside the file wins"


def test_a_settings_file_that_is_none_names_the_place(home: Path):
    path = home / "m.toml"
    for text, said in (
        ("[wallet]\nnam = 'x'\n", r"m\.toml: there is no flag --wallet\.nam; meant is perhaps wallet\.name"),
        ("a = [", "no TOML"),
        ("netuid = 'x'", "m.toml"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            parse_with_file(build_parser(), ["--config", str(path)])
    with pytest.raises(ConfigError, match="can't be read"):
        parse_with_file(build_parser(), ["--config", str(home / "none.toml")])


def test_each_gpu_has_a_process_a_hotkey_and_ports_of_its_own():
    parts = parts_of(Setup(gpus=(0, 2), port=9000))
    assert parts == [
        Part("miner-0", "0", "cuda:0", 9000, 8192),
        Part("miner-2", "2", "cuda:2", 9002, 8194),
    ]
    with pytest.raises(ConfigError, match="--name"):
        parts_of(Setup(name="../x"))


def test_gpus_are_refused_where_there_are_none(home: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["miner", "setup", "--gpus", "all"]) == 2
    assert "no NVIDIA driver answers" in capsys.readouterr().err


def test_an_identity_travels_and_nothing_is_overwritten(tmp_path: Path):
    here, there, file = tmp_path / "here", tmp_path / "there", tmp_path / "me.identity"
    made = create_wallet("me", "hot", here)
    export_identity("me", "hot", here, file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "coldkey" not in file.read_text().replace("coldkey_public", "").replace('"coldkey_file": ""', "")
    with pytest.raises(ConfigError, match="exists already"):
        export_identity("me", "hot", here, file)
    signer, *names = import_identity(file, there)
    assert (signer.hotkey, names) == (made.hotkey, ["me", "hot"])
    assert load_wallet("me", "hot", there).coldkey == made.coldkey
    assert not (there / "me" / "coldkey").exists()
    for path in (there / "me").rglob("*"):
        assert path.is_dir() or stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        import_identity(file, there)
    create_wallet("other", "default", there)
    with pytest.raises(ConfigError, match="has another coldkey"):
        import_identity(file, there, "other")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        import_identity(file, tmp_path / "third")


def test_a_coldkey_goes_along_only_where_it_is_asked_for(tmp_path: Path):
    made = create_wallet("me", "hot", tmp_path / "here")
    export_identity("me", "hot", tmp_path / "here", tmp_path / "file", with_coldkey=True)
    import_identity(tmp_path / "file", tmp_path / "there")
    from subnet.chain.coldkeys import load_coldkey

    assert load_coldkey("me", tmp_path / "there").hotkey == made.coldkey


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"{}", "no identity"), (b"x" * 70_000, "70000 bytes"), (KEYLESS, "wallet w/h in")],
)  # fmt: skip
def test_a_file_that_is_no_identity_leaves_nothing(tmp_path: Path, data: bytes, said: str):
    file = tmp_path / "file"
    file.write_bytes(data)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=said):
        import_identity(file, tmp_path / "wallets")
    assert not (tmp_path / "wallets").exists()


def test_a_key_that_is_not_the_one_it_says_is_refused(tmp_path: Path):
    one, other = create_wallet("a", "h", tmp_path / "w"), create_wallet("b", "h", tmp_path / "w")
    export_identity("a", "h", tmp_path / "w", tmp_path / "file")
    text = (tmp_path / "file").read_text()
    head, _, rest = text.partition('"hotkey_file"')
    (tmp_path / "file").write_text(head.replace(one.hotkey, other.hotkey) + '"hotkey_file"' + rest)
    with pytest.raises(ConfigError, match="the file is damaged"):
        import_identity(tmp_path / "file", tmp_path / "there")


def test_a_run_fits_where_all_its_stages_do():
    assert pick.memory_fits((1 << 30, 2 << 30), 4 << 30)[0]
    fits, why = pick.memory_fits((1 << 30, 6 << 30), 4 << 30)
    assert not fits
    assert "stage 1 takes 6.00 GiB, 4.00 GiB are free" in why

    def offer(run: str, state: str, fits: bool | None) -> pick.Offer:
        return pick.Offer(url="http://v", run=run, state=state, fits=fits, why="")

    offers = [offer("big", "running", False), offer("next", "queued", True), offer("small", "waiting", True)]
    assert pick.best(offers).run == "small"  # type: ignore[union-attr]
    assert pick.best(offers[:2]).run == "next"  # type: ignore[union-attr]
    assert pick.best([offers[0], offer("x", "queued", None)]) is None


def test_what_a_waiting_miner_was_told_outlives_it(tmp_path: Path):
    clock = ManualClock()
    keeper = ToldKeeper(tmp_path, clock)
    keeper.note("http://v", "whale", Refusal("back_off", "gone silently 3 times", 90.0))
    clock.advance(60.0)
    again = ToldKeeper(tmp_path, clock)
    assert again.now == keeper.now
    assert again.now is not None
    again.note("http://v", "whale", Refusal("back_off", "gone silently 3 times", 30.0))
    assert again.now.since_s == keeper.now.since_s  # type: ignore[union-attr]
    assert again.now.time_s == pytest.approx(again.now.since_s + 60)
    said = in_words(again.now, again.now.time_s + 5)
    assert "waiting for 65 s to join run whale at http://v: back_off: gone silently 3 times; last told 5 s ago" in said
    again.note("http://v", "whale", Refusal("class_open", "not settled"))
    assert again.now.since_s == pytest.approx(keeper.now.since_s + 60)  # type: ignore[union-attr]
    again.forget()
    assert read_told(tmp_path) is None
    (tmp_path / "waiting.json").write_text("{")
    assert read_told(tmp_path) is None


def hold(directory: Path) -> subprocess.Popen[str]:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom miner.claim import claimed\n"
        f"with claimed(Path({str(directory)!r})):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as said:
        assert said.readline() == "held\n"
    return process


def test_a_directory_belongs_to_one_process_and_is_free_when_that_is_killed(tmp_path: Path):
    process = hold(tmp_path)
    try:
        assert running(tmp_path) == process.pid
        with pytest.raises(ConfigError, match=f"process {process.pid}"), claimed(tmp_path):
            pass
    finally:
        process.kill()
        process.wait()
    assert running(tmp_path) is None
    with claimed(tmp_path):
        assert (tmp_path / "miner.pid").read_text() == f"{os.getpid()}\n"


def test_a_miner_is_removed_and_its_identity_stays(home: Path, capsys: pytest.CaptureFixture[str]):
    set_up("miner")
    set_up("second")
    create_wallet("miner", "default", home / ".bittensor" / "wallets")
    miner = find_miners(["miner"])[0]
    (miner.directory / "cache").mkdir(parents=True)
    (miner.directory / "cache" / "blob").write_bytes(b"x" * 1000)
    (miner.directory / "notes.txt").write_text("mine")
    process = hold(miner.directory)
    unit = Unit("none")
    status = status_of(miner, unit)
    assert status.process == process.pid
    assert "miner: runs (process" in words(status)[0]
    removal = plan_removal(miner, unit, identity=False)
    assert sum(size for path, size in removal.delete if path.name == "cache") == 1000
    assert any("notes.txt" in kept for kept in removal.keep)
    assert any("identity" in kept for kept in removal.keep)
    carry_out(miner, removal, unit)
    assert process.wait(10) == -signal.SIGTERM
    assert [path.name for path in miner.directory.iterdir()] == ["notes.txt"]
    assert [one.name for one in all_miners()] == ["second"]
    assert load_wallet("miner", "default", home / ".bittensor" / "wallets")
    with pytest.raises(ConfigError, match="there are: second"):
        find_miners(["miner"])
    assert main(["miner", "remove", "second", "--identity", "--yes"]) == 0
    out = capsys.readouterr().out
    assert "hotkeys/default" in out
    assert all_miners() == []
    assert (home / ".bittensor" / "wallets" / "miner" / "coldkey").exists(), "a coldkey is never removed"
    assert main(["miner", "status"]) == 2


def test_remove_asks_first(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    set_up("miner")
    monkeypatch.setattr("typer.confirm", lambda text: False)
    assert main(["miner", "remove"]) == 1
    assert "nothing was deleted" in capsys.readouterr().out
    assert len(all_miners()) == 1


def test_the_unit_starts_what_there_is():
    line = next(line for line in UNIT.splitlines() if line.startswith("ExecStart="))
    assert line.endswith("-m neurons.miner --config %E/iota/miners/%i.toml")
    assert "RestartPreventExitStatus=2 4" in UNIT


def test_without_user_units_a_service_is_refused_in_one_line():
    with pytest.raises(ConfigError, match="leave --service out"):
        Unit("none").install("miner")


def test_several_miners_are_ended_together_and_a_bad_one_is_not_started_again(home: Path):
    """Two with settings that can't work: each says so and ends with 2."""
    for name in ("one", "two"):
        part = set_up(name, wallet_name=name)
        assert part.name == name
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "iota.cli.main", "miner", "start"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "HOME": str(home)},
    )  # fmt: skip
    assert done.returncode == 2
    for name in ("one", "two"):
        assert f"{name} | error: wallet {name}/default" in done.stdout
        assert f"{name} ended with status 2" in done.stdout
    assert time.monotonic() - began < 120
