"""All settings of a pipeline, in one tree of frozen dataclasses. Loads no torch.

A setting is one line: its name, type, range, default and help. From it follow the option of every command that starts a
pipeline (``pipedec.flags``), the key of cluster.yaml and of its partitions, the keyword argument of ``LLM``, the option of ranks
under torchrun, and the field of the run's description in Redis. Names are unique in the whole tree, so all of these are flat.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_type_hints

from msgspec import Meta, to_builtins

from pipedec.config.environment import default_target
from pipedec.config.redis import RedisConfig
from pipedec.core.errors import BadValue
from pipedec.core.limits import MAX_NUM_SEQS, MAX_PASSAGE, MAX_WAITING
from pipedec.core.request import MethodOptions
from pipedec.core.values import joined, unknown_name
from pipedec.directories import reference_threads
from pipedec.families import ModelImpl
from pipedec.flags import ON_OFF, Command, Help, given_values, option_fields, with_options
from pipedec.methods import LayerTreeOptions
from pipedec.validation import byte_size, validated

Text = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1, le=1024)]
Tokens = Annotated[int, Meta(ge=1, le=10_000_000)]
Bytes = Annotated[int, Meta(ge=1)]
Dtype = Literal["auto", "float32", "float64", "bfloat16", "float16"]
Quantize = Literal["int8", "int4"]
Dequantize = Literal["auto", "always", "never"]
Kernels = Literal["auto", "torch"]
Device = Literal["auto", "cpu", "cuda"]
Dispatch = Annotated[
    Literal["windows", "tasks"],
    Help("Granularity at which Redis grants work: windows of timesteps, or the paper's single tasks."),
]
LogLevel = Literal["debug", "info", "warning", "error"]
DEVICES = get_args(Device)
AUTO: Final = "auto"  # as a dtype or a device: the machine decides
NONE: Final = "none"  # as a model: the pipeline does without it


@dataclass(frozen=True)
class Models:
    """The models of a pipeline."""

    target: Annotated[
        Text | None,
        Help(
            "Target: a checkpoint directory, a GGUF file, ORG/MODEL[:FILE][@REVISION] on the Hugging Face Hub, smollm2 or "
            "reference-pair (default: $PIPEDEC_TARGET, else smollm2 if it is installed, else reference-pair; of verify, "
            "torchrun and launch/ray.py reference-pair).",
            "DIR|FILE|ORG/MODEL|smollm2|reference-pair",
        ),
    ] = None
    draft: Annotated[
        Text | None, Help("Draft, as --target (default: what is shipped for the target).", "DIR|FILE|ORG/MODEL|none")
    ] = None
    bita: Annotated[
        Text | None, Help("Directory that pipedec train bita wrote (default: what is shipped for the target).", "DIR|none")
    ] = None
    model_impl: Annotated[
        ModelImpl, Help("Code of the target's layers: pipedec's, or the modules of transformers; auto: pipedec's if it has any.")
    ] = "auto"


@dataclass(frozen=True)
class Cut:
    """The cut of the target's layers into stages, and their device. Raises BadValue for numbers that do not fit together."""

    stages: Annotated[Count, Help("Pipeline stages, one process each.")] = 4
    groups: Annotated[Count | None, Help("Groups of stages that share a timestep (default: one per stage).")] = None
    layers: Annotated[
        Literal["auto"] | tuple[Annotated[int, Meta(ge=1, le=100_000)], ...],
        Help("Layers of each stage, like 6,6,6,6. auto: even, or balanced over the devices of a cluster.yaml.", "N,N,…"),
    ] = "auto"
    device: Annotated[Device, Help("Device of the ranks; auto: GPUs where there are any.")] = "auto"

    def __post_init__(self) -> None:
        if self.groups is not None and self.groups > self.stages:
            raise BadValue(f"groups: {self.groups} groups need at least as many stages, but there are {self.stages}")
        if self.layers != "auto" and len(self.layers) != self.stages:
            raise BadValue(f"layers: {len(self.layers)} entries for {self.stages} stages: give one number per stage, or auto")

    @property
    def num_groups(self) -> int:
        return self.groups or self.stages


@dataclass(frozen=True)
class Limits:
    """Limits of a cluster, and the default prediction tree of its requests. Raises BadValue for a malformed size."""

    max_model_len: Annotated[
        Tokens | None, Help("Maximum tokens of a prompt and its answer (default: the target's context; 4096 in a cluster.yaml).")
    ] = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=65_536), Help("Maximum number of requests in the pipeline at the same time.")] = (
        MAX_NUM_SEQS
    )
    max_waiting: Annotated[int, Meta(ge=0, le=10_000_000), Help("Queue limit; requests beyond it are refused.")] = MAX_WAITING
    kv_cache_memory: Annotated[
        Text | Bytes | None,
        Help("KV cache memory of each rank, like 512MiB (default: what weights leave on GPUs, else 2GiB).", "SIZE"),
    ] = None
    state_memory: Annotated[
        Text | Bytes,
        Help(
            "Memory of each rank for the states of recurrent layers: of running requests, and after prefixes of prompts.", "SIZE"
        ),
    ] = "1GiB"
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, le=1), Help("Maximum share of a GPU's memory in use, by the ranks and by other programs.")
    ] = 0.9
    prefix_cache: Annotated[bool, Help("Do not share the KV cache of equal prefixes between requests.")] = True
    shared_suffixes: Annotated[
        bool,
        Help(
            "Draft also from earlier answers: all that generate, submit and LLM ask for, or those to the same API key of serve. "
            "Affects speed only.",
            ON_OFF,
        ),
    ] = True
    tree: LayerTreeOptions | None = None  # for pipedec and stpp; None for their own defaults

    def __post_init__(self) -> None:
        _ = self.kv_cache_bytes, self.state_memory_bytes

    @property
    def kv_cache_bytes(self) -> int | None:
        """``kv_cache_memory`` in bytes."""
        given = self.kv_cache_memory
        return byte_size(given, "kv_cache_memory:") if isinstance(given, str) else given

    @property
    def state_memory_bytes(self) -> int:
        """``state_memory`` in bytes."""
        given = self.state_memory
        return byte_size(given, "state_memory:") if isinstance(given, str) else given


@dataclass(frozen=True)
class Numbers:
    """The number formats of the models. The draft's never change the output."""

    dtype: Annotated[Dtype, Help("Data type of the target; auto: the checkpoint's 16 bits on GPUs, float32 on CPUs.")] = "auto"
    quantize: Annotated[Quantize | None, Help("Weights of the target in 8 or 4 bits, rounded as they are read.")] = None
    draft_dtype: Annotated[
        Dtype, Help("Data type of the draft; affects speed only, never the output. auto: 16 bits where they are fast.")
    ] = "auto"
    draft_quantize: Annotated[Quantize | None, Help("Weights of the draft in 8 or 4 bits; affects speed only.")] = None
    dequantize: Annotated[
        Dequantize,
        Help("Widen weights that are stored in 4 or 8 bits as they are read; auto: on CPUs, where that is faster and fits."),
    ] = "auto"
    kernels: Annotated[
        Kernels, Help("Computation on GPUs: auto: with pipedec's kernels, where Triton works; torch: without them.")
    ] = "auto"


@dataclass(frozen=True)
class Speculation:
    """The experience with which the default method begins. Never changes the output."""

    priors: Annotated[
        bool,
        Help(
            "Begin with nothing learned from training or earlier runs (chances of acceptance, costs of rows), and keep nothing."
        ),
    ] = True


@dataclass(frozen=True)
class Cluster:
    """Communication between ranks, scheduling of timesteps, and recovery from lost ranks."""

    transport: Annotated[
        Literal["auto", "gloo", "nccl"], Help("Backend of transfers between stages; auto: NCCL if each stage has its own GPU.")
    ] = "auto"
    wire_dtype: Annotated[
        Literal["auto", "int8"],
        Help(
            "Data type of activations on their way between stages; auto: the target's. int8 with a scale for each row needs "
            "less of slow links. Near-tie only: it may change a token where two are about equally probable."
        ),
    ] = "auto"
    dispatch: Dispatch = "windows"
    passage: Annotated[
        Literal["auto"] | Annotated[int, Meta(ge=1, le=MAX_PASSAGE)],
        Help("Timesteps from a row's entry to its verdict; auto: the groups, and as many as pay on slow links.", "auto|N"),
    ] = "auto"
    max_restarts: Annotated[
        int,
        Meta(ge=0),
        Help("Lost ranks that may be replaced within --restart-window; one more ends the run. 0: the first loss ends it."),
    ] = 5
    restart_window: Annotated[float, Meta(gt=0), Help("Time in which --max-restarts counts.", "SECONDS")] = 300.0
    stall_timeout: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Help(
            "A rank is replaced if its timestep takes longer, or if it is silent for longer while others wait "
            "(default: 20 planned timesteps, at least 4 seconds; 120 for the first forward of its kind).",
            "SECONDS",
        ),
    ] = None
    log_level: Annotated[
        LogLevel, Help("Detail of the log that each rank writes to a file of its own; debug adds a line for every request.")
    ] = "info"
    redis: RedisConfig = field(default_factory=RedisConfig)

    @property
    def recovers(self) -> bool:
        """Whether lost ranks are replaced at all."""
        return self.max_restarts > 0


@dataclass(frozen=True)
class Settings:
    """All settings of a pipeline."""

    models: Models = Models()
    cut: Cut = Cut()
    limits: Limits = Limits()
    numbers: Numbers = Numbers()
    speculation: Speculation = Speculation()
    cluster: Cluster = Cluster()

    def __post_init__(self) -> None:
        passage, groups = self.cluster.passage, self.cut.num_groups
        if passage != AUTO and passage < groups:
            raise BadValue(f"passage: rows take {groups} timesteps through {groups} groups: give at least {groups}, or auto")
        if passage not in (AUTO, groups) and self.cluster.dispatch == "tasks":
            raise BadValue(f"passage: with dispatch tasks it is the number of groups: give {groups}, or auto")

    @property
    def passage(self) -> int:
        """The shortest passage: as given, or the number of groups."""
        return self.cut.num_groups if self.cluster.passage == AUTO else self.cluster.passage

    @classmethod
    def of(cls, **values: Any) -> Settings:
        """Settings by name, the others at their defaults. Raises UserError as ``parse``."""
        return cls().parse(values)

    def parse(self, values: Mapping[str, Any], source: str = "") -> Settings:
        """These settings, with others in place of those that ``values`` gives by name.

        A mistake is a UserError of one line that begins with ``source``, for example the path of a file.
        """
        for name in values:
            if name not in GROUPS:
                raise BadValue(joined(source, unknown_name("setting", name, GROUPS)))
        given = {name: _plain(value) for name, value in values.items()}
        groups = {}
        for group in fields(self):
            own = {name: value for name, value in given.items() if GROUPS[name] == group.name}
            if own:
                present = getattr(self, group.name)
                groups[group.name] = validated(type(present), {**to_builtins(present), **own}, source)
        try:
            return replace(self, **groups)
        except BadValue as error:
            raise BadValue(joined(source, str(error))) from None

    def replaced(self, **values: Any) -> Settings:
        """These settings with others by name, which are not checked."""
        groups: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            groups.setdefault(GROUPS[name], {})[name] = value
        return replace(self, **{group: replace(getattr(self, group), **own) for group, own in groups.items()})

    def items(self) -> Iterator[tuple[str, Any]]:
        """All settings, flat: (name, value)."""
        return ((name, getattr(getattr(self, group), name)) for name, group in GROUPS.items())

    def for_answers(self) -> tuple[Settings, str | None]:
        """With the default target of answers, unless another is given; and a sentence about it, if there is one to show."""
        if self.models.target is not None:
            return self, None
        target, sentence = default_target()
        return self.replaced(target=target), sentence

    def for_threads(self) -> Settings:
        """With the shipped pair that opens threads, unless another target is given."""
        if self.models.target is not None:
            return self
        shipped = reference_threads()
        return self.replaced(target=str(shipped / "target"), draft=self.models.draft or str(shipped / "draft"))

    def without_secrets(self) -> Settings:
        """These settings without passwords: safe to publish and to print."""
        return self.replaced(redis=replace(self.cluster.redis, password=None))


def _plain(value: Any) -> Any:
    """A value from Python in the form that a file has."""
    if isinstance(value, Path):
        return str(value)
    return to_builtins(value) if isinstance(value, MethodOptions | RedisConfig) else value


_TREE = {"models": Models, "cut": Cut, "limits": Limits, "numbers": Numbers, "speculation": Speculation, "cluster": Cluster}
GROUPS = {setting.name: group for group, kind in _TREE.items() for setting in fields(kind)}  # the group of every setting, by name
SETTINGS = {  # the annotated type of every setting, by name
    name: hint for kind in _TREE.values() for name, hint in get_type_hints(kind, include_extras=True).items()
}
OPTIONS = {name: option for kind in _TREE.values() for name, option in option_fields(kind).items()}
_OVERRIDES = {name: option for kind in _TREE.values() for name, option in option_fields(kind, shows_defaults=False).items()}


def keyword_arguments() -> list[inspect.Parameter]:
    """Every setting as a keyword argument, for the signatures of functions that take all of them."""
    plain = {name: hint for kind in _TREE.values() for name, hint in get_type_hints(kind).items()}
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=plain[name])
        for name, default in Settings().items()
    ]


def settings_options(command: Command) -> Command:
    """Add an option for every setting; the command gets ``settings``, with the defaults of those that are not given."""
    return with_options(command, OPTIONS, lambda values: {"settings": Settings().parse(given_values(values))})


def given_settings(command: Command) -> Command:
    """Add an option for every setting; the command gets ``given``, those that the user gives, to lay over a cluster.yaml."""
    return with_options(command, _OVERRIDES, lambda values: {"given": given_values(values)})
