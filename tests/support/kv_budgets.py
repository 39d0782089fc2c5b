"""Pipelines with little KV memory."""

from __future__ import annotations

from pipedec.plan.budgets import kv_budget
from pipedec.plan.spec import PipelineSpec


def with_slots(spec: PipelineSpec, slots: int) -> PipelineSpec:
    """With KV pools of at most so many slots."""
    return spec.replaced(kv_cache_memory=slots * max(rank.token_bytes for rank in kv_budget(spec).ranks))
