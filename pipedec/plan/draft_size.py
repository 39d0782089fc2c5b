"""The size of draft that a plan's timestep pays for: a larger one is right more often, but fewer of its forwards fit.

Estimates, as they follow from fitted curves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pipedec.core.errors import UserError
from pipedec.core.limits import DRAFTED_ROWS
from pipedec.families import KNOWN_MODELS, ModelConfig, model_by_name
from pipedec.hardware import DEVICES, QUANTIZED_BITS, WeightFormat
from pipedec.plan.costs import ModelCosts
from pipedec.plan.curves import SizeCurve
from pipedec.plan.partition import Pace, Plan


@dataclass(frozen=True)
class DraftEstimate:
    """The forwards of a draft on rank 0's device, and what they bring.

    Attributes:
        num_bytes: of its weights.
        forward_ms: of one forward of ``DRAFTED_ROWS`` rows.
    """

    name: str
    parameters: int
    weights: WeightFormat
    num_bytes: int
    forward_ms: float
    top1: float
    pace: Pace


@dataclass(frozen=True)
class DraftSizing:
    """Estimates for the device of a plan's rank 0. Raises UserError for a plan without a draft."""

    plan: Plan
    curve: SizeCurve = SizeCurve()

    def __post_init__(self) -> None:
        if self.plan.draft is None:
            raise UserError(f"partition {self.plan.partition} has no draft: name one (draft:) and its device (draft_device:)")

    @classmethod
    def measured(cls, plan: Plan, top1: float | None) -> DraftSizing:
        """With the curve through the measured accuracy of the plan's own draft, if there is one."""
        sizing = cls(plan)
        return sizing if top1 is None else replace(sizing, curve=SizeCurve.through(sizing.share(sizing._costs.model), top1))

    def share(self, shape: ModelConfig) -> float:
        """The share of the target's parameters that a draft has."""
        return shape.parameters / model_by_name(self.plan.target).parameters

    @property
    def present(self) -> DraftEstimate:
        """The plan's own draft."""
        return self._estimate("the plan's", self._costs)

    def known(self) -> list[DraftEstimate]:
        """The known models that are smaller than the target, have as many tokens and fit, the smallest first, each in its best
        format. Without the plan's own."""
        target = model_by_name(self.plan.target)
        shapes = sorted(KNOWN_MODELS.items(), key=lambda item: item[1].parameters)
        smaller = [
            (name, shape) for name, shape in shapes
            if shape.vocab_size == target.vocab_size and shape.parameters < target.parameters
        ]  # fmt: skip
        best = (self.best(name, shape, self._formats) for name, shape in smaller)
        own = self._costs.model.parameters, self._costs.weights
        return [one for one in best if one is not None and (one.parameters, one.weights) != own]

    def best(self, name: str, shape: ModelConfig, formats: Iterable[WeightFormat] = ()) -> DraftEstimate | None:
        """In the format with the fastest tokens, by default the plan's; None if it fits in none."""
        costs = [replace(self._costs, model=shape, weights=weights) for weights in formats or [self._costs.weights]]
        estimates = [self._estimate(name, one) for one in costs if self._fits(one)]
        return min(estimates, key=lambda one: one.pace.ms_per_token, default=None)

    @property
    def _costs(self) -> ModelCosts:
        assert self.plan.draft_costs is not None
        return self.plan.draft_costs

    @property
    def _formats(self) -> list[WeightFormat]:
        """16 bits and fewer."""
        dtype = "float16" if self._costs.weights.dtype == "float16" else "bfloat16"
        return [WeightFormat(dtype, quantize) for quantize in (None, *QUANTIZED_BITS)]

    def _estimate(self, name: str, costs: ModelCosts) -> DraftEstimate:
        assert self.plan.draft is not None
        layers, device = costs.model.num_hidden_layers, DEVICES[self.plan.draft.placement.device]
        forward_ms = costs.pass_time(device, layers, True).ms(DRAFTED_ROWS)
        top1, num_bytes = self.curve.top1(self.share(costs.model)), costs.weight_bytes(layers, True, True)
        pace = self.plan.pace(top1, forward_ms)
        return DraftEstimate(name, costs.model.parameters, costs.weights, num_bytes, forward_ms, top1, pace)

    def _fits(self, costs: ModelCosts) -> bool:
        """With memory for one request of the whole context, beside a stage if they share the device."""
        assert self.plan.draft is not None
        layers, device = costs.model.num_hidden_layers, self.plan.draft.placement.device
        needed = costs.weight_bytes(layers, True, True) + layers * costs.layer_kv_bytes + costs.workspace_bytes(device)
        return needed <= self._room

    @property
    def _room(self) -> int:
        """Memory for the draft: all that a stage on the same device does not need itself."""
        plan = self.plan
        assert plan.draft is not None
        if plan.shared_stage is None:
            return plan.draft.memory_bytes
        stage, slots = plan.stages[plan.shared_stage - 1], plan.max_model_len + plan.rows * (plan.passage + 1)
        needed = stage.weight_bytes + stage.workspace_bytes + slots * stage.kv_token_bytes
        return plan.draft.memory_bytes + stage.memory_bytes - needed
