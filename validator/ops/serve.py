"""Attaches health, metrics and alerts to a validator's service, as its settings ask."""

from __future__ import annotations

from loguru import logger

from subnet.net.border import listen
from subnet.service import Service
from validator.ops.alerts import Alerter, webhooks_from
from validator.ops.http import OpsApi
from validator.ops.look import LoopLag, Watched
from validator.settings import ValidatorSettings


async def attach(service: Service, settings: ValidatorSettings, watched: Watched, lag: LoopLag, hotkey: str) -> None:
    """Serve and watch from when ``service`` runs; nothing at all where neither a port nor webhooks are set."""
    if not settings.ops_port and settings.alert_webhooks is None:
        return
    api = OpsApi(watched)
    service.forever("loop lag", lag.run)
    if settings.alert_webhooks is not None:
        urls = webhooks_from(settings.alert_webhooks.expanduser())
        service.forever("alerts", Alerter(urls, hotkey, api.problems).run)
        logger.info("alerts go to {} webhooks", len(urls))
    if settings.ops_port:
        listener = await listen(api.app, settings.ops_host, settings.ops_port)
        service.on_close("ops", listener.close)
        logger.info("health and metrics at {}", listener.url)
