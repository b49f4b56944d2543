"""What a test needs and may not find."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def absent(reason: str) -> None:
    """Skip on a user's machine; in continuous integration nothing may be missing."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
