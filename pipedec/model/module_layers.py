"""Layers that are transformers' own modules, with pipedec's matrices, experts, caches and attention.

A stage keeps its own layers of the model; the others hand on what they get. The model computes as it always does, positions,
rotary embeddings and routers included, but where it would update its cache it writes to the pool, it attends through
``Rows.attention``, and recurrent layers and experts compute through ``Rows.recurrence`` and ``Experts``.
Shapes as in ``stage_model``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from transformers import AttentionInterface
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_outputs import BaseModelOutputWithPast

from pipedec.families import Shape
from pipedec.families.base import rope_type
from pipedec.families.places import Place
from pipedec.families.skeleton import is_recurrent, module_cache, replace_functions, skeleton, stated_config
from pipedec.families.transformers import TransformersConfig
from pipedec.formats import Format
from pipedec.model.attention import LatentAttention, Rows
from pipedec.model.experts import ExpertMatrices, Experts
from pipedec.model.kernels.language import has_kernels
from pipedec.model.matrices import Matrix, Products
from pipedec.model.recurrent import Recurrence
from pipedec.model.stage_layers import Progress, StageLayers, Storage
from pipedec.model.weights import Checkpoint, Target

_FUNCTIONS = "pipedec"  # under which transformers knows the functions of this file


class ModuleLayers(StageLayers):
    """See ``StageLayers``. Memory for the weights is allocated when they are read."""

    config: TransformersConfig

    def __init__(self, config: TransformersConfig, layers: range, storage: Storage) -> None:
        super().__init__(config, layers, storage)
        _register()
        self._names = config.names
        self._stored: dict[str, list[str]] = {}  # names in the checkpoint, by parameter, in the order of their rows
        for name, place in sorted(config.places.items(), key=lambda item: (item[1].expert or 0, item[1].rows or (0, 0))):
            self._stored.setdefault(str(place), []).append(name)
        self._expert_parts: list[Experts] = []
        self._read = torch.zeros((), dtype=torch.int64, device=storage.device)  # graphs contain its address
        self._embedding_VE: Matrix | None = None
        self._causal: Any = skeleton(stated_config(config.directory), _FUNCTIONS, storage.dtype)
        self._model, self._normed = self._causal.get_submodule(self._names.decoder), _Normed()
        setattr(self._causal, self._names.base, self._normed)
        self._embed, self._norm = self._module(self._names.embedding), self._module(self._names.norm)
        self._embed.padding_idx = None  # which need not be one of the rows of a step
        self._replace(self._names.norm, nn.Identity())
        stack = self._module(self._names.layers)
        for number, layer in enumerate(stack):
            if number not in layers:
                received = (lambda: _forward.get().hidden_1RE) if number == layers.start - 1 else None
                stack[number] = Elsewhere(layer, config.returns_tuple, received)
        for module in stack.modules():
            if hasattr(module, "layer_idx"):
                module.pipedec_attend = self._attend
            if is_recurrent(module) and module.layer_idx in layers:
                layer = module.layer_idx - layers.start
                replace_functions(module, partial(_mix, layer), partial(_convolve, layer))
        for path, module in list(self._model.named_modules()):
            buffers = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.device.type != "meta"}
            for name, buffer in buffers.items():
                setattr(module, name, buffer.to(storage.device))
            if config.depends_on_length and any(name.endswith("inv_freq") for name in buffers):
                self._model.set_submodule(path, _RowRotary(module))

    @property
    def can_capture(self) -> bool:
        """Unless frequencies depend on lengths, or kernels cannot multiply for all experts at once."""
        can_group = not has_kernels(self.storage.device, self.storage.dtype) or all(
            experts.can_group for experts in self._expert_parts
        )
        return "dynamic" not in map(rope_type, self.config.ropes) and can_group

    def forward(self, inputs: Tensor, rows: Rows) -> Tensor:
        hidden_RE = self.embedded(inputs, self._looked_up) if self.is_first else inputs
        before = _forward.set(_Forward(hidden_RE[None], rows))
        try:
            output = self._model(
                inputs_embeds=hidden_RE[None], position_ids=rows.positions[None],
                past_key_values=module_cache(partial(self._update, rows)), use_cache=True,
            )  # fmt: skip
        finally:
            _forward.reset(before)
        if self._expert_parts:
            self.experts_read = self._read.fill_(sum(experts.num_read for experts in self._expert_parts))
        hidden_1RE: Tensor = output.last_hidden_state
        return hidden_1RE[0]

    def normed(self, hidden_RE: Tensor) -> Tensor:
        normed_1RE: Tensor = self._norm(hidden_RE[None])
        return normed_1RE[0]

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """By the model's own code after the final norm, which may scale or cap them."""
        hidden_1RE = hidden_RE[None]
        self._normed.hidden_1RE = self.normed(hidden_RE)[None]
        logits_1RV: Tensor = self._causal(inputs_embeds=hidden_1RE, use_cache=False).logits
        return logits_1RV[0]

    def read(self, checkpoint: Checkpoint, progress: Progress) -> None:
        config, numbers = self.config, count(1)
        head = config.head_tensors(checkpoint.names)
        shares_embedding = self.is_first and not config.embedding_tensors().keys().isdisjoint(head)
        groups = [config.embedding_tensors()] * self.is_first + [config.layer_tensors(layer) for layer in self.layers]
        groups += [config.norm_tensors()] * self.is_last
        own_head = {name: shape for name, shape in head.items() if not (shares_embedding and name.endswith(".weight"))}
        total = sum(map(len, groups)) + len(own_head) * self.is_last
        for tensors in groups:
            checkpoint.read_into(self._allocated(tensors, checkpoint), lambda: progress(next(numbers), total))
            self._prepare(tensors)
        if self.is_last:
            table = cast(Matrix, self._embedding_VE) if shares_embedding else self.table(checkpoint, head)
            bias = self.storage.empty(config.vocab_size) if len(head) > 1 else None
            checkpoint.read_into(
                {name: cast(Tensor, bias) if name.endswith(".bias") else table for name in own_head},
                lambda: progress(next(numbers), total),
            )
            matrix = _Matrix(self.products, table, bias)
            matrix.prepare(keeps_rows=shares_embedding)
            self._causal.set_submodule(self._names.head, _Product(matrix))

    def tensors(self) -> list[Tensor]:
        modules = [module for root in (self._model, self._norm, self._causal) for module in root.modules()]
        matrices = {id(module.matrix): module.matrix for module in modules if isinstance(module, _Product)}
        found = [tensor for matrix in matrices.values() for tensor in matrix.tensors()]
        found += [tensor for experts in self._expert_parts for tensor in experts.tensors()]
        states = [root.state_dict(keep_vars=True).values() for root in (self._model, self._norm)]
        found += [tensor for state in states for tensor in state if not tensor.is_meta]
        return found if self._embedding_VE is None else [*found, *self._embedding_VE.tensors()]

    # What the modules call

    def _update(self, rows: Rows, keys_1KRD: Tensor, values_1KRD: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Write what a layer caches to the pool. Returns what it attends to, if it has to compute that from latents."""
        layer = number - self.layers.start
        rows.pool.write(layer, rows.slots, keys_1KRD[0].transpose(0, 1), values_1KRD[0].transpose(0, 1))
        if self.shape.layers[layer].latents is None:
            return keys_1KRD, values_1KRD
        first_1SX, second_1SX = cast(LatentAttention, rows.attention).latents(layer)
        return first_1SX[None], second_1SX[None]

    def _attend(self, number: int, q_1HRD: Tensor, keys: Tensor, values: Tensor, sinks_H: Tensor | None) -> Tensor:
        """[1, R, H, D]. ``keys`` and ``values`` matter only if they were computed from latents."""
        attention, layer, q_RHD = _forward.get().rows.attention, number - self.layers.start, q_1HRD[0].transpose(0, 1)
        if self.shape.layers[layer].latents is None:
            return attention.attend(q_RHD, layer, sinks_H)[None]
        return cast(LatentAttention, attention).attend_expanded(q_RHD, keys[0], values[0], layer)[None]

    # Weights

    def _looked_up(self, token_ids_R: Tensor) -> Tensor:
        """By the model's own module, which may scale embeddings."""
        assert self._embedding_VE is not None
        rows_RE = self._embedding_VE.rows(token_ids_R)
        embedded: Tensor
        embedded = functional_call(self._embed, {"weight": rows_RE}, (torch.arange(len(rows_RE), device=rows_RE.device),))
        return embedded

    def _allocated(self, tensors: Mapping[str, Shape], checkpoint: Checkpoint) -> dict[str, Target]:
        """Memory for weights, in their modules: linear maps are replaced by products."""
        targets: dict[str, Target] = {}
        for name, shape in tensors.items():
            place = self.config.places[name]
            path, own = place.module, place.parameter
            module = self._norm if path == self._names.norm else self._module(path)
            if type(module) is nn.Linear:
                self._fuse(path, checkpoint)
                module = self._module(path)
            if isinstance(module, _Product):
                targets[name] = _part(module.matrix.targets(module.index)[own], place)
            elif path in self.config.routed and getattr(module, own).dim() == 3:
                targets[name] = _part(self._experts(path, checkpoint).matrices[own], place)
            elif module is self._embed and len(shape) == 2:
                targets[name] = self._embedding_VE = self.table(checkpoint, tensors)
            else:
                if place.rows is None or getattr(module, own).is_meta:
                    tensor = self.storage.empty(*getattr(module, own).shape)
                    is_buffer = own in dict(module.named_buffers(recurse=False))
                    setattr(module, own, tensor if is_buffer else nn.Parameter(tensor, requires_grad=False))
                targets[name] = _part(getattr(module, own).data, place)
        return targets

    def _fuse(self, path: str, checkpoint: Checkpoint) -> None:
        """Replace a linear map, and those that take the same rows, by products with one matrix."""
        parent, _, own = path.rpartition(".")
        group = next((group for group in self.config.fused if own in group), (own,))
        linears = [self._module(f"{parent}.{name}") for name in group]
        if len({linear.bias is None for linear in linears}) > 1:
            group, linears = (own,), [self._module(path)]
        sizes, inputs = [linear.out_features for linear in linears], linears[0].in_features
        stored = {name: self.config.shapes[name] for own in group for name in self._stored[f"{parent}.{own}.weight"]}
        formats = [checkpoint.format_of(self.config, name, shape) for name, shape in stored.items()]
        weight = self.storage.matrix(formats, [shape[0] for shape in stored.values()], inputs)
        bias = None if linears[0].bias is None else self.storage.empty(sum(sizes))
        matrix = _Matrix(self.products, weight, bias, sizes)
        for index, name in enumerate(group):
            self._replace(f"{parent}.{name}", _Product(matrix, index))

    def _experts(self, path: str, checkpoint: Checkpoint) -> Experts:
        """The experts of a module, without weights if they are asked for the first time."""
        module = self._module(path)
        if not hasattr(module, "pipedec_experts"):
            names = [name for name, parameter in module.named_parameters(recurse=False) if parameter.dim() == 3]
            matrices = {name: self._expert_matrices(path, name, checkpoint) for name in names}
            module.pipedec_experts = Experts(self.products, matrices)
            self._expert_parts.append(module.pipedec_experts)
        experts: Experts = module.pipedec_experts
        return experts

    def _expert_matrices(self, path: str, own: str, checkpoint: Checkpoint) -> ExpertMatrices:
        """The matrices of a parameter: of each expert, those that the checkpoint has one below the other."""
        config = self.config
        parts: list[list[tuple[Format, int]]] = [[] for _ in range(config.routed[path].num_experts)]
        for name in self._stored[f"{path}.{own}"]:
            expert, shape = config.places[name].expert, config.shapes[name]
            for of_expert in parts if expert is None else [parts[expert]]:
                of_expert.append((checkpoint.format_of(config, name, shape), shape[-2]))
        is_transposed = self._module(path).is_transposed

        def matrix(blocks: Sequence[tuple[Format, int]]) -> Matrix:
            return self.storage.matrix([format for format, _ in blocks], [outputs for _, outputs in blocks], shape[-1])

        if has_kernels(self.storage.device, self.storage.dtype):
            return ExpertMatrices.of(matrix([block for of_expert in parts for block in of_expert]), len(parts), is_transposed)
        return ExpertMatrices([matrix(of_expert) for of_expert in parts], is_transposed)

    def _prepare(self, tensors: Mapping[str, Shape]) -> None:
        """Prepare the matrices among weights that have been read."""
        paths = dict.fromkeys(self.config.places[name].module for name in tensors)
        modules = [self._norm if path == self._names.norm else self._module(path) for path in paths]
        for matrix in {id(module.matrix): module.matrix for module in modules if isinstance(module, _Product)}.values():
            matrix.prepare()
        for module in modules:
            _compute_norm_at_once(module)
            if experts := getattr(module, "pipedec_experts", None):
                experts.prepare()

    def _module(self, path: str) -> Any:
        """The module with this path in the whole model."""
        return self._model.get_submodule(path.removeprefix(self._names.decoder + "."))

    def _replace(self, path: str, module: nn.Module) -> None:
        self._model.set_submodule(path.removeprefix(self._names.decoder + "."), module)


@dataclass(frozen=True)
class _Forward:
    """A call of the model: what enters the stage's first layer, and its rows. Models do not pass it on to all of their parts."""

    hidden_1RE: Tensor
    rows: Rows


_forward: ContextVar[_Forward] = ContextVar("forward")


class _Matrix:
    """A matrix that may be packed or quantized, and the linear maps of which it consists.

    They are called one after the other with the same rows, so the first one computes for all.
    """

    def __init__(self, products: Products, weight: Matrix, bias: Tensor | None, sizes: Sequence[int] | None = None) -> None:
        self._products, self.weight, self.bias = products, weight, bias
        self._sizes = [len(weight)] if sizes is None else list(sizes)
        self._rows: Tensor | None = None
        self._results: Sequence[Tensor] = ()

    def product(self, rows: Tensor, index: int) -> Tensor:
        """The result of one of the linear maps, [..., N]."""
        if len(self._sizes) == 1:
            return self._computed(rows)
        if rows is not self._rows:
            self._rows, self._results = rows, torch.split_with_sizes(self._computed(rows), self._sizes, -1)
        result = self._results[index]
        if index + 1 == len(self._sizes):
            self._rows, self._results = None, ()
        return result

    def _computed(self, rows: Tensor) -> Tensor:
        found = self._products(rows.reshape(-1, rows.shape[-1]), self.weight, self.bias)
        return found.view(*rows.shape[:-1], -1)

    def prepare(self, keeps_rows: bool = False) -> None:
        """See ``Matrix.prepared``."""
        self.weight = self.weight.prepared(keeps_rows)

    def tensors(self) -> list[Tensor]:
        return self.weight.tensors() + ([] if self.bias is None else [self.bias])

    def targets(self, index: int) -> dict[str, Target]:
        """Where the tensors of one of the linear maps are read to: ``weight`` and ``bias``."""
        weight = self.weight.split(self._sizes)[index]
        return {"weight": weight} if self.bias is None else {"weight": weight, "bias": self.bias.split(self._sizes)[index]}


def _part(whole: Target, place: Place) -> Target:
    if place.expert is not None:
        whole = cast(ExpertMatrices, whole).matrices[place.expert]
    return whole if place.rows is None else whole[slice(*place.rows)]


class _Product(nn.Module):
    """A linear map: one of those of a matrix."""

    def __init__(self, matrix: _Matrix, index: int = 0) -> None:
        super().__init__()
        self.matrix, self.index = matrix, index

    def __call__(self, rows: Tensor) -> Tensor:
        return self.matrix.product(rows, self.index)


class Elsewhere(nn.Module):
    """Skips a layer of another stage. The last one before this stage's layers returns what enters them: what it has ``received``.

    It has the attributes of the layer, since the model may ask for its kind.
    """

    def __init__(self, layer: nn.Module, returns_tuple: bool, received: Callable[[], Tensor] | None) -> None:
        super().__init__()
        own = vars(self)
        own.update({name: value for name, value in vars(layer).items() if name not in own})
        self._returns_tuple, self._received = returns_tuple, received

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Any:
        skipped = hidden if self._received is None else self._received()
        return (skipped,) if self._returns_tuple else skipped


class _Normed(nn.Module):
    """Stands in for the model below the head: its output is given."""

    hidden_1RE: Tensor

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPast:
        return _NormedOutput(last_hidden_state=cast(torch.FloatTensor, self.hidden_1RE))


class _NormedOutput(BaseModelOutputWithPast):
    """An output without those that some models add to it."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _RowRotary(nn.Module):
    """A rotary embedding whose frequencies depend on a sequence length: here on each row's own, as if it were decoded alone."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner
        self._compute = partial(inspect.unwrap(type(inner).forward), inner)  # computes with the frequencies that are set
        if inner.rope_type == "longrope":
            self._original_length: int = inner.config.rope_parameters["original_max_position_embeddings"]
            nowhere = torch.zeros(1, 1, 1, device=inner.inv_freq.device)
            inner(nowhere, torch.tensor([[self._original_length]], device=nowhere.device))  # finds those of long sequences
            self._frequencies = inner.original_inv_freq.to(nowhere.device), inner.long_inv_freq

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        lengths_R = _forward.get().rows.lengths
        if self._inner.rope_type == "longrope":
            short, long = (self._with(frequencies, hidden, position_ids) for frequencies in self._frequencies)
            is_long_1R1 = (lengths_R > self._original_length)[None, :, None]
            return tuple(torch.where(is_long_1R1, *values) for values in zip(long, short, strict=True))
        found: list[tuple[Tensor, ...]] = []
        for length, position in zip(lengths_R.tolist(), position_ids.unbind(1), strict=True):
            self._inner.max_seq_len_cached = 0  # or it would keep the frequencies of the longest sequence
            self._inner(hidden, lengths_R.new_full((1, 1), length - 1))
            found.append(self._compute(hidden, position[None]))
        return tuple(torch.cat(values, 1) for values in zip(*found, strict=True))

    def _with(self, frequencies: Tensor, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        self._inner.inv_freq = frequencies
        values: tuple[Tensor, ...] = self._compute(hidden, position_ids)
        return values


def _compute_norm_at_once(module: Any) -> None:
    """Let a root mean square norm in float32 compute by one function of torch, if that gives the same on random rows."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or weight is None or eps is None or weight.dtype != torch.float32:
        return
    rows = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device)
    for scale in (weight, 1 + weight):  # Gemma's are kept as differences from 1
        found = functional.rms_norm(rows, scale.shape, scale, eps)
        if torch.allclose(found, module(rows), rtol=1e-6, atol=1e-6):
            module.forward = partial(torch.rms_norm, normalized_shape=scale.shape, weight=scale, eps=eps)
            return


def _convolve(
    layer: int, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """The short convolution of a module with a recurrent state: [1, C, R] of inputs [1, C, R] and weights [C, W]."""
    recurrence = cast(Recurrence, _forward.get().rows.recurrence)
    out_RC = recurrence.convolve(layer, hidden_states[0].t(), weight, bias)
    return (out_RC if activation is None else ACT2FN[activation](out_RC)).t()[None]


def _mix(layer: int, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """The rule of a module with a recurrent state: [1, R, H, V]. The states remain in the pool."""
    recurrence = cast(Recurrence, _forward.get().rows.recurrence)
    return recurrence.mix(layer, query[0], key[0], value[0], g[0], beta[0])[None], value.new_empty(0)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, s_aux: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    """The attention that transformers calls. Scale, cap and reach have been observed (``families.transformers``)."""
    return module.pipedec_attend(int(module.layer_idx), query, key, value, s_aux), None


def _routed(module: Any, *routed: Tensor) -> Tensor:
    """The function of experts that transformers calls."""
    found: Tensor = module.pipedec_experts(module, *routed, _forward.get().rows.num_rows)
    return found


@cache
def _register() -> None:
    AttentionInterface.register(_FUNCTIONS, _attention)
    ALL_EXPERTS_FUNCTIONS.register(_FUNCTIONS, _routed)
