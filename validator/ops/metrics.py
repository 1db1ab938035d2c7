"""Prometheus metrics, made from a look at the validator whenever somebody scrapes; few labels, none of them a hotkey."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from subnet.protocol.api import RunStatus
from subnet.words import PROTOCOL_VERSION
from validator.ops.look import Watched
from validator.ops.problems import Look, problems

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CODES = (
    "disk_full", "disk_low", "event_loop", "follow", "metagraph_old", "no_permit", "no_term", "not_registered", "spike", "stalled",
    "store", "weights_differ", "weights_not_set",
)  # fmt: skip
"""Every code that :func:`validator.ops.problems.problems` can give: each is a series, 0 or 1, so that alerts can count on it."""


class ValidatorMetrics(Collector):
    """``render()`` is the body of ``GET /metrics``."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []  # nothing is asked of the validator before somebody scrapes

    def collect(self) -> Iterator[Metric]:
        look = self._watched.look()
        yield from _validator(look)
        status = self._watched.status()
        if status is not None:
            yield from _run(status)
        yield from _followed(self._watched.followed())


def _gauge(name: str, text: str, value: float | None) -> Iterator[Metric]:
    """A number that isn't known is no series."""
    if value is not None:
        yield GaugeMetricFamily(name, text, value=value)


def _validator(look: Look) -> Iterator[Metric]:
    role = "leader" if look.leads else "follower"
    yield InfoMetricFamily(
        "iota_validator",
        "What this process is.",
        {"role": role, "hotkey": look.hotkey, "protocol": str(PROTOCOL_VERSION)},
    )
    found = {problem.code for problem in problems(look)}
    known = GaugeMetricFamily("iota_problem", "1 while the validator has this problem.", labels=["code"])
    for code in CODES:
        known.add_metric([code], float(code in found))
    yield known
    yield from _gauge("iota_uptime_seconds", "Since the process began to serve.", look.started_s_ago)
    yield from _gauge(
        "iota_event_loop_lag_seconds", "Worst delay of the event loop in the last minute.", look.loop_lag_s
    )
    yield from _gauge("iota_metagraph_age_seconds", "Since the metagraph was last read.", look.metagraph_age_s)
    yield from _gauge("iota_tempo_seconds", "Length of the subnet's tempo.", look.tempo_s)
    yield from _gauge("iota_weights_age_seconds", "Since weights were last set.", look.weights_set_s_ago)
    yield from _gauge("iota_validator_permit", "1 while the hotkey holds a permit.", float(look.permit))
    yield from _gauge("iota_store_up", "1 while the object store answers and has room.", float(not look.store_trouble))
    yield from _gauge("iota_disk_free_bytes", "Free on the disk of --dir.", look.disk_free_bytes)
    yield from _gauge("iota_disk_bytes", "Size of the disk of --dir.", look.disk_bytes)
    yield from _gauge(
        "iota_journal_unacknowledged_records",
        "Not in the log store yet.",
        look.unacknowledged_records if look.leads else None,
    )


def _run(status: RunStatus) -> Iterator[Metric]:
    run, last = status.summary, status.steps[-1] if status.steps else None
    yield InfoMetricFamily("iota_run", "The active run.", {"name": run.name, "run_id": run.run_id})
    states = GaugeMetricFamily("iota_run_state", "1 for the state that the run is in.", labels=["state"])
    for state in ("queued", "waiting", "running", "stalled", "finished"):
        states.add_metric([state], float(run.state == state))
    yield states
    yield from _gauge("iota_run_step", "Steps sealed.", run.step)
    yield from _gauge("iota_run_steps", "Steps that the run has in all.", run.steps)
    yield from _gauge("iota_run_loss", "Training loss of the last sealed step.", run.loss)
    yield from _gauge("iota_run_gradient_norm", "Of the last sealed step.", last.norm if last else None)
    yield from _gauge("iota_run_holdout_loss", "At the last evaluation.", last.holdout_loss if last else None)
    yield from _gauge("iota_run_step_seconds", "What the last sealed step took.", last.seconds if last else None)
    yield from _gauge("iota_run_tokens_per_second", "Over the last steps.", status.tokens_per_s)
    yield from _gauge("iota_journal_records", "In the active run's journal.", status.journal_length)
    yield from _gauge("iota_store_bytes", "Of the active run in the object store.", status.store_bytes)
    if run.stall is not None:
        yield from _gauge(
            "iota_run_no_seal_seconds", "Since the last seal, while the run is stalled.", run.stall.no_seal_s
        )
    members = GaugeMetricFamily("iota_stage_members", "Members of a stage.", labels=["stage", "ready"])
    counts = Counter((member.stage, member.ready_for_step >= run.step) for member in status.members)
    for (stage, ready), number in sorted(counts.items()):
        members.add_metric([str(stage), str(ready).lower()], number)
    yield members
    yield from _gauge("iota_leases", "Items that members work on now.", sum(member.leases for member in status.members))
    for name, text, value in (
        ("iota_merges", "Stages merged.", status.num_merges),
        ("iota_voids", "Partials voided.", status.num_voids),
        ("iota_members_gone", "Members lost.", status.num_gone),
        ("iota_members_joined", "Members that joined.", status.num_joined),
    ):
        yield CounterMetricFamily(name, text, value=value)
    if status.store is not None:
        yield from _gauge(
            "iota_store_usd", "What requests and egress have cost so far, by the run file's prices.", status.store.usd
        )


def _followed(runs: tuple[tuple[str, int, int, int], ...]) -> Iterator[Metric]:
    if not runs:
        return
    steps = GaugeMetricFamily("iota_followed_step", "Sealed steps of a followed run.", labels=["run"])
    records = GaugeMetricFamily("iota_followed_records", "Records folded of a followed run.", labels=["run"])
    breaches = GaugeMetricFamily("iota_followed_breaches", "Broken rules found in a followed run.", labels=["run"])
    for name, step, number, found in runs:
        for family, value in ((steps, step), (records, number), (breaches, found)):
            family.add_metric([name], value)
    yield from (steps, records, breaches)
