"""A whole swarm on a real S3 server: the same root as on the embedded store, with boundaries straight and through the bucket."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from seaweed import BUCKET, KEY, SECRET_KEY, Seaweed
from test_swarm import ROOT, RUN, START_S, changed, root_of

from iota.swarm import LocalSwarm, SwarmOptions
from subnet.run.runfile import parse_run
from validator.settings import ValidatorSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
OPTIONS = SwarmOptions(device="cpu", measure_costs=False, start_s=START_S, spare_miners=0)


class BucketSwarm(LocalSwarm):
    """The same, but its validator keeps everything in a bucket."""

    endpoint = ""
    credentials = Path()

    def _request(self, name: str, entry: str, settings: msgspec.Struct) -> None:
        if isinstance(settings, ValidatorSettings):
            settings = msgspec.structs.replace(
                settings,
                store_url=f"s3://{BUCKET}/swarm",
                store_endpoint=self.endpoint,
                store_credentials=self.credentials,
            )
        super()._request(name, entry, settings)


def test_the_same_root_on_a_bucket(seaweed: Seaweed, tmp_path: Path) -> None:
    book = (ROOT / "iota" / "assets" / "moby_dick.txt").read_text(encoding="utf-8")
    (tmp_path / "book.txt").write_text(book[:60_000], encoding="utf-8")
    config = parse_run(RUN, tmp_path)
    with LocalSwarm(tmp_path / "embedded", config, 3, OPTIONS) as swarm:
        root = root_of(swarm, "calm")
    credentials = tmp_path / "credentials"
    credentials.write_text(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET_KEY}\n")
    credentials.chmod(0o600)
    swarm = BucketSwarm(tmp_path / "bucket", config, 3, OPTIONS)
    swarm.endpoint, swarm.credentials = seaweed.endpoint, credentials
    with swarm:
        assert root_of(swarm, "calm") == root
        status = swarm.status()
        assert status is not None
        assert status.store is not None
        used = status.store.own.plus(status.store.reported)
        assert used.puts > 0
        assert used.bytes_up > 0
        assert status.store.usd > 0
        swarm.submit(changed(config, "through-the-bucket", boundaries="store"))  # type: ignore[arg-type]
        assert root_of(swarm, "through-the-bucket") == root
        by_store = swarm.status()
        assert by_store is not None
        assert by_store.store is not None
        assert by_store.store.granted.puts > status.store.granted.puts, "activations went through it"
    assert not any((tmp_path / "bucket" / "store" / "blobs").rglob("*")), "the embedded store wasn't used"
