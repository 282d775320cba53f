"""Networks by name, for tests of what is below an experiment."""

from __future__ import annotations

from fed_dp.models import NetworkSpec

network = NetworkSpec.named
