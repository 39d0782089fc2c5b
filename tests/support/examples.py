"""How many examples a property test tries: all of them in the full tier, a quarter in the fast one."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> settings:
    """``count`` examples in the full tier, and in proportion under another Hypothesis profile, but at least five."""
    return settings(max_examples=max(5, count * settings.default.max_examples // 100))  # type: ignore[union-attr]
