"""Builds a pipeline from settings: checks the checkpoints, resolves automatic choices, and loads models and KV pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from pipedec.checkpoints import has_weights
from pipedec.config import AUTO, NONE, ClusterConfig, Cut, Models, Settings, checkpoint_dtype, model_shape
from pipedec.core import KNEE_ROWS, UserError
from pipedec.drafting import DraftModel
from pipedec.engine.devices import arithmetic_of, chosen_device, gpu_names, num_gpus
from pipedec.engine.sequences import Sequences
from pipedec.gguf import model_files
from pipedec.hardware import DEVICES, MODEL_SHAPES, WeightFormat, reported_device
from pipedec.messages import BitaDescription
from pipedec.model import (
    BitaWeights,
    Checkpoint,
    DraftVocabulary,
    ModelConfig,
    NewCapture,
    StageModel,
    checked_bita,
    device_capture,
)
from pipedec.plan.costs import ModelCosts
from pipedec.plan.dtypes import GIVEN, Arithmetic, chosen_dtypes, draft_dtype
from pipedec.plan.layers import even_layers, explicit_layers
from pipedec.plan.partition import plan as make_plan
from pipedec.plan.partition import room_of
from pipedec.plan.placement import Placement, rank_places
from pipedec.plan.spec import PipelineSpec
from pipedec.shipped import reference_pair, shipped_draft
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.text.prompt import Prompter, fits_vocabulary, load_tokenizer, same_tokenizer, vocabulary_digest

DEFAULTS = Settings()
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}

Progress = Callable[[int, int], None]


def resolve(settings: Settings = DEFAULTS, in_parts: bool = False) -> PipelineSpec:
    """Resolve a user's settings; by default the shipped pair in four stages.

    Args:
        in_parts: accept a host without all weights. The ranks that load weights must check that they are present.

    Raises:
        UserError: a checkpoint or a number is wrong, the KV budget is too small, or this machine does not have the device.
    """
    chosen_device(settings.cut.device)
    spec = _resolved(settings, None, in_parts)
    spec = replace(spec, row_room=room_on(spec, gpu_names() if settings.cut.device != "cpu" else []))
    spec.check_kv_budget()
    return spec


def resolve_partition(config: ClusterConfig, name: str | None = None) -> PipelineSpec:
    """The pipeline that a partition of a cluster.yaml describes, with the place of every rank. This host need not hold all
    weights; the ranks that load weights must check that they are present.

    Raises:
        UserError: there is no such partition, a model is a shape without weights, or as ``resolve``.
    """
    config = config.for_partition(name)
    name, _ = config.find_partition()
    for key in ("target", "draft"):
        if (model := getattr(config.settings.models, key)) in MODEL_SHAPES:
            raise UserError(f"{key}: {model} is a shape for planning and has no weights: give a checkpoint directory")
    plan, places = make_plan(config, name), rank_places(config, name)
    settings = config.settings.replaced(layers=tuple(len(stage.layers) for stage in plan.stages))
    spec = replace(
        _resolved(settings, places, in_parts=True), servers=config.servers, duplex=config.network.duplex,
        kv_room=(plan.draft.kv_room if plan.draft else 0, *(stage.kv_room for stage in plan.stages)),
        row_room=KNEE_ROWS if settings.cut.device == "cpu" else plan.room,
    )  # fmt: skip
    spec.check_kv_budget()
    return spec


def _resolved(settings: Settings, places: tuple[Placement, ...] | None, in_parts: bool) -> PipelineSpec:
    target, draft, bita = checked_models(settings.models, in_parts)
    trained = None if bita is None else checked_bita(bita, target)
    drafts_on, *computes_on = _arithmetics(settings.cut.device, places)
    numbers = settings.numbers
    chosen, drafting = chosen_dtypes((numbers.dtype, numbers.draft_dtype), checkpoint_dtype(target), drafts_on, computes_on)
    is_open = not drafts_on.is_gpu  # rank 0 asks its own processor
    return PipelineSpec(
        settings.replaced(
            target=str(target), draft=str(draft or NONE), bita=str(bita or NONE), dtype=chosen.name,
            draft_dtype=numbers.draft_dtype if is_open else drafting.name,
        ),
        stage_layers(settings.cut, ModelConfig.from_directory(target).num_layers),
        chosen.why,
        GIVEN if is_open else drafting.why,
        None if trained is None else BitaDescription(trained.num_masks, trained.num_prompt_tokens, trained.prompting),
        num_gpus(),
        places=places,
    )  # fmt: skip


def room_on(spec: PipelineSpec, gpus: Sequence[str]) -> int:
    """Rows that may enter at a timestep (see ``room_of``) if any stage may be on any of these GPUs.

    Args:
        gpus: names from their driver; ``KNEE_ROWS`` rows without any, and for one that is not in the table.
    """
    costs = ModelCosts(model_shape(str(spec.target)), spec.weights, KNEE_ROWS, 0, spec.topology.num_groups)
    parts = [(stop - start, rank == spec.topology.final_rank) for rank, (start, stop) in enumerate(spec.layers, start=1)]
    devices = [reported_device(name) or DEVICES["cpu"] for name in gpus] or [DEVICES["cpu"]]
    return room_of((device, costs.pass_time(device, *part)) for device in devices for part in parts)


def checked_models(models: Models, in_parts: bool = False) -> tuple[Path, Path | None, Path | None]:
    """The target, draft and BiTA; None for those that the pipeline does not use.

    Without a target they are the shipped ones. Another target has a draft of its own only if one is shipped for it, and needs
    none if it has a BiTA.

    Args:
        in_parts: as in ``checked``.

    Raises:
        UserError: a checkpoint is missing, damaged or does not fit the others.
    """
    shipped = reference_pair() if models.target is None else None
    target = Path(models.target) if models.target is not None else reference_pair() / "target"
    config = checked(target, in_parts)
    draft = _chosen(models.draft, lambda: shipped / "draft" if shipped else shipped_draft(str(target)))
    bita = _chosen(models.bita, lambda: shipped and shipped / "bita")
    if models.draft is None and draft is None and bita is None:
        raise UserError("give --draft DIR beside --target (a small model with the same tokenizer), or --draft none")
    fits_vocabulary(target, config.vocab_size)
    if draft is not None:
        checked(draft, in_parts)
        _check_vocabulary(target, draft)
    return target, draft, bita


def checked(directory: Path, in_parts: bool = False) -> ModelConfig:
    """The config of a complete checkpoint.

    Args:
        in_parts: accept missing files with weights; those that are here must fit.

    Raises:
        UserError: it is missing, damaged, of an unsupported family, or lacks tensors.
    """
    config = ModelConfig.from_directory(directory)
    if not in_parts or has_weights(model_files(directory)):
        Checkpoint(directory).check_complete(config, in_parts)
    return config


def stage_layers(cut: Cut, num_layers: int) -> tuple[tuple[int, int], ...]:
    """For each stage, its first layer and the layer after its last. Raises UserError if they do not fit ``num_layers``."""
    parts = explicit_layers(cut.layers, num_layers) if isinstance(cut.layers, tuple) else even_layers(num_layers, cut.stages)
    return tuple((part.start, part.stop) for part in parts)


def weights_on(spec: PipelineSpec, rank: int, device: torch.device) -> tuple[WeightFormat, str]:
    """Weight format of a rank on its device, and the reason for it."""
    if rank > 0:
        return spec.weights, spec.dtype_why
    if spec.draft is None:
        return WeightFormat(spec.dtype), "there is no draft model"
    if spec.settings.numbers.draft_dtype != AUTO:
        return spec.largest_draft_weights, spec.draft_dtype_why
    chosen = draft_dtype(AUTO, spec.dtype, arithmetic_of(device))
    return WeightFormat(chosen.name, spec.settings.numbers.draft_quantize), chosen.why


def load_prompter(spec: PipelineSpec) -> Prompter:
    """The target's tokenizer, with the limits of the target and of the pipeline."""
    limit = spec.settings.limits.max_model_len
    return Prompter(spec.target, ModelConfig.from_directory(spec.target).max_positions, limit)


def load_stage(
    spec: PipelineSpec, rank: int, device: torch.device, progress: Progress | None = None, capture: NewCapture = device_capture
) -> StageWorker:
    """The worker of stage ``rank`` (1..n), its weights read from the target's checkpoint.

    Args:
        capture: how forwards on a device are captured.
    """
    config = ModelConfig.from_directory(spec.target)
    layers, dtype = range(*spec.layers[rank - 1]), DTYPES[spec.dtype]
    model = StageModel.load(spec.target, layers, dtype, device, config, progress, spec.settings.numbers.quantize)
    model.capture = capture(device)
    if spec.bita is not None:
        model.attach(BitaWeights.load(spec.bita, config, layers, dtype, device))
    kind = FinalStageWorker if rank == spec.topology.final_rank else StageWorker
    return kind(model, Sequences(spec.target).of, device, slots=spec.kv_slots, block=spec.kv_block, stage=rank)


def load_drafter(
    spec: PipelineSpec, device: torch.device, progress: Progress | None = None, capture: NewCapture = device_capture
) -> DraftModel | None:
    """The whole draft model; None if there is no draft. Arguments as of ``load_stage``."""
    if spec.draft is None:
        return None
    config = ModelConfig.from_directory(spec.draft)
    layers = range(config.num_layers)
    weights, _ = weights_on(spec, 0, device)
    model = StageModel.load(spec.draft, layers, DTYPES[weights.dtype], device, config, progress, weights.quantize)
    model.capture = capture(device)
    vocabulary = DraftVocabulary.load(spec.draft, device)
    return DraftModel(
        model, slots=spec.kv_slots, block=spec.kv_block, shares_prefixes=spec.shares_prefixes, vocabulary=vocabulary
    )


def _chosen(given: str | None, shipped: Callable[[], Path | None]) -> Path | None:
    """The given directory; ``shipped`` if none is given; None for ``"none"``."""
    if given is None:
        return shipped()
    return None if given == NONE else Path(given)


def _check_vocabulary(target: Path, draft: Path) -> None:
    """Raises UserError if the draft's tokens are not the target's."""
    known = DraftVocabulary.load(draft)
    if known is None:
        same_tokenizer(target, draft)
    elif known.of != vocabulary_digest(load_tokenizer(target)):
        raise UserError(f"the draft {draft} was trained for a target with another vocabulary than {target}: use its own draft")


def _arithmetics(device: str, places: Sequence[Placement] | None) -> list[Arithmetic]:
    """Arithmetic of rank 0's device, then of the stages': of the planned devices, or of this machine's for ``device``."""
    if places is not None and device == AUTO:
        return [Arithmetic.planned(place.device) for place in places]
    here = arithmetic_of(torch.device("cuda" if device == "cuda" or (device == AUTO and num_gpus()) else "cpu"))
    return [here, here]
