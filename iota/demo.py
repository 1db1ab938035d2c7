"""``iota demo``: a whole run on this machine, with a death and a birth on the way, to a model that transformers loads.

Everything is written under one directory, which must be new; every wait has a deadline.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

import iota
from iota.chainview import weight_lines
from iota.curve import draw_curve
from iota.live import LiveView
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.errors import ConfigError, DeadlinePassed
from subnet.protocol.api import RunStatus
from subnet.run.config import RunConfig
from subnet.run.runfile import load_run_file
from subnet.timing import Deadline

RUN_FILE = "examples/demo.toml"
PROMPT = "The whale"
SAMPLE_TOKENS = 60
_RUN_S = 1800.0
_TEMPO_S = 60.0
_SAMPLE_S = 300.0
_ALL_STEPS = 100_000

SAMPLE = """
import sys, torch, transformers
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
prompt = tokenizer(sys.argv[2], return_tensors="pt").input_ids
out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=True, temperature=0.8, top_k=40,
                     max_new_tokens=int(sys.argv[3]), pad_token_id=0)
print(tokenizer.decode(out[0], skip_special_tokens=True))
"""
"""Plain transformers, in a process that imports nothing of ours."""


@dataclass(frozen=True)
class DemoSettings:
    directory: Path = Path("iota-demo")
    run_file: Path | None = None
    steps: int | None = None
    num_miners: int = 7
    kill: bool = True
    device: str = "auto"
    plain: bool | None = None


@dataclass
class _Story:
    """What happens to the fleet: decided by the step, done once."""

    swarm: LocalSwarm
    view: LiveView
    kill_at: int | None
    marks: list[tuple[int, str]] = field(default_factory=lambda: list[tuple[int, str]]())
    killed: int | None = None

    def seen(self, status: RunStatus) -> None:
        self.view.show(status)
        step = status.summary.step
        if self.kill_at is None or self.killed is not None or step < self.kill_at:
            return
        victim = self._victim(status)
        if victim is None:
            return
        self.killed = victim
        self.swarm.kill(victim)
        joiner = self.swarm.add_miner()
        self.view.say(f"step {step}: kill -9 of miner {victim}; miner {joiner} joins")
        self.marks += [(step, f"kill -9 of miner {victim}"), (step, f"miner {joiner} joins")]

    def _victim(self, status: RunStatus) -> int | None:
        """A miner that is at work; of a stage with a second miner where there is one, so that nobody has to wait."""
        numbers = {self.swarm.miner_hotkey(number): number for number in range(self.swarm.num_miners)}
        sizes: dict[int, int] = {}
        for member in status.members:
            sizes[member.stage] = sizes.get(member.stage, 0) + 1
        ranked = sorted(status.members, key=lambda member: (-sizes[member.stage], -member.leases, member.hotkey))
        return next((numbers[member.hotkey] for member in ranked if member.hotkey in numbers), None)


def demo_config(settings: DemoSettings) -> RunConfig:
    """The demo's run file, with another number of steps where asked."""
    config = load_run_file(settings.run_file or _shipped(RUN_FILE))
    if settings.steps is None:
        return config
    run = msgspec.structs.replace(config.run, steps=settings.steps)
    every = max(1, min(config.evaluation.every_steps, settings.steps // 3))
    return msgspec.structs.replace(
        config, run=run, evaluation=msgspec.structs.replace(config.evaluation, every_steps=every)
    )


def run_demo(settings: DemoSettings) -> int:
    started = time.monotonic()
    directory = settings.directory.expanduser().absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists already", hint="delete it, or choose another --dir")
    config = demo_config(settings)
    steps = config.run.steps
    kill_at = steps // 2 if settings.kill and settings.num_miners > config.pipeline.stages else None
    options = SwarmOptions(device=settings.device)
    swarm = LocalSwarm(directory / "swarm", config, settings.num_miners, options)
    with swarm:
        with LiveView(plain=settings.plain) as view:
            fleet = f"{settings.num_miners} miners, {config.pipeline.stages} stages"
            view.say(f"{fleet}, {steps} steps; logs in {swarm.directory / 'logs'}")
            view.say(f"the run's page: {swarm.page_url}")
            story = _Story(swarm, view, kill_at)
            deadline = Deadline.after(_RUN_S)
            swarm.wait_until(
                lambda status: status.summary.state == "finished",
                deadline,
                steps=_ALL_STEPS,
                poll_s=0.5,
                seen=story.seen,
            )
        status = swarm.status(steps=_ALL_STEPS)
        assert status is not None  # it has just been seen
        trained_s = time.monotonic() - started
        picture = directory / "loss.png"
        title = f"{config.run.name}: {steps} steps, {config.pipeline.stages} stages, {settings.num_miners} miners"
        draw_curve(
            status.steps,
            story.marks,
            picture,
            title=title,
            subtitle=f"run root {swarm.final_root()[:16]}",
            final_holdout=status.final_holdout_loss,
        )
        print(f"\nloss curve       {picture}")
        model = _export(swarm, status, directory / "model")
        print(f"weights on chain {_weights(swarm)}")
    print(f"sample           {_sample(model)!r}")
    print(f"run root         {status.summary.root}")
    print(f"{steps} steps after {trained_s:.0f} s, all of it in {time.monotonic() - started:.0f} s")
    return 0


def _export(swarm: LocalSwarm, status: RunStatus, out_dir: Path) -> Path:
    from iota.export import export_run

    done = export_run(swarm.remote(), status.summary.name, out_dir, deadline=Deadline.after(_SAMPLE_S))
    print(f"model            {done.directory} ({done.num_parameters:,} parameters, after {done.step} updates)")
    return done.directory


def _weights(swarm: LocalSwarm) -> str:
    """What the validator set, read back from the chain; weights are set once per tempo, so this may wait for one."""
    deadline = Deadline.after(_TEMPO_S)
    while True:
        metagraph, weights = swarm.chain_state()
        if weights:
            return "; ".join(weight_lines(metagraph, weights))
        try:
            deadline.check("weights")
        except DeadlinePassed:
            return f"none within {_TEMPO_S:.0f} s (see {swarm.log_of('validator')})"
        time.sleep(0.5)


def _sample(model: Path) -> str:
    command = [sys.executable, "-P", "-c", SAMPLE, str(model), PROMPT, str(SAMPLE_TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SAMPLE_S, check=False)
    if done.returncode:
        raise ConfigError(f"plain transformers can't load {model}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.strip()


def _shipped(name: str) -> Path:
    return Path(iota.__file__).resolve().parent.parent / name
