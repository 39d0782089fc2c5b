"""The memory of a pipeline that can be built: what its ranks need, how many tokens every rank has room for, and how many states
of recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipedec.families import StateCounts, model_by_name
from pipedec.plan.costs import ModelCosts
from pipedec.plan.dtypes import kept_formats
from pipedec.plan.kv_memory import DEFAULT_BYTES, TREE_ROWS, KVBudget, RankBudget, RankNeeds
from pipedec.plan.spec import PipelineSpec
from pipedec.plan.state_memory import NO_STATES, counted_states, rows_in_flight


def kv_slots(spec: PipelineSpec) -> int:
    """Slots of every rank's KV pool: tokens for which every rank has memory, but no more than requests can use.

    An emulation has those of the devices that it emulates.
    """
    if spec.agreed_slots is not None:
        return spec.agreed_slots
    if spec.emulated_tokens is not None:
        return spec.emulated_tokens // spec.kv_block * spec.kv_block
    return kv_budget(spec).tokens


def check_kv_budget(spec: PipelineSpec) -> None:
    """Raises UserError if the KV budget holds no request of ``max_model_len``, or not even a few hundred tokens, or if there is
    no memory for a state of recurrent layers.

    Without a cluster.yaml it is unknown which memory for keys and values will be measured.
    """
    state_counts(spec), draft_state_counts(spec)
    if spec.places is not None or not spec.measures_memory:
        agreed_budget(spec, {})


def agreed_budget(spec: PipelineSpec, measured: Mapping[int, int]) -> KVBudget:
    """``kv_budget``. Raises UserError as ``check_kv_budget``."""
    budget = kv_budget(spec, measured)
    budget.check(spec.settings.limits.max_model_len, spec.knee)
    return budget


def state_counts(spec: PipelineSpec) -> StateCounts:
    """The size of every stage's pools for recurrent layers, on all ranks the same: by settings and configs alone. UserError if
    there is no memory for a single state.
    """
    costs, limits = _stateless_costs(spec, 1), spec.settings.limits
    state_bytes = [costs.state_bytes(range(*layers)) for layers in spec.layers]
    rows = rows_in_flight(spec.knee, spec.settings.passage)
    return counted_states(state_bytes, limits.state_memory_bytes, limits.max_num_seqs, spec.shares_prefixes, rows)


def draft_state_counts(spec: PipelineSpec) -> StateCounts:
    """As ``state_counts``, of the draft model, whose trees have more rows, and whose requests share no prefixes. None of either
    without a draft model.
    """
    if spec.draft is None:
        return NO_STATES
    costs, limits = _stateless_costs(spec, 0), spec.settings.limits
    rows = TREE_ROWS * (spec.settings.passage + 1)
    state_bytes = [costs.state_bytes(range(costs.model.num_hidden_layers))]
    return counted_states(state_bytes, limits.state_memory_bytes, limits.max_num_seqs, False, rows)


def kv_budget(spec: PipelineSpec, measured: Mapping[int, int] | None = None) -> KVBudget:
    """The memory of every rank for keys and values: bytes as given by the user, else as ``measured`` (by rank) or planned."""
    limits, target = spec.settings.limits, _costs(spec, 1)
    token_bytes = {rank: target.token_bytes(range(*layers)) for rank, layers in enumerate(spec.layers, start=1)}
    if spec.draft is not None:
        draft = _costs(spec, 0)
        token_bytes = {0: draft.token_bytes(range(draft.model.num_hidden_layers)), **token_bytes}
    ranks = []
    for rank, per_token in token_bytes.items():
        planned = DEFAULT_BYTES if spec.kv_room is None else spec.kv_room[rank]
        ranks.append(RankBudget(rank, limits.kv_cache_bytes or (measured or {}).get(rank, planned), per_token))
    return KVBudget(ranks, spec.max_context, limits.max_num_seqs, spec.settings.passage, spec.kv_block)


def rank_needs(spec: PipelineSpec, rank: int) -> RankNeeds:
    """Memory that a rank with a model allocates on a GPU. Weights are counted as its part of the checkpoint has them."""
    costs = replace(_costs(spec, rank), reads_headers=True)
    layers = range(costs.model.num_hidden_layers) if rank == 0 else range(*spec.layers[rank - 1])
    token_bytes = costs.token_bytes(layers)
    held_bytes = costs.weight_bytes(layers, rank <= 1, rank in (0, len(spec.layers)))
    beyond_the_slots = spec.kv_block * token_bytes  # memory of the pool for a learned prompt, and unused slots
    return RankNeeds(held_bytes + costs.state_pool_bytes(layers) + costs.rank_bytes + beyond_the_slots, token_bytes)


def _costs(spec: PipelineSpec, rank: int) -> ModelCosts:
    """The costs of the model of a rank."""
    return replace(_stateless_costs(spec, rank), states=state_counts(spec) if rank else draft_state_counts(spec))


def _stateless_costs(spec: PipelineSpec, rank: int) -> ModelCosts:
    """As ``_costs``, before it is known how many states there are."""
    path, weights = (spec.draft, spec.largest_draft_weights) if rank == 0 else (spec.target, spec.weights)
    max_model_len = spec.settings.limits.max_model_len or 0
    formats = kept_formats(spec.settings.numbers.dequantize)
    return ModelCosts(model_by_name(str(path)), weights, spec.knee, max_model_len, spec.settings.passage, formats=formats)
