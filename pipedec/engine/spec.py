"""What a pipeline is made of: models, layers, groups, dtype, device. Plain data, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from pipedec.config import ClusterConfig, ServerConfig, checkpoint_dtype
from pipedec.core import KNEE_ROWS, MAX_NUM_SEQS, MAX_WAITING, UserError
from pipedec.decoding import Drafter
from pipedec.drafting import DraftModel
from pipedec.engine.arithmetic import arithmetic_of
from pipedec.engine.sequences import Sequences
from pipedec.hardware import DEVICES as DEVICE_KINDS
from pipedec.hardware import MODEL_SHAPES, QUANTIZED_BITS, WeightFormat
from pipedec.kv import KVManager
from pipedec.messages import BitaDescription, Choice, RankDescription, RunDescription
from pipedec.methods import LayerTreeOptions
from pipedec.model import (
    BitaConfig,
    BitaWeights,
    Checkpoint,
    DraftVocabulary,
    ModelConfig,
    NewCapture,
    StageModel,
    checked_bita,
    device_capture,
)
from pipedec.model.rotary import LENGTH_DEPENDENT
from pipedec.plan.dtypes import AUTO, GIVEN, Arithmetic, chosen_dtypes, draft_dtype
from pipedec.plan.emulation import Emulation
from pipedec.plan.kv_memory import CPU_BLOCK, CUDA_BLOCK, DEFAULT_BYTES, KVBudget, RankBudget
from pipedec.plan.layers import even_layers, explicit_layers
from pipedec.plan.partition import plan as make_plan
from pipedec.plan.placement import Placement, rank_places
from pipedec.shipped import reference_pair, shipped_draft
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.text.prompt import Prompter, fits_vocabulary, load_tokenizer, same_tokenizer, vocabulary_digest
from pipedec.topology import Topology

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("auto", "cpu", "cuda")
WINDOW_TIMESTEPS = 64
DISPATCHES = {"windows": WINDOW_TIMESTEPS, "tasks": 0}  # timesteps that the scheduler grants at once

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Models:
    """The models of a pipeline as a user names them.

    Attributes:
        target: a checkpoint directory, a GGUF file or the name of a public model; None for the shipped one.
        draft: a checkpoint directory; ``"none"`` for no draft. None takes the shipped draft for the shipped target, and no draft
            for another target with a BiTA.
        bita: a directory that ``pipedec train bita`` wrote; ``"none"`` for no BiTA. None takes the shipped one for the shipped
            target.
        quantize: ``int8`` or ``int4`` weights of the target, rounded as they are read; None for those of the dtype.
        draft_dtype, draft_quantize: of the draft; ``auto`` for 16 bits where they are fast (see ``plan.dtypes``), and not
            quantized. They change only how fast answers come.

    Raises:
        UserError: there is no such number format.
    """

    target: str | Path | None = None
    draft: str | Path | None = None
    bita: str | Path | None = None
    quantize: str | None = None
    draft_dtype: str = AUTO
    draft_quantize: str | None = None

    def __post_init__(self) -> None:
        for flag, given, known in (
            ("--quantize", self.quantize, QUANTIZED_BITS),
            ("--draft-dtype", self.draft_dtype, (AUTO, *DTYPES)),
            ("--draft-quantize", self.draft_quantize, QUANTIZED_BITS),
        ):
            if given is not None and given not in known:
                raise UserError(f"unknown {flag} {given!r}: choose one of {', '.join(known)}")

    def checked_paths(self) -> tuple[Path, Path | None, Path | None]:
        """The directories of target, draft and BiTA; None for what the pipeline does without.

        Raises:
            UserError: a checkpoint is missing, damaged or does not fit the others.
        """
        shipped = reference_pair() if self.target is None else None
        target = Path(self.target) if self.target is not None else reference_pair() / "target"
        draft = _chosen(self.draft, shipped / "draft" if shipped else shipped_draft(str(target)))
        bita = _chosen(self.bita, shipped and shipped / "bita")
        if self.draft is None and draft is None and bita is None:
            raise UserError("give --draft DIR beside --target (a small model with the same tokenizer), or --draft none")
        fits_vocabulary(target, checked(target).vocab_size)
        if draft is not None:
            checked(draft)
            _check_vocabulary(target, draft)
        if bita is not None:
            checked_bita(bita, target)
        return target, draft, bita


@dataclass(frozen=True)
class Cut:
    """How the target's layers are cut into stages.

    Attributes:
        groups: groups of stages that share a timestep; None for one per stage.
        layers: layers of each stage, which add up to the target's; None for an even cut.
    """

    stages: int = 4
    groups: int | None = None
    layers: Sequence[int] | None = None

    @property
    def topology(self) -> Topology:
        """Raises UserError for numbers that cannot be."""
        return Topology.even(self.stages, self.stages if self.groups is None else self.groups)

    def bounds(self, num_layers: int) -> tuple[tuple[int, int], ...]:
        """For each stage, its first layer and the layer behind its last. Raises UserError if they do not fit ``num_layers``."""
        if self.layers is None:
            parts = even_layers(num_layers, self.stages)
        elif len(self.layers) != self.stages:
            raise UserError(
                f"--layers lists {len(self.layers)} stages, but there are {self.stages}: give one number for each stage"
            )
        else:
            parts = explicit_layers(self.layers, num_layers)
        return tuple((part.start, part.stop) for part in parts)


@dataclass(frozen=True)
class Limits:
    """What a cluster takes at most.

    Attributes:
        max_model_len: tokens of a prompt and its answer; None for the target's context.
        max_num_seqs: requests in the pipeline at the same time.
        max_waiting: requests that wait for a place among them; further ones are refused.
        kv_cache_memory: bytes for keys and values on every rank; None for what the devices leave, or a common default.
        prefix_cache: let requests share the keys and values of equal beginnings.

    Raises:
        UserError: one is less than 1 (``max_waiting``: less than 0).
    """

    max_model_len: int | None = None
    max_num_seqs: int = MAX_NUM_SEQS
    max_waiting: int = MAX_WAITING
    kv_cache_memory: int | None = None
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--max-model-len", self.max_model_len, 1),
            ("--max-num-seqs", self.max_num_seqs, 1),
            ("--max-waiting", self.max_waiting, 0),
            ("--kv-cache-memory", self.kv_cache_memory, 1),
        ):
            if value is not None and value < least:
                raise UserError(f"{flag} must be at least {least}, not {value}")


@dataclass(frozen=True)
class PipelineSpec:
    """One pipeline.

    Attributes:
        draft, bita: None if there is none.
        dtype: of the target, the same on every rank; never ``auto``.
        draft_dtype: see ``Models``. With ``auto`` the processor of rank 0 decides when it loads the draft.
        quantize, draft_quantize: see ``Models``.
        dtype_why, draft_dtype_why: why the target and the draft have theirs.
        layers: for each stage, its first layer of the target and the layer behind its last.
        emulation: makes every rank's work take as long as on the devices that it names; None to run at full speed.
        dispatch: what the scheduler grants, ``windows`` of timesteps or single ``tasks``.
        max_model_len, max_num_seqs, max_waiting, kv_cache_memory, prefix_cache: see ``Limits``.
        tree: default tree of methods whose trees grow by layers; None for their own.
        places: the host and device of every rank, by the partition of a cluster.yaml; None if whoever starts the ranks decides.
        servers: the hosts of ``places``.
        duplex: of the links between the ranks: ``half`` if a rank takes part in one transfer at a time, else ``full``.
        kv_room: for each rank, from 0, the bytes for keys and values that a cluster.yaml leaves; None without one.
    """

    target: Path
    draft: Path | None
    topology: Topology
    layers: tuple[tuple[int, int], ...]
    dtype: str = "float32"
    device: str = "auto"
    emulation: Emulation | None = None
    dispatch: str = "windows"
    bita: Path | None = None
    max_model_len: int | None = None
    max_num_seqs: int = MAX_NUM_SEQS
    max_waiting: int = MAX_WAITING
    tree: LayerTreeOptions | None = None
    places: tuple[Placement, ...] | None = None
    servers: tuple[ServerConfig, ...] = ()
    duplex: str = "full"
    kv_cache_memory: int | None = None
    prefix_cache: bool = True
    kv_room: tuple[int, ...] | None = None
    quantize: str | None = None
    draft_dtype: str = AUTO
    draft_quantize: str | None = None
    dtype_why: str = GIVEN
    draft_dtype_why: str = GIVEN

    @classmethod
    def from_config(
        cls, config: ClusterConfig, partition_name: str | None = None, device: str = "auto", dispatch: str = "windows"
    ) -> PipelineSpec:
        """The pipeline that a partition of a cluster.yaml describes, with the place of every rank.

        Args:
            device: ``cpu`` or ``cuda`` for all ranks, whatever devices the partition names.

        Raises:
            UserError: there is no such partition, a model is a shape without weights, or as ``create``.
        """
        name, partition = config.find_partition(partition_name)
        config = config.for_partition(name)
        for key, model in (("target", config.target), ("draft", config.draft)):
            if model in MODEL_SHAPES:
                raise UserError(f"{key}: {model} is a shape to plan with and has no weights: give a checkpoint directory")
        plan, places = make_plan(config, name), rank_places(config, name)
        limits = Limits(config.max_model_len, config.max_num_seqs, config.max_waiting, config.kv_cache_bytes, config.prefix_cache)
        spec = cls._of(
            Models(config.target, config.draft, config.bita, config.quantize, config.draft_dtype, config.draft_quantize),
            Cut(partition.stages, partition.num_groups, [len(stage.layers) for stage in plan.stages]),
            config.dtype, device, dispatch, limits, config.tree, places,
        )  # fmt: skip
        found = replace(
            spec, servers=config.servers, duplex=config.network.duplex,
            kv_room=(plan.draft.kv_room if plan.draft else 0, *(stage.kv_room for stage in plan.stages)),
        )  # fmt: skip
        found.check_kv_budget()
        return found

    @classmethod
    def create(
        cls,
        models: Models = Models(),
        cut: Cut = Cut(),
        dtype: str = AUTO,
        device: str = "auto",
        dispatch: str = "windows",
        limits: Limits = Limits(),
        tree: LayerTreeOptions | None = None,
    ) -> PipelineSpec:
        """The pipeline that a user asks for; by default the shipped pair in four stages.

        Raises:
            UserError: one line that says what is wrong with the checkpoints or the numbers, or how little the KV budget holds.
        """
        spec = cls._of(models, cut, dtype, device, dispatch, limits, tree)
        spec.check_kv_budget()
        return spec

    @classmethod
    def _of(
        cls,
        models: Models,
        cut: Cut,
        dtype: str,
        device: str,
        dispatch: str,
        limits: Limits,
        tree: LayerTreeOptions | None,
        places: tuple[Placement, ...] | None = None,
    ) -> PipelineSpec:
        if dtype not in (AUTO, *DTYPES):
            raise UserError(f"unknown dtype {dtype!r}: choose one of {', '.join((AUTO, *DTYPES))}")
        if device not in DEVICES:
            raise UserError(f"unknown device {device!r}: choose one of {', '.join(DEVICES)}")
        if dispatch not in DISPATCHES:
            raise UserError(f"unknown dispatch {dispatch!r}: choose one of {', '.join(DISPATCHES)}")
        target, draft, bita = models.checked_paths()
        topology, layers = cut.topology, cut.bounds(ModelConfig.from_directory(target).num_layers)
        drafts_on, *computes_on = _arithmetics(device, places)
        given = dtype, models.draft_dtype
        chosen, drafting = chosen_dtypes(given, checkpoint_dtype(target), drafts_on, computes_on)
        if not drafts_on.is_gpu:
            drafting = Choice(models.draft_dtype, GIVEN)
        return cls(
            target, draft, topology, layers, chosen.name, device, dispatch=dispatch, bita=bita, tree=tree, places=places,
            quantize=models.quantize, draft_dtype=drafting.name, draft_quantize=models.draft_quantize,
            dtype_why=chosen.why, draft_dtype_why=drafting.why, **asdict(limits),
        )  # fmt: skip

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def weights_of(self, rank: int) -> WeightFormat:
        """Return a rank's weight format as every rank can know it: float32, the largest, for a draft that rank 0 will choose."""
        if rank == 0:
            return WeightFormat("float32" if self.draft_dtype == AUTO else self.draft_dtype, self.draft_quantize)
        return WeightFormat(self.dtype, self.quantize)

    def weights_on(self, rank: int, device: torch.device) -> tuple[WeightFormat, str]:
        """Return the weight format of a rank on its device, and the reason for it."""
        if rank > 0:
            return self.weights_of(rank), self.dtype_why
        if self.draft is None:
            return WeightFormat(self.dtype), "there is no draft model"
        if self.draft_dtype != AUTO:
            return self.weights_of(0), self.draft_dtype_why
        chosen = draft_dtype(AUTO, self.dtype, arithmetic_of(device))
        return WeightFormat(chosen.name, self.draft_quantize), chosen.why

    @property
    def window(self) -> int:
        """Timesteps that the scheduler grants at once; 0 for single tasks."""
        return DISPATCHES[self.dispatch]

    @property
    def knee(self) -> int:
        """Rows that a stage computes in about the time of one: of the emulated devices, else a common one."""
        return self.emulation.knee if self.emulation else KNEE_ROWS

    @property
    def num_stages(self) -> int:
        return self.topology.num_stages

    @property
    def kv_slots(self) -> int:
        """Slots of every rank's KV pool: tokens for which every rank has memory, but no more than requests can use.

        An emulation has those of the devices that it emulates.
        """
        if self.emulation is not None and self.emulation.kv_tokens is not None:
            return self.emulation.kv_tokens // self.kv_block * self.kv_block
        return self.kv_budget().tokens

    @property
    def kv_block(self) -> int:
        """Slots that are handed out together, on every rank the same: more where a rank may use CUDA, as its kernels need."""
        return CUDA_BLOCK if self._may_use_cuda else CPU_BLOCK

    @property
    def shares_prefixes(self) -> bool:
        """Whether requests share the keys and values of equal beginnings. They differ where they depend on a prompt's length."""
        rope_type = self._target_config.rope["rope_type"]
        return self.prefix_cache and self.dispatch == "windows" and rope_type not in LENGTH_DEPENDENT

    def kv_manager(self) -> KVManager:
        """The books of the pipeline's KV memory, as rank 0 begins them."""
        return KVManager(self.kv_slots, self.kv_block, self.shares_prefixes)

    def check_kv_budget(self) -> None:
        """Raises UserError if the KV budget holds no request of ``max_model_len``, or not even a few hundred tokens."""
        self.kv_budget().check(self.max_model_len, self.knee)

    def kv_budget(self) -> KVBudget:
        """The memory of every rank for keys and values, and what a token takes of it."""
        target = self._target_config
        layers = [stop - start for start, stop in self.layers]
        ranks = [self._rank_budget(rank, target, count) for rank, count in enumerate(layers, start=1)]
        if self.draft is not None:
            draft = ModelConfig.from_directory(self.draft)
            ranks.insert(0, self._rank_budget(0, draft, draft.num_layers))
        context = min(self.max_model_len or target.max_positions, target.max_positions)
        return KVBudget(ranks, context, self.max_num_seqs, self.topology.num_groups, self.kv_block)

    def _rank_budget(self, rank: int, config: ModelConfig, layers: int) -> RankBudget:
        num_bytes = self.kv_cache_memory or (DEFAULT_BYTES if self.kv_room is None else self.kv_room[rank])
        size = DTYPES[self.weights_of(rank).dtype].itemsize
        return RankBudget(rank, num_bytes, layers * config.num_cache_elements_per_row * size)

    @property
    def _target_config(self) -> ModelConfig:
        return ModelConfig.from_directory(self.target)

    @property
    def _may_use_cuda(self) -> bool:
        if self.device != "auto":
            return self.device == "cuda"
        if self.places is None:
            return num_gpus() > 0
        return any(DEVICE_KINDS[place.device].is_gpu for place in self.places)

    def rank_device(self, rank: int, local_rank: int, gpus: int | None = None) -> torch.device:
        """The device of a rank of a cluster. Rank 0 without a draft computes nothing and uses the CPU.

        Without places, the stages of a host have consecutive local ranks, so each gets a GPU of its own if there are as many GPUs
        as stages, also when such a rank 0 is on the host.

        Args:
            gpus: GPUs of this host; None counts them.

        Raises:
            UserError: this host has no such GPU.
        """
        if rank == 0 and self.draft is None:
            return torch.device("cpu")
        if self.places is None or self.device != "auto":
            return chosen_device(self.device, local_rank, gpus)
        place = self.places[rank]
        if not DEVICE_KINDS[place.device].is_gpu:
            return torch.device("cpu")
        found = num_gpus() if gpus is None else gpus
        if place.index >= found:
            raise UserError(
                f"{place.host} has no {place.device} #{place.index}: torch sees {found} GPUs there: run `pipedec doctor`, and "
                "check CUDA_VISIBLE_DEVICES"
            )
        return torch.device("cuda", place.index)

    def torch_device(self) -> torch.device:
        """The device of a rank that computes (see ``chosen_device``)."""
        return chosen_device(self.device)

    def description(self, ranks: Sequence[RankDescription] = (), digests: Mapping[str, str] | None = None) -> RunDescription:
        """What clients are told about the pipeline, of which ``ranks`` tell where they are."""
        draft, bita = str(self.draft) if self.draft else None, str(self.bita) if self.bita else None
        return RunDescription(
            self.topology.groups, self.layers, str(self.target), draft, bita, self.dtype, self.device, self.dispatch,
            self.max_model_len, self.tree, self.emulation.preset if self.emulation else None,
            tuple(ranks), digests or {}, self._trained_bita(), self.max_num_seqs, self.max_waiting,
            self.quantize, self.draft_dtype, self.draft_quantize,
        )  # fmt: skip

    def _trained_bita(self) -> BitaDescription | None:
        if self.bita is None:
            return None
        config = BitaConfig.from_directory(self.bita)
        return BitaDescription(config.num_masks, config.num_prompt_tokens, config.prompting)

    def load_prompter(self) -> Prompter:
        """The target's tokenizer, with the limits of the target and of this pipeline."""
        return Prompter(self.target, ModelConfig.from_directory(self.target).max_positions, self.max_model_len)

    def trained_masks(self) -> int:
        """Masks of the target's BiTA; 0 if it has none."""
        return BitaConfig.from_directory(self.bita).num_masks if self.bita else 0

    def load_stage(
        self, rank: int, device: torch.device, progress: Progress | None = None, capture: NewCapture = device_capture
    ) -> StageWorker:
        """The worker of stage ``rank`` (1..n), its weights read from the target's checkpoint.

        Args:
            capture: how forwards on a device are captured.
        """
        config = ModelConfig.from_directory(self.target)
        layers = range(*self.layers[rank - 1])
        model = StageModel.load(self.target, layers, self.torch_dtype, device, config, progress, self.quantize)
        model.capture = capture(device)
        if self.bita is not None:
            model.attach(BitaWeights.load(self.bita, config, layers, self.torch_dtype, device))
        kind = FinalStageWorker if rank == self.topology.final_rank else StageWorker
        return kind(model, Sequences(self.target).of, device, slots=self.kv_slots, block=self.kv_block, stage=rank)

    def load_drafter(
        self, device: torch.device, progress: Progress | None = None, capture: NewCapture = device_capture
    ) -> Drafter | None:
        """The whole draft model; None if there is no draft. Arguments as of ``load_stage``."""
        if self.draft is None:
            return None
        config = ModelConfig.from_directory(self.draft)
        layers = range(config.num_layers)
        weights, _ = self.weights_on(0, device)
        model = StageModel.load(self.draft, layers, DTYPES[weights.dtype], device, config, progress, self.draft_quantize)
        model.capture = capture(device)
        vocabulary = DraftVocabulary.load(self.draft, device)
        return DraftModel(
            model, slots=self.kv_slots, block=self.kv_block, shares_prefixes=self.shares_prefixes, vocabulary=vocabulary
        )


def _chosen(given: str | Path | None, shipped: Path | None) -> Path | None:
    """The given directory; ``shipped`` if none is given; None for ``"none"``."""
    if given is None:
        return shipped
    return None if str(given) == "none" else Path(given)


def _check_vocabulary(target: Path, draft: Path) -> None:
    """Raises UserError if the draft's tokens are not the target's."""
    known = DraftVocabulary.load(draft)
    if known is None:
        same_tokenizer(target, draft)
    elif known.of != vocabulary_digest(load_tokenizer(target)):
        raise UserError(f"the draft {draft} was trained for a target with another vocabulary than {target}: use its own draft")


def _arithmetics(device: str, places: Sequence[Placement] | None) -> list[Arithmetic]:
    """What the devices of rank 0 and of the stages compute fast: the planned ones, or this machine's for ``device``."""
    if places is not None and device == "auto":
        return [Arithmetic.planned(place.device) for place in places]
    here = arithmetic_of(torch.device("cuda" if device == "cuda" or (device == "auto" and num_gpus()) else "cpu"))
    return [here, here]


def num_gpus() -> int:
    """GPUs that torch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def chosen_device(name: str, local_rank: int = 0, gpus: int | None = None) -> torch.device:
    """The device that ``name``, one of DEVICES, stands for; ``auto`` prefers CUDA.

    Args:
        gpus: GPUs of this machine; None counts them.

    Raises:
        UserError: CUDA is requested but not available.
    """
    gpus = num_gpus() if gpus is None else gpus
    if name == "cpu" or (name == "auto" and not gpus):
        return torch.device("cpu")
    if not gpus:
        raise UserError("--device cuda, but torch sees no GPU here: install a CUDA build of torch, or use --device cpu")
    return torch.device("cuda", local_rank % gpus)


def checked(directory: Path) -> ModelConfig:
    """The config of a complete checkpoint.

    Raises:
        UserError: it is missing, damaged, of an unsupported family, or lacks tensors.
    """
    config = ModelConfig.from_directory(directory)
    Checkpoint(directory).check_complete(config)
    return config
