"""What a run has asked of the object store, priced by its run file: requests and bytes as counted, storage as it is now.

Priced are the owner's own requests and those that members report. A miner's requests after its last grant aren't in yet, and
what was granted but never used costs nothing.
"""

from __future__ import annotations

from subnet.protocol.api import StoreCosts
from subnet.run.config import PricesSection
from subnet.store.meter import RunUse

_MILLION, _GB = 1e6, 1e9


def store_costs(uses: list[RunUse], stored_bytes: int, prices: PricesSection) -> StoreCosts:
    """``uses`` of the same run under different labels are added up."""
    whole = RunUse()
    for use in uses:
        whole = RunUse(whole.own.plus(use.own), whole.granted.plus(use.granted), whole.reported.plus(use.reported))
    moved = whole.own.plus(whole.reported)
    usd = (
        (moved.puts + moved.lists) * prices.put_usd_per_million / _MILLION
        + moved.gets * prices.get_usd_per_million / _MILLION
        + moved.bytes_down * prices.egress_usd_per_gb / _GB
    )
    month = stored_bytes * prices.stored_usd_per_gb_month / _GB
    return StoreCosts(whole.own, whole.granted, whole.reported, usd, month)
