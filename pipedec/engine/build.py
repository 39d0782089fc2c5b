"""Builds a pipeline from settings: checks the checkpoints, resolves automatic choices, and loads models and KV pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from pipedec.checkpoints import CheckpointPart, has_weights
from pipedec.checkpoints.download import fetch, pinned
from pipedec.config import AUTO, NONE, ClusterConfig, Settings
from pipedec.config.cluster import PLANNED_MODEL_LEN
from pipedec.config.settings import Models
from pipedec.core.errors import UserError
from pipedec.core.limits import KNEE_ROWS
from pipedec.decoding import Drafter, Experience, LaneSizes, Resources, Scheduler
from pipedec.directories import REFERENCE_PAIR, shipped_part
from pipedec.drafting import DraftModel
from pipedec.engine.devices import arithmetic_of, chosen_device, gpu_names, num_gpus, widened_weights
from pipedec.families import ModelConfig, ModelImpl, checkpoint_dtype, is_known, model_by_name, model_config
from pipedec.formats import WeightFormat
from pipedec.gguf import located, model_files
from pipedec.hardware import DEVICES, DeviceSpec, reported_device
from pipedec.kv import KVManager
from pipedec.messages.run import BitaDescription
from pipedec.model import (
    BitaWeights,
    Checkpoint,
    DraftVocabulary,
    NewCapture,
    StageModel,
    checked_bita,
    choose_kernels,
    device_capture,
    load_markov,
)
from pipedec.plan.budgets import check_kv_budget, draft_state_counts, kv_slots, state_counts
from pipedec.plan.costs import ModelCosts
from pipedec.plan.dtypes import GIVEN, Arithmetic, check_quantize, draft_dtype, kept_formats, target_dtype
from pipedec.plan.partition import plan as make_plan
from pipedec.plan.partition import room_of
from pipedec.plan.placement import Placement, even_layers, explicit_layers, rank_places
from pipedec.plan.roofline import PassTime, expected_ms
from pipedec.plan.spec import PipelineSpec
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.text.prompt import Prompter, fits_vocabulary, load_tokenizer, same_tokenizer, vocabulary_digest
from pipedec.threads.sequences import Sequences

DEFAULTS = Settings()
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}

Progress = Callable[[int, int], None]


def resolve(settings: Settings = DEFAULTS, in_parts: bool = False) -> PipelineSpec:
    """Resolve a user's settings; by default the reference pair in four stages. ``in_parts`` accepts a host without all weights,
    which ranks check when they load them. Downloads models from the hub, or, in parts, what describes them. Raises UserError if a
    checkpoint, a number or the KV budget is wrong, or this machine lacks the device.
    """
    chosen_device(settings.cut.device)
    named = pinned(settings.models)
    if not in_parts:
        fetch(CheckpointPart(key, model, is_whole=True) for key, model in named.items())
    settings = settings.replaced(**named)
    spec = _resolved(settings, None, in_parts)
    passes = passes_on(spec, gpu_names() if settings.cut.device != "cpu" else [])
    spec = replace(spec, row_room=room_of(passes), row_ms=expected_ms(time for _, time in passes))
    check_kv_budget(spec)
    return spec


def resolve_partition(config: ClusterConfig, name: str | None = None) -> PipelineSpec:
    """The pipeline that a partition of a cluster.yaml describes, with the place of every rank. This host need not hold all
    weights; ranks check that when they load them. Raises UserError if there is no such partition, a model is a shape without
    weights, or as ``resolve``.
    """
    config = config.for_partition(name)
    name, _ = config.find_partition()
    for key in ("target", "draft"):
        if is_known(model := str(getattr(config.settings.models, key))):
            raise UserError(f"{key}: {model} is a shape for planning and has no weights: give a checkpoint directory")
    plan, places = make_plan(config, name), rank_places(config, name)
    settings = config.settings.replaced(layers=tuple(len(stage.layers) for stage in plan.stages))
    spec = replace(
        _resolved(settings, places, in_parts=True), servers=config.servers, duplex=config.network.duplex,
        kv_room=(plan.draft.kv_room if plan.draft else 0, *(stage.kv_room for stage in plan.stages)),
        row_room=KNEE_ROWS if settings.cut.device == "cpu" else plan.room,
        row_ms=expected_ms(stage.timing.compute for stage in plan.stages),
    )  # fmt: skip
    check_kv_budget(spec)
    return spec


def _resolved(settings: Settings, places: tuple[Placement, ...] | None, in_parts: bool) -> PipelineSpec:
    target, draft, bita = checked_models(settings.models, in_parts)
    trained = None if bita is None else checked_bita(bita, target)
    device = settings.cut.device
    if places is not None and device == AUTO:
        drafts_on, *computes_on = [Arithmetic.planned(place.device) for place in places]
    else:
        drafts_on = arithmetic_of(torch.device("cuda" if device == "cuda" or (device == AUTO and num_gpus()) else "cpu"))
        computes_on = [drafts_on]
    numbers = settings.numbers
    chosen = target_dtype(numbers.dtype, checkpoint_dtype(target), computes_on)
    drafting = draft_dtype(numbers.draft_dtype, chosen.name, drafts_on)
    config = model_config(target)
    check_quantize("quantize", numbers.quantize, target, config)
    if draft is not None:
        check_quantize("draft_quantize", numbers.draft_quantize, draft, model_config(draft))
    if places is None or settings.limits.max_model_len != PLANNED_MODEL_LEN:  # which a cluster.yaml need not have asked for
        _check_length(settings.limits.max_model_len, config)
    layers, num_layers = settings.cut.layers, config.num_hidden_layers
    parts = explicit_layers(layers, num_layers) if isinstance(layers, tuple) else even_layers(num_layers, settings.cut.stages)
    is_open = not drafts_on.is_gpu  # rank 0 chooses by its own processor
    return PipelineSpec(
        settings.replaced(
            target=str(target), draft=str(draft or NONE), bita=str(bita or NONE), dtype=chosen.name,
            draft_dtype=numbers.draft_dtype if is_open else drafting.name,
        ),
        tuple((part.start, part.stop) for part in parts),
        chosen.why,
        GIVEN if is_open else drafting.why,
        None if trained is None else BitaDescription(trained.num_masks, trained.num_prompt_tokens, trained.prompting),
        num_gpus(),
        places=places,
    )  # fmt: skip


def _check_length(max_model_len: int | None, config: ModelConfig) -> None:
    """Raises UserError if a limit of a prompt and its answer is above the model's own."""
    context, trained = config.context_length, config.max_position_embeddings
    if max_model_len is not None and max_model_len > context:
        stretched = f" (max_position_embeddings {trained}, stretched by its rope parameters)" if context > trained else ""
        raise UserError(
            f"max_model_len is {max_model_len}, but the target's context has {context} tokens{stretched}: give at most {context}"
        )


def passes_on(spec: PipelineSpec, gpus: Sequence[str]) -> list[tuple[DeviceSpec, PassTime]]:
    """A pass through every stage on each device on which it may be: these GPUs (names from their driver), or the processor."""
    formats = kept_formats(spec.settings.numbers.dequantize)
    costs = ModelCosts(model_by_name(str(spec.target)), spec.weights, KNEE_ROWS, 0, spec.settings.passage, formats=formats)
    parts = [(range(start, stop), rank == spec.topology.final_rank) for rank, (start, stop) in enumerate(spec.layers, start=1)]
    devices = [reported_device(name) or DEVICES["cpu"] for name in gpus] or [DEVICES["cpu"]]
    return [(device, costs.pass_time(device, *part)) for device in devices for part in parts]


def checked_models(models: Models, in_parts: bool = False) -> tuple[Path, Path | None, Path | None]:
    """The target, draft and BiTA; None for those that the pipeline does not use. Raises UserError if a checkpoint is missing,
    damaged or does not fit the others.

    Without a target they are those of the reference pair. Another target has a draft of its own only if one is shipped for it,
    and needs none if it has a BiTA. With ``in_parts`` files with weights may be missing.
    """
    target = Path(models.target) if models.target is not None else located(REFERENCE_PAIR)

    def chosen(given: str | None, name: str) -> Path | None:
        if given is not None:
            return None if given == NONE else Path(given)
        return shipped_part(models.target or REFERENCE_PAIR, name)

    config = checked(target, in_parts, models.model_impl)
    draft, bita = chosen(models.draft, "draft"), chosen(models.bita, "bita")
    if models.draft is None and draft is None and bita is None:
        raise UserError("give --draft DIR beside --target (a small model with the same tokenizer), or --draft none")
    fits_vocabulary(target, config.vocab_size)
    if draft is not None:
        checked(draft, in_parts)
        known = DraftVocabulary.load(draft)
        if known is None:
            same_tokenizer(target, draft)
        elif known.of != vocabulary_digest(load_tokenizer(target)):
            raise UserError(
                f"the draft {draft} was trained for a target with another vocabulary than {target}: use its own draft"
            )
    return target, draft, bita


def checked(directory: Path, in_parts: bool = False, impl: ModelImpl = "auto") -> ModelConfig:
    """The config of a complete checkpoint; ``in_parts`` accepts missing files with weights. Raises UserError if it is damaged."""
    config = model_config(directory, impl)
    if not in_parts or has_weights(model_files(directory)):
        Checkpoint(directory).check_complete(config, in_parts)
    return config


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
    config = model_config(spec.target)
    return Prompter(spec.target, config.context_length, spec.settings.limits.max_model_len, config.vocab_size)


def load_stage(
    spec: PipelineSpec, rank: int, device: torch.device, progress: Progress | None = None, capture: NewCapture = device_capture
) -> StageWorker:
    """The worker of stage ``rank`` (1..n) with weights from the target's checkpoint; ``capture``: how forwards are captured."""
    config = model_config(spec.target, spec.settings.models.model_impl)
    layers, dtype = range(*spec.layers[rank - 1]), DTYPES[spec.dtype]
    numbers = spec.settings.numbers
    choose_kernels(numbers.kernels, device, dtype)
    widens, _ = widened_weights(config, spec.dtype, device, numbers.dequantize)
    model = StageModel.load(spec.target, layers, dtype, device, config, progress, numbers.quantize, widens)
    model.capture = capture(device)
    if spec.bita is not None:
        model.attach(BitaWeights.load(spec.bita, config, layers, dtype, device))
    kind = FinalStageWorker if rank == spec.topology.final_rank else StageWorker
    pools = {"slots": kv_slots(spec), "block": spec.kv_block}
    return kind(model, Sequences(spec.target).of, device, stage=rank, states=state_counts(spec), **pools)


def load_drafter(
    spec: PipelineSpec, device: torch.device, progress: Progress | None = None, capture: NewCapture = device_capture
) -> DraftModel | None:
    """The whole draft model; None if there is no draft. Arguments as of ``load_stage``."""
    if spec.draft is None:
        return None
    config = model_config(spec.draft)
    layers = range(config.num_hidden_layers)
    weights, _ = weights_on(spec, 0, device)
    dtype = DTYPES[weights.dtype]
    choose_kernels(spec.settings.numbers.kernels, device, dtype)
    widens, _ = widened_weights(config, weights.dtype, device, spec.settings.numbers.dequantize)
    model = StageModel.load(spec.draft, layers, dtype, device, config, progress, weights.quantize, widens)
    model.capture = capture(device)
    vocabulary = DraftVocabulary.between(spec.draft, config.vocab_size, model_config(spec.target).vocab_size, device)
    return DraftModel(model, kv_slots(spec), spec.kv_block, spec.shares_prefixes, vocabulary, draft_state_counts(spec))


def new_scheduler(
    spec: PipelineSpec, drafter: Drafter | None, device: torch.device, lane_sizes: LaneSizes = LaneSizes(),
    experience: Experience | None = None,
) -> Scheduler:  # fmt: skip
    """The scheduler of a pipeline's requests, with all of its KV memory; ``device`` is the draft model's."""
    states = state_counts(spec) if model_config(spec.target).is_recurrent else None
    kv = KVManager(kv_slots(spec), spec.kv_block, spec.shares_prefixes, None if states is None else states.snapshots)
    markov = None if spec.bita is None else load_markov(spec.bita, model_config(spec.target))
    experience = experience or Experience(spec.settings.passage, expected_ms=spec.expected_ms)
    resources = Resources(experience, drafter, device, spec.trained_masks, markov)
    return Scheduler(resources, kv, spec.knee, lane_sizes, states=states)
