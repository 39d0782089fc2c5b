"""How many examples a property test tries: all of them in the full tier, a quarter in the fast one."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int, least: int = 5) -> settings:
    """``count`` examples in the full tier, and in proportion under another Hypothesis profile, but at least so many."""
    return settings(max_examples=max(least, count * settings.default.max_examples // 100))  # type: ignore[union-attr]
