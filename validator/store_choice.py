"""The validator's object store: by its URL the embedded one or a bucket, and grants out of either for what a request asks.

A bucket's index of holds lies beside the runs, under a name that depends on the place, so that two places never share one.
"""

from __future__ import annotations

import asyncio

from blake3 import blake3

from subnet.errors import ConfigError, InputError
from subnet.protocol.messages import LIMIT_GRANTS, GrantRequest
from subnet.store.base import Grant, Hold, OwnerStore, PutWant, check_blob
from subnet.store.embedded import EmbeddedStore
from subnet.store.signed_urls import load_or_create_secret
from subnet.timing import Deadline
from validator.settings import ValidatorSettings


async def make_store(settings: ValidatorSettings, hotkey: str) -> OwnerStore:
    """Not opened yet; a file, flag or credential that can't be used is a :class:`ConfigError`."""
    if not settings.store_url.startswith("s3://"):
        return EmbeddedStore(settings.store_url, _secret(settings))
    from subnet.store.s3 import S3Store  # botocore is slow to load, and most validators need none of it
    from subnet.store.s3_place import S3Place, S3Signer, find_credentials
    from subnet.store.s3_reader import S3Reader

    place = S3Place.parse(settings.store_url, endpoint=settings.store_endpoint, region=settings.store_region)
    credentials = await asyncio.to_thread(find_credentials, settings.store_credentials)
    name = blake3(f"{place.base_url} {place.prefix}".encode()).hexdigest()[:16]
    index = settings.directory.expanduser() / f"store-{name}.db"
    signer, kind = S3Signer(place, credentials), S3Reader if settings.follow else S3Store
    return await asyncio.to_thread(lambda: kind(signer, index, owner=hotkey))


def _secret(settings: ValidatorSettings) -> bytes:
    """The secret shared with the store; one made up here would open no store that has runs already."""
    path = settings.store_secret.expanduser()
    if (settings.lead_from or settings.follow) and not path.exists():
        raise ConfigError(f"there is no store secret in {path}", hint="copy the store's file, see --store.secret")
    return load_or_create_secret(path)


async def grant_puts(
    store: OwnerStore, request: GrantRequest, hold: Hold, hotkey: str, deadline: Deadline
) -> tuple[Grant, ...]:
    """What a request to put is answered with: grants of blobs, of parts of one, or what is lacking of one."""
    hold.check()
    digests = request.sha256 or ((),) * len(request.blobs)
    if len(digests) != len(request.blobs):
        raise InputError(f"SHA-256 of {len(digests)} blobs, asked for are {len(request.blobs)}")
    wants = [PutWant(check_blob(blob), size, sha) for (blob, size), sha in zip(request.blobs, digests, strict=True)]
    if not request.parts and not request.complete:
        return await store.grant_puts(wants, hold, who=hotkey, deadline=deadline)
    if len(wants) != 1 or len(request.parts) > LIMIT_GRANTS:
        raise InputError(f"{len(request.parts)} parts of {len(wants)} blobs", hint=f"up to {LIMIT_GRANTS} of one blob")
    if request.complete:
        return (await store.complete_parts(wants[0], hold, deadline=deadline),)
    return await store.grant_parts(wants[0], request.parts, hold, deadline=deadline)
