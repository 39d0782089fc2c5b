"""Compares a pipeline's answer with the one that the target generates in ``transformers``, token by token.

The reference for answers in decode threads is a separate forward pass for every token, over exactly the tokens it sees: no cache,
no tree and no pipeline, only an explicit mask and positions. Recurrent layers take no such mask; with them a token sees a chain,
for which a causal mask is the same.

Shapes: T tokens that a row sees (the prompt and the row's own token included), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from pipedec.checkpoints import LayerSpan, TensorFiles, span_shapes
from pipedec.core.sampling import SamplingParams
from pipedec.engine.build import DTYPES
from pipedec.engine.devices import chosen_device, limit_threads
from pipedec.families import ModelConfig, TransformersConfig, model_config
from pipedec.families.multimodal import auto_class, text_config
from pipedec.families.places import Place
from pipedec.families.skeleton import ModuleNames, has_experts, is_recurrent, skeleton
from pipedec.formats import ALL_PLAIN, PLAIN, is_stack
from pipedec.gguf import model_files
from pipedec.model import Checkpoint, ExpertMatrices, Target, WidenedMatrix, rounded
from pipedec.model.module_layers import Elsewhere
from pipedec.plan.spec import PipelineSpec
from pipedec.sampling import Sampler
from pipedec.text.prompt import end_token_ids
from pipedec.threads import Context, DecodeThread, State
from pipedec.threads import Sequence as ThreadSequence
from pipedec.threads.sequences import Sequences
from pipedec.verify.divergence import Divergence, first_difference

Choose = Callable[[list[DecodeThread]], DecodeThread]
_USUAL_NAMES = ModuleNames("model", "model", "model.embed_tokens", "model.layers", "model.norm", "lm_head")


@torch.no_grad()
def load_transformers(
    model: Path, dtype: torch.dtype, device: torch.device | str = "cpu", span: LayerSpan | None = None, **options: Any
) -> Any:
    """A causal language model, or a multimodal one with all its parts, not in training mode.

    Args:
        model: the directory of a checkpoint, or a GGUF file. Weights that are stored in fewer bits are widened.
        span: the layers of a stage, which alone are read (see ``_stage``); None for the whole model.
        options: of transformers, further ones by name.
    """
    config, directory = model_config(model), model_files(model)
    options = {"dtype": dtype, "experts_implementation": "eager"} | options  # which adds experts in ascending order
    stated = AutoConfig.from_pretrained(directory)
    if span is None and config.formats is ALL_PLAIN and TensorFiles(model).gguf is None:
        made = auto_class(stated).from_pretrained(model, local_files_only=True, **options)
        return made.to(device).eval()
    for part in (stated, text_config(stated)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    whole = LayerSpan(range(config.num_hidden_layers), True, True)
    made = auto_class(stated).from_config(stated, **options) if span is None else _stage(stated, config, span, dtype, device)
    state, checkpoint, targets = made.state_dict(), Checkpoint(model), dict[str, Target]()
    for name, shape in span_shapes(config, span or whole, checkpoint.names).items():
        place = config.places[name] if isinstance(config, TransformersConfig) else Place(*name.rpartition(".")[::2])
        tensor, format = state[str(place)], checkpoint.format_of(config, name, shape)
        is_transposed = getattr(made.get_submodule(place.module), "is_transposed", False)
        tensor = tensor if place.expert is None else tensor[place.expert]
        tensor = tensor if place.rows is None else tensor[slice(*place.rows)]
        if is_stack(name, shape):
            matrices = [WidenedMatrix(matrix, [(format, shape[1])]) for matrix in (tensor.mT if is_transposed else tensor)]
            targets[name] = ExpertMatrices(matrices, is_transposed)
        elif format is PLAIN:
            targets[name] = tensor
        else:
            targets[name] = WidenedMatrix(tensor, [(format, shape[0])])
    checkpoint.read_into(targets)
    if span is None or span.last:
        made.tie_weights()
    if span is not None:
        return made
    made.generation_config = GenerationConfig.from_pretrained(directory)
    return made.to(device).eval()


def _stage(stated: Any, config: ModelConfig, span: LayerSpan, dtype: torch.dtype, device: torch.device | str) -> Any:
    """The model with memory for the tensors of ``span`` alone. What enters its layers is the attribute ``received``, except on
    the first stage; other layers, and the final norm of another stage, hand on what they get.
    """
    made = skeleton(stated, None, dtype, experts="eager")
    names = config.names if isinstance(config, TransformersConfig) else _USUAL_NAMES
    layers = made.get_submodule(names.layers)
    for number, layer in enumerate(layers):
        if number not in span.layers:
            received = (lambda: made.received) if number == span.layers.start - 1 else None
            layers[number] = Elsewhere(layer, getattr(config, "returns_tuple", False), received)
    if not span.last:
        made.set_submodule(names.norm, nn.Identity())
        made.set_submodule(names.head, nn.Identity())
    if not span.first and not (span.last and config.tie_word_embeddings):
        made.set_submodule(names.embedding, nn.Identity())
    for module in [*made.get_decoder().modules(), *made.get_submodule(names.head).modules()]:
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return made


class Reference:
    """The target in ``transformers``, with the dtype and the device of a pipeline, and weights as its stages round them."""

    def __init__(self, spec: PipelineSpec) -> None:
        limit_threads()
        self._device = chosen_device(spec.settings.cut.device)
        self._model = load_transformers(spec.target, DTYPES[spec.dtype], self._device)
        if (quantize := spec.settings.numbers.quantize) is not None:
            text = self._model.get_decoder(), self._model.get_output_embeddings()
            rounds = {id(weight) for module in text for weight in module.parameters()}
            # the matrices of the layers, and in 8 bits embedding and head, which may be one tensor
            for name, weight in self._model.named_parameters():
                module = self._model.get_submodule(name.rpartition(".")[0])
                stacks = weight.dim() == 3 and has_experts(module)
                matrices = weight.data.mT if stacks and module.is_transposed else weight.data
                is_matrix = weight.dim() == 2 and isinstance(module, nn.Linear | nn.Embedding)  # a router's stays as it is
                for matrix in matrices if stacks else [matrices] if is_matrix else []:
                    if id(weight) in rounds:
                        matrix.copy_(rounded(matrix.contiguous(), quantize if ".layers." in name else "int8"))
        self._end_token_ids = list(end_token_ids(spec.target))
        self._sequences = Sequences(spec.target)

    @torch.inference_mode()
    def generate(self, prompt_token_ids: Sequence[int], max_tokens: int, ignore_eos: bool = False) -> list[int]:
        """The target's greedy answer; the checkpoint's recommended sampling is ignored."""
        prompt = torch.tensor([list(prompt_token_ids)], device=self._device)
        output = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            repetition_penalty=1.0,  # some chat models set another in their generation config
            eos_token_id=None if ignore_eos else self._end_token_ids or None,
            pad_token_id=0,
        )
        return [int(token) for token in output[0, prompt.shape[1] :]]

    def generate_threads(self, prompt_token_ids: Sequence[int], dialect: str, sampling: SamplingParams) -> list[int]:
        """The target's answer in decode threads, in document order, with a separate forward pass for every token."""
        sequence = self._sequences.maker(len(prompt_token_ids), sampling, dialect)()
        naive_threads(self._model, sequence, prompt_token_ids, sampling)
        return [token.token_id for token in sequence.document()]

    @torch.inference_mode()
    def compare(self, prompt_token_ids: Sequence[int], expected: Sequence[int], found: Sequence[int]) -> Divergence | None:
        """The first difference between two answers in one thread, with the target's margin there; None if they are equal."""
        divergence = first_difference(expected, found)
        if divergence is None or divergence.expected is None or divergence.found is None:
            return divergence
        context = torch.tensor([[*prompt_token_ids, *expected[: divergence.position]]], device=self._device)
        logits_V = self._model(context).logits[0, -1].float()
        margin = (logits_V[divergence.expected] - logits_V[divergence.found]).abs()
        return replace(divergence, margin=float(margin))


def with_fewest_tokens(running: list[DecodeThread]) -> DecodeThread:
    """The thread with the fewest tokens, the oldest of several: the threads advance side by side."""
    return min(running, key=lambda thread: thread.num_tokens)


@torch.inference_mode()
def naive_threads(
    model: PreTrainedModel,
    sequence: ThreadSequence,
    prompt_ids: Iterable[int],
    sampling: SamplingParams,
    choose: Choose = with_fewest_tokens,
) -> None:
    """Decode the target's answer with all the threads that it opens, one token of one thread at a time.

    A model with recurrent layers gets the tokens that a thread sees as a plain text: those of its parent up to where it was
    opened, and its own. Each of them sees all before it there, so a causal mask is the same as the explicit one. This holds for
    dialects without joins.

    Args:
        model: in evaluation mode. A sliding window, if it has one, is not applied.
        sequence: a new sequence, to which the answer is added. It decides when the answer ends; ``max_tokens``,
            ``stop_token_ids``, ``ignore_eos`` and ``stop`` of ``sampling`` are ignored.
        choose: selects the running thread that generates the next token. The answer does not depend on it.

    Raises ValueError if ``sampling`` is stochastic but has no seed.
    """
    prompt = list(prompt_ids)
    while sequence.finished is None:
        thread = choose([thread for thread in sequence.threads if thread.state is State.RUNNING])
        sequence.accept_token(thread.number, _next_token(model, sequence, thread, prompt, sampling))


def _next_token(
    model: PreTrainedModel, sequence: ThreadSequence, thread: DecodeThread, prompt: list[int], sampling: SamplingParams
) -> int:
    """Sample the token after a thread's last one; for a main thread without tokens, the one after the prompt."""
    device = model.device
    # (thread number, index) of every token of the answer that the thread's last token sees, ending with that token
    context: Context = sequence.sees(thread.number, thread.num_tokens - 1) if thread.num_tokens else ()
    parts = sorted(context, key=lambda part: (part[0] == thread.number, sequence.threads[part[0]].path))
    visible = [(number, index) for number, count in parts for index in range(count)]
    answer = [sequence.threads[number].token_ids[index] for number, index in visible]
    positions = [sequence.threads[number].positions[index] for number, index in visible]
    token_ids = torch.tensor([[*prompt, *answer]], device=device)
    if any(map(is_recurrent, model.modules())):
        mask = torch.ones_like(token_ids)
    else:
        mask = _attention_bias(sequence, visible).to(device, model.dtype)[None, None]
    logits_TV = model(
        input_ids=token_ids,
        position_ids=torch.tensor([[*range(len(prompt)), *positions]], device=device),
        attention_mask=mask,
        use_cache=False,
    ).logits[0]

    vocab_size = logits_TV.shape[-1]
    sampler = Sampler(sampling, vocab_size, device, stream=thread.noise_stream)
    sampler.add_prompt(torch.tensor(prompt, dtype=torch.int64, device=device))
    logits_TV[-1, list(sequence.banned(thread.number))] = -torch.inf
    token = sampler.choose(
        logits_TV[-1:],
        torch.tensor([thread.next_position], device=device),
        torch.ones(1, len(answer), dtype=torch.bool, device=device),
        torch.tensor(answer, dtype=torch.int64, device=device),
    )
    return int(token)


def _attention_bias(sequence: ThreadSequence, visible: list[tuple[int, int]]) -> Tensor:
    """[T, T], to be added to the scores: 0 where a token sees another, else −inf. The prompt is causal and visible to all."""
    start = sequence.prompt_length
    visible_TT = torch.ones(start + len(visible), start + len(visible), dtype=torch.bool).tril()
    visible_TT[start:, start:] = False
    columns = {token: column for column, token in enumerate(visible, start=start)}
    for row, (number, index) in enumerate(visible, start=start):
        visible_TT[row, [columns[other, past] for other, count in sequence.sees(number, index) for past in range(count)]] = True
    return torch.zeros(visible_TT.shape).masked_fill(~visible_TT, -torch.inf)
