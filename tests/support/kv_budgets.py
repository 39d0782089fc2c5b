"""Pipelines with little KV memory."""

from __future__ import annotations

from pipedec.plan.spec import PipelineSpec


def with_slots(spec: PipelineSpec, slots: int) -> PipelineSpec:
    """With KV pools of at most so many slots."""
    return spec.replaced(kv_cache_memory=slots * max(rank.token_bytes for rank in spec.kv_budget().ranks))
