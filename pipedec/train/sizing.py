"""The size of a new draft that a plan's timestep pays for."""

from __future__ import annotations

from pathlib import Path

from pipedec.config import ClusterConfig, load_cluster
from pipedec.core.errors import UserError
from pipedec.families import KNOWN_MODELS, model_by_name
from pipedec.plan.draft_size import DraftEstimate, DraftSizing
from pipedec.plan.partition import plan
from pipedec.train.draft import HEAD_DIM, DraftShape

_WIDTH_PER_LAYER = 80  # as SmolLM2's draft has: 320 in 4 layers
_MOST_IN_HEAD = 0.5  # of a draft's weights: with more, it leaves out the rarest tokens
_STAND_IN = "llama-3.2-1b"  # in a plan whose draft is yet to be trained


def find_plan(asked: str, target: Path | None) -> ClusterConfig:
    """The cluster and partition that FILE[:PARTITION] names, with ``target`` in place of its own if there is one.

    Raises UserError if there are none, or the target is a shape without weights.
    """
    file, partition = asked, None
    if not Path(asked).exists() and ":" in asked:
        file, _, partition = asked.rpartition(":")
    models = {"draft": _STAND_IN} | ({} if target is None else {"target": str(target)})
    config = load_cluster(file).for_partition(partition, models)
    if config.target in KNOWN_MODELS:
        raise UserError(f"--size-for {asked}: its target {config.target} is a shape without weights: give --target DIR")
    return config


def size_for(config: ClusterConfig) -> tuple[DraftShape, DraftEstimate]:
    """The new draft with the fastest tokens on rank 0's device, by its estimated accuracy. UserError if the plan cannot run.

    A wider draft is also deeper. It knows all tokens unless their head were more than half of its weights.
    """
    made = plan(config)
    if made.problems:
        raise UserError("it does not fit: " + "; ".join(made.problems))
    sizing, target = DraftSizing(made), model_by_name(config.target)
    found = []
    for hidden_size in range(HEAD_DIM, target.hidden_size + 1, HEAD_DIM):
        shape = _shape(hidden_size, target.vocab_size)
        size = shape.model_config(target.vocab_size)
        estimate = sizing.best("a new draft", size) if size.parameters < target.parameters else None
        if estimate is not None:
            found.append((shape, estimate))
    if not found:
        raise UserError(f"no new draft is smaller than {config.target} and fits the device of rank 0: use a larger device")
    return min(found, key=lambda one: one[1].pace.ms_per_token)


def _shape(hidden_size: int, vocab_size: int) -> DraftShape:
    layers = max(hidden_size // _WIDTH_PER_LAYER, 1)
    in_layers = layers * DraftShape(hidden_size, layers).model_config(vocab_size).layer_parameters
    most = round(in_layers * _MOST_IN_HEAD / (1 - _MOST_IN_HEAD) / hidden_size)
    return DraftShape(hidden_size, layers, None if most >= vocab_size else max(most // 100 * 100, 100))


def described(shape: DraftShape, estimate: DraftEstimate) -> str:
    """Why it is the size for a plan, in one line."""
    tokens = "all tokens" if shape.vocabulary is None else f"the {shape.vocabulary:,} most frequent tokens"
    times = "once" if estimate.pace.forwards == 1 else f"{estimate.pace.forwards} times"
    size = f"--hidden-size {shape.hidden_size} --layers {shape.layers}, {tokens}: {_millions(estimate.parameters)} parameters"
    drafts = f"drafts {times} in a timestep of {estimate.pace.timestep_ms:.1f} ms, {estimate.forward_ms:.2f} ms each"
    return f"{size}; {drafts}; estimated, once trained: top-1 {estimate.top1:.0%}, {estimate.pace.ms_per_token:.1f} ms per token"


def _millions(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.1f} million"
