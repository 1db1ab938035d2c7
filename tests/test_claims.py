"""A claim that names as a hash what can't be one is refused before anything else looks at it."""

from __future__ import annotations

import pytest

from subnet.errors import InputError
from subnet.protocol import messages as msg
from subnet.protocol.claims import check_claims, hashes_of
from subnet.words import Commitment, Member

HEX = "0123456789abcdef" * 4
MEMBER = Member("hotkey", 1, 1)


def claims(value: str) -> list[msg.AnyClaim]:
    return [
        msg.ForwardReceipt(0, 0, 1, 1, HEX, value, 0.1),
        msg.BackwardReceipt(0, 0, 1, 1, value, HEX, 0.1),
        msg.FailedClaim(0, 0, 1, 1, value, "no memory"),
        msg.UpdatedClaim(0, value),
        msg.CommitClaim(0, 0, 1, Commitment(MEMBER, 0, (0,), ((0, HEX), (1, value)))),
        msg.MergedClaim(0, 0, 1, 0, HEX, value, 1, "0"),
        msg.MergedClaim(0, 0, 1, 0, value, HEX, 1, "0"),
        msg.SnapshotClaim(0, 0, value, HEX),
    ]


@pytest.mark.parametrize("value", ["ab", HEX.upper(), HEX + "0", HEX[:-1] + "g", "../" + HEX[3:], HEX[:-1] + "\n"])
@pytest.mark.parametrize("index", range(8))
def test_what_is_no_hash_is_refused(value, index):
    claim = claims(value)[index]
    with pytest.raises(InputError, match=type(claim).__name__):
        check_claims([*claims(HEX), claim])


def test_hashes_and_absent_boundaries_pass():
    check_claims(claims(HEX))
    check_claims([msg.ForwardReceipt(0, 0, 0, 1, "", "", 0.1), msg.CheckClaim(0, 0, 1, True), msg.LeavingClaim()])
    assert hashes_of(msg.CheckClaim(0, 0, 1, True)) == ()
