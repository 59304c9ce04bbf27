"""Which tests need a newer version of a package than the oldest that nalora supports."""

from __future__ import annotations

import pytest

from nalora.models import versions


def needs(package: str, version: str) -> pytest.MarkDecorator:
    """Skip a test of what older versions cannot do, which nalora refuses there: tests/models/test_versions.py."""
    return pytest.mark.skipif(versions.is_older(package, version), reason=f"{package} {version} or later can do this")


EXPERTS = needs("peft", versions.EXPERTS_BY_NAME)
# Older versions have the channels of experts on A, and the plan refuses them by this version.
CONTROLLED_EXPERTS = needs("peft", "0.21")
GRALORA = needs("peft", versions.TUNERS["gralora"])
