"""The reference for answers in decode threads: a separate forward pass for every token, over exactly the tokens it sees.

No cache, no tree, no pipeline: a ``transformers`` model with explicit mask and positions.

Shapes: T tokens that a row sees (the prompt and the row's own token included), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipedec.core import SamplingParams
from pipedec.sampling import Sampler
from pipedec.threads import Context, DecodeThread, Sequence, State

Choose = Callable[[list[DecodeThread]], DecodeThread]


def shortest(running: list[DecodeThread]) -> DecodeThread:
    """The thread with the fewest tokens, the oldest if several have as few: the threads advance side by side."""
    return min(running, key=lambda thread: thread.num_tokens)


@torch.inference_mode()
def naive_threads(
    model: PreTrainedModel,
    sequence: Sequence,
    prompt_ids: Iterable[int],
    sampling: SamplingParams,
    choose: Choose = shortest,
) -> None:
    """Decode the target's answer with all the threads that it opens, one token of one thread at a time.

    Args:
        model: in evaluation mode. A sliding window, if it has one, is not applied.
        sequence: a new sequence, to which the answer is added. It decides when the answer ends; ``max_tokens``,
            ``stop_token_ids``, ``ignore_eos`` and ``stop`` of ``sampling`` are ignored.
        choose: selects the running thread that generates the next token. The answer does not depend on it.

    Raises:
        ValueError: ``sampling`` is stochastic but has no seed.
    """
    prompt = list(prompt_ids)
    while sequence.finished is None:
        thread = choose([thread for thread in sequence.threads if thread.state is State.RUNNING])
        sequence.accept(thread.number, _next_token(model, sequence, thread, prompt, sampling))


def _next_token(
    model: PreTrainedModel, sequence: Sequence, thread: DecodeThread, prompt: list[int], sampling: SamplingParams
) -> int:
    """Sample the token after a thread's last one; for a main thread without tokens, the one after the prompt."""
    device = model.device
    visible = _visible_tokens(sequence, thread)
    answer = [sequence.threads[number].token_ids[index] for number, index in visible]
    positions = [sequence.threads[number].positions[index] for number, index in visible]
    logits_TV = model(
        input_ids=torch.tensor([[*prompt, *answer]], device=device),
        position_ids=torch.tensor([[*range(len(prompt)), *positions]], device=device),
        attention_mask=_attention_bias(sequence, visible).to(device, model.dtype)[None, None],
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


def _visible_tokens(sequence: Sequence, thread: DecodeThread) -> list[tuple[int, int]]:
    """(thread number, index) of every token of the answer that the thread's last token sees, ending with that token."""
    context: Context = sequence.sees(thread.number, thread.num_tokens - 1) if thread.num_tokens else ()
    parts = sorted(context, key=lambda part: (part[0] == thread.number, sequence.threads[part[0]].path))
    return [(number, index) for number, count in parts for index in range(count)]


def _attention_bias(sequence: Sequence, visible: list[tuple[int, int]]) -> Tensor:
    """[T, T], to be added to the scores: 0 where a token sees another, else −inf. The prompt is causal and visible to all."""
    start = sequence.prompt_length
    visible_TT = torch.ones(start + len(visible), start + len(visible), dtype=torch.bool).tril()
    visible_TT[start:, start:] = False
    columns = {token: column for column, token in enumerate(visible, start=start)}
    for row, (number, index) in enumerate(visible, start=start):
        visible_TT[row, [columns[other, past] for other, count in sequence.sees(number, index) for past in range(count)]] = True
    return torch.zeros(visible_TT.shape).masked_fill(~visible_TT, -torch.inf)
