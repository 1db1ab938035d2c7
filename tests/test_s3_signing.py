"""URLs are botocore's own, places and credentials are what operators expect, and every answer of S3 is an error of ours."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import boto3
import pytest
from botocore.config import Config
from botocore.credentials import Credentials

from subnet.errors import (
    Busy,
    ConfigError,
    Exists,
    Expired,
    HashMismatch,
    InputError,
    IotaError,
    NotFound,
    OutOfSpace,
    Refused,
    TooLarge,
    Unreachable,
)
from subnet.store.s3_errors import s3_error
from subnet.store.s3_place import S3Place, S3Signer, find_credentials
from subnet.store.signed_urls import BadGrant
from subnet.timing import ManualClock
from validator.settings import ValidatorSettings
from validator.store_choice import make_store

NOW = datetime.datetime(2026, 11, 30, 12, 0, 0, tzinfo=datetime.UTC)


class At:
    """A clock that stands at :data:`NOW`."""

    def now_s(self) -> float:
        return 0.0

    def wall_ns(self) -> int:
        return int(NOW.timestamp() * 1e9)


@pytest.fixture
def boto_at_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda remove_tzinfo=True: NOW.replace(tzinfo=None))


@pytest.mark.usefixtures("boto_at_now")
@pytest.mark.parametrize("token", [None, "a/token+="])
def test_a_presigned_url_is_botos(token: str | None) -> None:
    place = S3Place.parse("s3://bucket/a/prefix", endpoint="http://127.0.0.1:8333", region="eu-west-1")
    signer = S3Signer(place, Credentials("AKID", "secret", token), clock=At())
    client: Any = boto3.session.Session().client(
        "s3",
        endpoint_url=place.endpoint,
        region_name=place.region,
        aws_access_key_id="AKID",
        aws_secret_access_key="secret",
        aws_session_token=token,
        config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
    )
    for key in ("blobs/00ff.11", "named/runs~x~run"):
        url, expires_s = signer.presign("GET", place.key(key), ttl_s=300)
        params = {"Bucket": "bucket", "Key": place.key(key)}
        theirs = client.generate_presigned_url("get_object", Params=params, ExpiresIn=300)
        assert urlsplit(url)[:3] == urlsplit(theirs)[:3]
        assert parse_qs(urlsplit(url).query) == parse_qs(urlsplit(theirs).query)
        assert expires_s == int(NOW.timestamp()) + 300
    headers = {"Content-Length": "5", "x-amz-checksum-sha256": "abcd=", "If-None-Match": "*"}
    url, _ = signer.presign("PUT", place.key("k"), ttl_s=60, headers=headers)
    params = {
        "Bucket": "bucket",
        "Key": place.key("k"),
        "ContentLength": 5,
        "ChecksumSHA256": "abcd=",
        "IfNoneMatch": "*",
    }
    theirs = client.generate_presigned_url("put_object", Params=params, ExpiresIn=60)
    ours, expected = parse_qs(urlsplit(url).query), parse_qs(urlsplit(theirs).query)
    assert ours["X-Amz-SignedHeaders"] == ["content-length;host;if-none-match;x-amz-checksum-sha256"]
    assert ours.keys() <= expected.keys()
    client.close()


def test_every_part_of_a_request_is_signed() -> None:
    signer = S3Signer(S3Place("bucket", "", "http://h:1"), Credentials("AKID", "secret"), clock=At())
    plain: dict[str, Any] = {"ttl_s": 60, "headers": {"Content-Length": "5"}, "query": {"partNumber": 1}}
    changes: list[tuple[str, str, dict[str, Any]]] = [
        ("PUT", "k", plain),
        ("GET", "k", plain),
        ("PUT", "k2", plain),
        ("PUT", "k", plain | {"ttl_s": 61}),
        ("PUT", "k", plain | {"headers": {"Content-Length": "6"}}),
        ("PUT", "k", plain | {"query": {"partNumber": 2}}),
    ]
    signatures = {parse_qs(urlsplit(signer.presign(m, k, **o)[0]).query)["X-Amz-Signature"][0] for m, k, o in changes}
    assert len(signatures) == len(changes)


def test_places() -> None:
    place = S3Place.parse("s3://my-bucket/a/b/", region="eu-west-1")
    assert place.base_url == "https://my-bucket.s3.eu-west-1.amazonaws.com"
    assert place.url(place.key("x y")) == f"{place.base_url}/a/b/x%20y"
    assert S3Place.parse("s3://my.bucket").base_url == "https://s3.us-east-1.amazonaws.com/my.bucket"
    own = S3Place.parse("s3://my-bucket", endpoint="https://s3.example.org/")
    assert (own.url("k"), own.url(query={"uploads": ""}), str(own)) == (
        "https://s3.example.org/my-bucket/k",
        "https://s3.example.org/my-bucket?uploads=",
        "s3://my-bucket",
    )
    for url in ("s3://", "s3://ab", "s3://UPPER", "s3://b_d/x", "http://x", "s3://bucket/a//b", "s3://bucket/../x"):
        with pytest.raises(ConfigError):
            S3Place.parse(url)
    for endpoint in ("s3.example.org", "ftp://x", "https://user@x", "https://x?y"):
        with pytest.raises(ConfigError):
            S3Place.parse("s3://bucket", endpoint=endpoint)


def test_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="none found"):
        find_credentials()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-env")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert find_credentials().get_frozen_credentials().access_key == "from-env"
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = from-file\naws_secret_access_key = s\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        find_credentials(file)
    file.chmod(0o600)
    assert find_credentials(file).get_frozen_credentials().access_key == "from-file"
    with pytest.raises(ConfigError, match="can't be read"):
        find_credentials(tmp_path / "none")
    empty = tmp_path / "empty"
    empty.write_text("[other]\n")
    empty.chmod(0o600)
    with pytest.raises(ConfigError, match="no \\[default\\]"):
        find_credentials(empty)


async def test_the_validators_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from subnet.store.embedded import EmbeddedStore
    from subnet.store.s3 import S3Store

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    plain = ValidatorSettings(directory=tmp_path, store_secret=tmp_path / "secret")
    stores = [await make_store(plain, "hot")]
    places = [("s3://bucket/a", "http://one"), ("s3://bucket/b", "http://one"), ("s3://bucket/a", "http://two")]
    for url, endpoint in places:
        settings = ValidatorSettings(directory=tmp_path, store_url=url, store_endpoint=endpoint)
        stores.append(await make_store(settings, "hot"))
    assert [type(store) for store in stores] == [EmbeddedStore, S3Store, S3Store, S3Store]
    indexes = {store._index.path for store in stores[1:] if isinstance(store, S3Store)}
    assert len(indexes) == len(places), "no two places share one"
    for store in stores:
        await store.close()
    with pytest.raises(ConfigError, match="no effect"):
        ValidatorSettings(store_endpoint="http://one")


CASES = [
    (404, "NoSuchKey", "", NotFound),
    (404, "NoSuchUpload", "", NotFound),
    (404, "NoSuchBucket", "", ConfigError),
    (404, "", "", NotFound),
    (412, "PreconditionFailed", "", Exists),
    (412, "", "", Exists),
    (409, "ConditionalRequestConflict", "", Busy),
    (409, "OperationAborted", "", Busy),
    (403, "AccessDenied", "Request has expired", Expired),
    (403, "ExpiredPresignRequest", "", Expired),
    (403, "RequestTimeTooSkewed", "The difference is too large", Expired),
    (403, "AccessDenied", "Request is not yet valid", Expired),
    (403, "AccessDenied", "Access Denied", BadGrant),
    (403, "SignatureDoesNotMatch", "", BadGrant),
    (403, "InvalidAccessKeyId", "", BadGrant),
    (400, "ExpiredToken", "The provided token has expired.", Refused),
    (403, "", "", BadGrant),
    (400, "BadDigest", "", HashMismatch),
    (400, "XAmzContentSHA256Mismatch", "", HashMismatch),
    (400, "InvalidRequest", "Value for x-amz-checksum-sha256 header is invalid: checksum", HashMismatch),
    (400, "EntityTooLarge", "", TooLarge),
    (400, "EntityTooSmall", "", InputError),
    (400, "IncompleteBody", "", InputError),
    (400, "RequestTimeout", "", Unreachable),
    (416, "InvalidRange", "", InputError),
    (503, "SlowDown", "", Busy),
    (503, "", "", Busy),
    (500, "InternalError", "", Busy),
    (502, "", "", Unreachable),
    (504, "", "", Unreachable),
    (507, "", "", OutOfSpace),
    (501, "NotImplemented", "", ConfigError),
    (301, "PermanentRedirect", "", ConfigError),
    (307, "", "", ConfigError),
    (400, "SomethingNew", "of another server", Refused),
]


@pytest.mark.parametrize("namespace", ["", ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'])
def test_every_answer_is_an_error_of_the_contract(namespace: str) -> None:
    for status, code, message, kind in CASES:
        body = f"<?xml version='1.0'?>\n<Error{namespace}><Code>{code}</Code><Message>{message}</Message></Error>"
        error = s3_error("PUT x", status, body.encode() if code else b"")
        assert type(error) is kind, (status, code, message, error)
        assert error.retryable == (kind in (Expired, Busy, Unreachable))
        assert "PUT x" in str(error)


@pytest.mark.parametrize("body", [b"", b"no xml", b"<Error><Code>", b"<html>later</html>", b"\xff\xfe", b"<a/>" * 3])
def test_an_answer_that_is_no_xml_counts_by_its_status(body: bytes) -> None:
    assert isinstance(s3_error("GET x", 404, body), NotFound)
    assert isinstance(s3_error("GET x", 418, body), IotaError)


def test_a_clock_that_is_off_is_named() -> None:
    date = "Mon, 30 Nov 2026 12:00:00 GMT"
    clock = ManualClock()
    assert clock.wall_ns() > 0
    body = b"<Error><Code>RequestTimeTooSkewed</Code></Error>"
    late = s3_error("x", 403, body, server_date=date, now_s=NOW.timestamp() - 5000)
    assert "-5000 s off the store's" in late.reason
    assert "NTP" in late.hint
    fine = s3_error("x", 403, body, server_date="not a date", now_s=NOW.timestamp())
    assert "off" not in fine.reason
