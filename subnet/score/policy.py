"""The constants of the score, where whoever counts looks for them; they stand in :mod:`subnet.policy.score`, with their reasons."""

from __future__ import annotations

from subnet.policy.score import BOUNDS as BOUNDS
from subnet.policy.score import ScorePolicy as ScorePolicy
from subnet.policy.score import WorkPolicy as WorkPolicy
