"""A bucket is made and given its net with boto3: unfinished uploads and old evidence end by themselves, other rules stay.

Everything here blocks, and ends by boto3's own timeouts.
"""

from __future__ import annotations

from typing import Any

from subnet.errors import AuthFailed, ConfigError, IotaError, Unreachable
from subnet.store.s3_errors import s3_error
from subnet.store.s3_place import S3Place, S3Signer

UPLOAD_DAYS = 2
EVIDENCE_DAYS = 14
"""Far longer than an audit window; shorter than what a forgotten bucket may cost."""
CONNECT_S, READ_S = 5, 10


def admin_client(signer: S3Signer) -> Any:
    """A boto3 client of the place, with the signer's credentials."""
    from boto3.session import Session
    from botocore.config import Config

    place, frozen = signer.place, signer.frozen
    return Session().client(
        "s3",
        endpoint_url=place.endpoint or None,
        region_name=place.region,
        aws_access_key_id=frozen.access_key,
        aws_secret_access_key=frozen.secret_key,
        aws_session_token=frozen.token,
        config=Config(
            signature_version="s3v4",
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            connect_timeout=CONNECT_S,
            read_timeout=READ_S,
            retries={"total_max_attempts": 2},
            s3={"addressing_style": "path" if place.endpoint or "." in place.bucket else "virtual"},
        ),
    )


def lifecycle_rules(place: S3Place) -> list[dict[str, Any]]:
    name = place.prefix.replace("/", "-") or "root"
    return [
        {
            "ID": f"iota-{name}-uploads",
            "Status": "Enabled",
            "Filter": {"Prefix": place.key("")},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": UPLOAD_DAYS},
        },
        {
            "ID": f"iota-{name}-evidence",
            "Status": "Enabled",
            "Filter": {"Prefix": place.key("evidence/")},
            "Expiration": {"Days": EVIDENCE_DAYS},
        },
    ]


def ensure_lifecycle(signer: S3Signer) -> bool:
    """Set our rules beside whatever others the bucket has; whether something changed."""
    ours, client = lifecycle_rules(signer.place), admin_client(signer)
    try:
        there = _rules(client, signer.place)
        ids = {rule["ID"] for rule in ours}
        if sorted(rule.get("ID", "") for rule in there if rule.get("ID") in ids) == sorted(ids):
            return False
        rules = [rule for rule in there if rule.get("ID") not in ids] + ours
        _asked(
            lambda: client.put_bucket_lifecycle_configuration(
                Bucket=signer.place.bucket, LifecycleConfiguration={"Rules": rules}
            ),
            "setting the lifecycle rules",
        )
        return True
    finally:
        client.close()


def try_lifecycle(signer: S3Signer) -> None:
    """Set a rule, read it back and put things back as they were; an error where the bucket can't do that."""
    client, bucket = admin_client(signer), signer.place.bucket
    try:
        before = _rules(client, signer.place)
        trial = lifecycle_rules(signer.place)
        rules = {"Rules": before + trial}
        _asked(
            lambda: client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=rules),
            "setting the lifecycle rules",
        )
        there = {rule.get("ID") for rule in _rules(client, signer.place)}
        if before:
            back = {"Rules": before}
            _asked(
                lambda: client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=back),
                "setting the lifecycle rules back",
            )
        else:
            _asked(lambda: client.delete_bucket_lifecycle(Bucket=bucket), "removing the lifecycle rules")
        if not {rule["ID"] for rule in trial} <= there:
            raise Unreachable("lifecycle rules are accepted and forgotten")
    finally:
        client.close()


def _rules(client: Any, place: S3Place) -> list[dict[str, Any]]:
    try:
        found = _asked(lambda: client.get_bucket_lifecycle_configuration(Bucket=place.bucket), "the lifecycle rules")
    except IotaError as error:
        if "NoSuchLifecycleConfiguration" in str(error):
            return []
        raise
    return list(found.get("Rules", []))


def make_bucket(signer: S3Signer) -> bool:
    """Make the bucket unless it is there; whether it was made."""
    client, place = admin_client(signer), signer.place
    try:
        try:
            _asked(lambda: client.head_bucket(Bucket=place.bucket), f"bucket {place.bucket}")
            return False
        except AuthFailed as error:
            raise ConfigError(f"bucket {place.bucket} is another's, or out of reach: {error.reason}") from error
        except IotaError as error:
            if error.retryable:
                raise
        options: dict[str, Any] = {}
        if not place.endpoint and place.region != "us-east-1":
            options["CreateBucketConfiguration"] = {"LocationConstraint": place.region}
        _asked(lambda: client.create_bucket(Bucket=place.bucket, **options), f"making bucket {place.bucket}")
        return True
    finally:
        client.close()


def _asked(call: Any, what: str) -> Any:
    """The call, with botocore's errors as the contract's."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call()
    except ClientError as error:
        answer: dict[str, Any] = error.response
        code, message = answer["Error"].get("Code", ""), answer["Error"].get("Message", "")
        status = int(answer["ResponseMetadata"].get("HTTPStatusCode", 0))
        body = f"<Error><Code>{code if not code.isdigit() else ''}</Code></Error>".encode()
        mine = s3_error(f"{what}: {message}" if message else what, status, body)
        raise mine from error
    except BotoCoreError as error:
        raise Unreachable(f"{what}: {error}") from error
