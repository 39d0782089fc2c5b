"""What an answer in decode threads is compared with: every token by a forward of its own over exactly what it sees.

No cache, no tree, no pipeline: a model of ``transformers``, an explicit mask, explicit positions. Owns the comparison of two
answers, too.

Shapes: P prompt tokens, T tokens that a row sees (prompt and its own included), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import zip_longest

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipedec.core import SamplingParams
from pipedec.sampling import Sampler
from pipedec.threads import Context, DecodeThread, Sequence, State

Choose = Callable[[list[DecodeThread]], DecodeThread]


def shortest(running: list[DecodeThread]) -> DecodeThread:
    """The thread with the fewest tokens, the oldest of them: all go on side by side."""
    return min(running, key=lambda thread: thread.num_tokens)


@torch.inference_mode()
def naive_threads(
    model: PreTrainedModel,
    sequence: Sequence,
    prompt_ids: Iterable[int],
    sampling: SamplingParams,
    choose: Choose = shortest,
) -> None:
    """Decode the target's answer in as many threads as it opens, one token of one thread at a time.

    Args:
        model: in evaluation mode; a sliding window, if it has one, is not applied.
        sequence: a fresh one, which takes in the answer. It knows what ends it, so of ``sampling`` neither ``max_tokens`` nor
            ``stop_token_ids``, ``ignore_eos`` and ``stop`` are looked at.
        choose: which of the running threads says its next token. The answer does not depend on it.

    Raises:
        ValueError: there is something to draw and no seed.
    """
    prompt = list(prompt_ids)
    while sequence.finished is None:
        thread = choose([thread for thread in sequence.threads if thread.state is State.RUNNING])
        sequence.accept(thread.number, _next_token(model, sequence, thread, prompt, sampling))


def first_thread_difference(expected: Sequence, found: Sequence) -> str | None:
    """Where two answers to a prompt part, as one line, or None if they are equal.

    The first place in document order: everything that a token sees stands before it, so what went wrong there is no
    consequence of another difference. Behind the cut at ``max_tokens`` nothing is compared.
    """
    for one, other in zip_longest(_said(expected), _said(found)):
        if one != other:
            return _difference(one, other)
    if expected.finished != found.finished:
        return f"the answer's finish reason is {found.finished}, not {expected.finished}"
    return None


_Said = tuple[tuple[int, ...], int, int, int]  # path, index in the thread, token, position


def _said(sequence: Sequence) -> list[_Said]:
    threads = sequence.threads
    return [
        (threads[token.thread].path, token.ordinal, token.token_id, threads[token.thread].positions[token.ordinal])
        for token in sequence.document()
    ]


def _difference(expected: _Said | None, found: _Said | None) -> str:
    """All before is equal, so if the paths differ, the longer one's thread goes on in one answer and has ended in the other."""
    path, index, _, _ = max((said for said in (expected, found) if said is not None), key=lambda said: len(said[0]))
    token, wanted = (said[2] if said is not None and said[0] == path else None for said in (found, expected))
    if expected is not None and found is not None and token == wanted:
        return f"thread {path}, token {index} ({token}): its position is {found[3]}, not {expected[3]}"
    return f"thread {path}, token {index} is {token}, not {wanted}"


def _next_token(
    model: PreTrainedModel, sequence: Sequence, thread: DecodeThread, prompt: list[int], sampling: SamplingParams
) -> int:
    """What the model says behind a thread's last token, or, where the main thread has none, behind the prompt."""
    device = model.device
    seen = _seen(sequence, thread)
    answer = [sequence.threads[number].token_ids[index] for number, index in seen]
    positions = [sequence.threads[number].positions[index] for number, index in seen]
    logits_TV = model(
        input_ids=torch.tensor([[*prompt, *answer]], device=device),
        position_ids=torch.tensor([[*range(len(prompt)), *positions]], device=device),
        attention_mask=_bias(sequence, seen).to(device, model.dtype)[None, None],
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


def _seen(sequence: Sequence, thread: DecodeThread) -> list[tuple[int, int]]:
    """(thread number, index) of every token of the answer that the thread's last token sees, itself the last of them."""
    context: Context = sequence.sees(thread.number, thread.num_tokens - 1) if thread.num_tokens else ()
    parts = sorted(context, key=lambda part: (part[0] == thread.number, sequence.threads[part[0]].path))
    return [(number, index) for number, count in parts for index in range(count)]


def _bias(sequence: Sequence, seen: list[tuple[int, int]]) -> Tensor:
    """[T, T] for attention: 0 where a token sees another, −inf elsewhere. The prompt is causal, and seen by all."""
    prompt = sequence.prompt_length
    visible_TT = torch.ones(prompt + len(seen), prompt + len(seen), dtype=torch.bool).tril()
    visible_TT[prompt:, prompt:] = False
    columns = {place: column for column, place in enumerate(seen, start=prompt)}
    for row, (number, index) in enumerate(seen, start=prompt):
        visible_TT[row, [columns[other, place] for other, count in sequence.sees(number, index) for place in range(count)]] = True
    return torch.zeros(visible_TT.shape).masked_fill(~visible_TT, -torch.inf)
