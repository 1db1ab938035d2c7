"""A run file loads, round-trips, and each mistake in it is one line with the key and the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.errors import ConfigError
from subnet.run.config import DataSection, ModelSection, RunConfig, RunSection, default_qmax
from subnet.run.runfile import config_to_toml, load_run_file, parse_run

ROOT = Path(__file__).parent.parent
GOOD = """
[run]
name = "r"
[model]
config = "config.json"
[data]
sources = ["book.txt"]
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "pad_token_id": None}))
    (tmp_path / "broken.json").write_text("{")
    return tmp_path


def load(home: Path, text: str) -> RunConfig:
    (home / "run.toml").write_text(text)
    return load_run_file(home / "run.toml")


def test_example_loads_and_is_a_demo() -> None:
    config = load_run_file(ROOT / "examples" / "demo.toml")
    assert config.run.name == "demo"
    assert config.pipeline.stages == 3
    assert config.tokens_per_step == 2048
    assert [Path(s).is_file() for s in config.data.sources] == [True]
    assert parse_run(config_to_toml(config), Path("/")) == config


def test_paths_are_relative_to_the_file(home: Path) -> None:
    config = load(home, GOOD + 'tokenizer = "sub/tokenizer.json"')
    assert config.data.sources == (str(home / "book.txt"),)
    assert config.data.tokenizer == str(home / "sub" / "tokenizer.json")
    assert config.model.config == {"model_type": "llama", "pad_token_id": None}
    assert parse_run(config_to_toml(config), Path("/elsewhere")) == config  # null survives, too
    pretrained = load(home, '[run]\nname = "r"\n[model]\npretrained = "llm"')
    assert pretrained.model.pretrained == str(home / "llm")


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(model=st.dictionaries(text, plain, max_size=4), tokenizer=text)
def test_any_config_round_trips(model: dict[str, object], tokenizer: str) -> None:
    if not all(isinstance(key, str) for key in model):
        return
    absolute = "/" + tokenizer.replace("\0", "").replace("/", "").replace(".", "").replace("~", "")
    data = DataSection(tokenizer=absolute if absolute != "/" else "")
    config = RunConfig(run=RunSection(name="r", seed=2**62), model=ModelSection(config=model), data=data)
    assert parse_run(config_to_toml(config), Path("/")) == config


BAD = {
    "typo": (
        GOOD + "sequence_lenght = 9",
        "unknown key data.sequence_lenght (did you mean sequence_length in [data]?)",
    ),
    "right key, wrong section": (
        GOOD + "learning_rate = 0.1",
        "unknown key data.learning_rate (did you mean learning_rate in [optimizer]?)",
    ),
    "typo of another section's key": (
        GOOD + "microbatchs = 4",
        "unknown key data.microbatchs (did you mean microbatches in [pipeline]?)",
    ),
    "nothing near": (
        GOOD + "zzz = 1",
        "unknown key data.zzz (keys of [data]: sources, weights, tokenizer, sequence_length, holdout_fraction)",
    ),
    "key above all sections": ("steps = 3\n" + GOOD, "unknown key steps (did you mean steps in [run]?)"),
    "section typo": (GOOD + "[optimiser]\n", "unknown section [optimiser] (did you mean [optimizer]?)"),
    "section unknown": (
        GOOD + "[zzz]\n",
        "unknown section [zzz] (allowed: run, model, data, objective, trainable, optimizer, schedule, pipeline, lanes, "
        "precision, merge, snapshot, evaluation, hardware, audit, prices, alarms)",
    ),
    "section as value": (
        "data = 3\n" + GOOD.replace("[data]\n", ""),
        "data = 3 is not allowed (data is a section: write [data])",
    ),
    "text for number": (
        GOOD + 'sequence_length = "long"',
        'data.sequence_length = "long" is not allowed (allowed: a whole number)',
    ),
    "fraction for number": (
        GOOD + "sequence_length = 1.5",
        "data.sequence_length = 1.5 is not allowed (allowed: a whole number)",
    ),
    "true for number": (
        GOOD + "sequence_length = true",
        "data.sequence_length = true is not allowed (allowed: a whole number)",
    ),
    "text for list": (
        GOOD.replace('["book.txt"]', '"book.txt"'),
        'data.sources = "book.txt" is not allowed (allowed: a list of texts, for example ["book.txt"])',
    ),
    "three betas": (
        GOOD + "[optimizer]\nbetas = [0.1, 0.2, 0.3]",
        "optimizer.betas = [0.1, 0.2, 0.3] is not allowed (allowed: a list of two numbers, for example [0.9, 0.95])",
    ),
    "text for float": (
        GOOD + '[optimizer]\nlearning_rate = "1e-3"',
        'optimizer.learning_rate = "1e-3" is not allowed (allowed: a number)',
    ),
    "value out of range": (
        GOOD + "sequence_length = 2",
        "data.sequence_length = 2 is not allowed (allowed: 8 to 131072)",
    ),
    "choice": (GOOD + '[precision]\ncompute = "fp8"', "precision.compute = 'fp8' is not allowed (allowed: fp32, bf16)"),
    "missing name": (
        '[run]\n[model]\nconfig = "config.json"',
        'run.name is missing (add under [run]: name = "my-run")',
    ),
    "missing section": (
        '[run]\nname = "r"',
        'the section [model] is missing (add under [model]: config = "config.json", or a table [model.config], or '
        'pretrained = "directory")',
    ),
    "model without config": (
        '[run]\nname = "r"\n[model]\nattention = "sdpa"',
        'model.config is missing (add under [model]: config = "config.json", or a table [model.config], or '
        'pretrained = "directory")',
    ),
    "both": (
        GOOD.replace("[data]", 'pretrained = "x"\n[data]'),
        "model.config / model.pretrained = 'both or neither' is not allowed (allowed: exactly one of the two, or model.modules)",
    ),
    "config number": (
        GOOD.replace('"config.json"', "3"),
        "model.config = 3 is not allowed (allowed: a table [model.config], or the path of a config.json in quotes)",
    ),
    "config missing": (
        GOOD.replace("config.json", "no.json"),
        "model.config = 'no.json': no such file (give the path of a config.json, relative to the run file, or a table "
        "[model.config])",
    ),
    "config broken": (
        GOOD.replace("config.json", "broken.json"),
        "model.config = 'broken.json' is not a JSON table: Input data was truncated (give a config.json)",
    ),
    "syntax": (
        "[run]\nname = r\n",
        'not TOML: Invalid value (at line 2, column 8) (texts need quotes: name = "demo"; sections are headed [run])',
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_mistakes_are_one_line(home: Path, case: str) -> None:
    content, message = BAD[case]
    with pytest.raises(ConfigError) as caught:
        load(home, content)
    assert str(caught.value) == f"{home / 'run.toml'}: {message}"


def test_file_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_file(tmp_path / "no.toml")
    assert str(caught.value) == (
        f"{tmp_path / 'no.toml'} does not exist (name a run file, for example examples/demo.toml)"
    )
    (tmp_path / "latin.toml").write_bytes(b'[run]\nname = "\xe9"')
    with pytest.raises(ConfigError) as caught:
        load_run_file(tmp_path / "latin.toml")
    assert str(caught.value) == f"{tmp_path / 'latin.toml'} is not UTF-8 at byte 14 (save it as UTF-8)"


def test_the_quantum_falls_with_the_root_of_the_microbatches_and_sums_stay_exact():
    chosen = {m: default_qmax(m) for m in (1, 8, 16, 17, 64, 65, 512, 2048, 4096, 16384)}
    assert chosen == {
        1: 1023, 8: 1023, 16: 1023, 17: 2047, 64: 2047, 65: 4095, 512: 8191, 2048: 8191, 4096: 4095, 16384: 1023
    }  # fmt: skip
    assert all(m * default_qmax(m) < 2**24 for m in range(1, 16385))


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_no_json_can_hold_is_refused(number: float) -> None:
    with pytest.raises(ConfigError, match="finite numbers"):
        ModelSection(config={"model_type": "llama", "rope": [{"theta": number}]})
