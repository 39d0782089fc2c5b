"""The same checkpoint and prompts through ``transformers`` and pipedec, on this machine.

Everything runs in this process, one answer at a time; the contenders (``contenders``) take turns, and nothing is emulated. Owns
the turns and the figures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import torch
import transformers

from pipedec.bench.alternatives.contenders import Contender, load_contenders, quiet_transformers
from pipedec.bench.options import Positive
from pipedec.bench.record import Row, header, pipeline_row
from pipedec.engine.devices import chosen_device
from pipedec.flags import Help, check_fields
from pipedec.model import ModelConfig
from pipedec.plan.spec import PipelineSpec
from pipedec.text.prompt import Prompter

Turns = list[list["TimedAnswer"]]  # of one contender: for each prompt, the answer of every repeat


@dataclass(frozen=True)
class AlternativesConfig:
    """What is measured. Raises UserError for a number below 1."""

    max_tokens: Annotated[Positive, Help("Maximum number of output tokens.")] = 128
    repeats: Annotated[Positive, Help("Number of times each contender answers each prompt.")] = 3
    threads: Annotated[Positive | None, Help("Number of CPU threads of torch (default: torch's choice).")] = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class TimedAnswer:
    """One answer, its seconds from prompt to last token, and the target's passes and rows for it."""

    token_ids: tuple[int, ...]
    seconds: float
    passes: float
    rows: float


def measure_alternatives(
    spec: PipelineSpec,
    prompts: Sequence[str],
    config: AlternativesConfig,
    on_answer: Callable[[int, int], None] = lambda *_: None,
    load: Callable[[PipelineSpec], list[Contender]] = load_contenders,
) -> list[Row]:
    """One JSONL row per contender. The answers of all are compared with those of the first, greedy ``transformers``.

    Args:
        on_answer: called after each answer with (answers done, answers in all).
        load: the contenders.

    Raises:
        UserError: a prompt does not fit the target's context, or a contender cannot be loaded.
    """
    prompter = Prompter(spec.target, ModelConfig.from_directory(spec.target).max_positions)
    prompt_ids = [prompter.token_ids(prompt, False, config.max_tokens) for prompt in prompts]
    with _threads(config.threads) as num_threads, quiet_transformers():
        settings = asdict(config) | {
            "threads": num_threads,
            "prompts": len(prompts),
            "pipeline": pipeline_row(spec.description()),
        }
        settings["device"] = chosen_device(spec.settings.cut.device).type
        first = header("alternatives", settings) | {"transformers": transformers.__version__}
        contenders = load(spec)
        for contender in contenders:
            contender.answer(prompt_ids[0], config.max_tokens)  # to warm up
        turns = _take_turns(contenders, prompt_ids, config, on_answer)
    expected = [answers[0].token_ids for answers in turns[0]]
    return [
        {**first, "contender": contender.name, **_figures(answers, prompt_ids, expected)}
        for contender, answers in zip(contenders, turns, strict=True)
    ]


def _take_turns(
    contenders: list[Contender],
    prompt_ids: list[tuple[int, ...]],
    config: AlternativesConfig,
    on_answer: Callable[[int, int], None],
) -> list[Turns]:
    """All answers, by contender. All contenders answer a prompt before the next; each round starts with another one."""
    turns: list[Turns] = [[[] for _ in prompt_ids] for _ in contenders]
    rounds = [index for index in range(len(prompt_ids)) for _ in range(config.repeats)]
    for number, index in enumerate(rounds):
        for turn in range(len(contenders)):
            chosen = (number + turn) % len(contenders)
            turns[chosen][index].append(_timed(contenders[chosen], prompt_ids[index], config.max_tokens))
            on_answer(number * len(contenders) + turn + 1, len(rounds) * len(contenders))
    return turns


def _timed(contender: Contender, prompt_token_ids: Sequence[int], max_tokens: int) -> TimedAnswer:
    before = replace(contender.count)
    started = time.perf_counter()
    token_ids = contender.answer(prompt_token_ids, max_tokens)
    seconds = time.perf_counter() - started
    after = contender.count
    return TimedAnswer(tuple(token_ids), seconds, after.passes - before.passes, after.rows - before.rows)


def _figures(turns: Turns, prompt_ids: list[tuple[int, ...]], expected: list[tuple[int, ...]]) -> Row:
    """Rates over all prompts, from the median time of each; passes and rows per token, prompt rows excluded."""
    answers = [repeats[0] for repeats in turns]
    tokens = sum(len(answer.token_ids) for answer in answers)
    seconds = sum(statistics.median(answer.seconds for answer in repeats) for repeats in turns)
    new_rows = sum(answer.rows - len(ids) for answer, ids in zip(answers, prompt_ids, strict=True))
    return {
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "ms_per_token": 1000 * seconds / tokens,
        "passes_per_token": sum(answer.passes for answer in answers) / tokens,
        "rows_per_token": new_rows / tokens,
        "equal": sum(all(answer.token_ids == ids for answer in repeats) for repeats, ids in zip(turns, expected, strict=True)),
        "seconds": [[round(answer.seconds, 6) for answer in repeats] for repeats in turns],
    }


@contextmanager
def _threads(number: int | None) -> Iterator[int]:
    """Sets the number of torch's CPU threads inside the block; None leaves it as it is."""
    usual = torch.get_num_threads()
    torch.set_num_threads(number or usual)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(usual)
