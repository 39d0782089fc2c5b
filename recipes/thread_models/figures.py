"""Figures of answers in threads: how often they fork, how parallel they are, the speed-up over one thread, and repetition.

Owns what a tuned model is measured on: held-out answers, and held-out prompts that it answers itself. Means of ratios are
geometric, as in PASTA §5.1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from pipedec.threads import Sequence, ThreadMetrics, measure
from pipedec.train.continuations import continued
from pipedec.train.targets import LoadedTarget
from recipes.thread_models.answers import AnswerSource, ModelAnswers, SeededPrompt
from recipes.thread_models.learning import ThreadLoss, batches, held_out_loss, learned_logits
from recipes.thread_models.rows import RowWriter, TokenizedSample, WrittenSample, tree_row

ANSWERS_AT_ONCE = 32
PLAIN = "plain"
_REPEATED = 8  # tokens that a repetition has, at least
_TAIL = 96

AnsweredPrompt = tuple[tuple[int, ...], Sequence]  # a prompt and its answer


def answer_all(answers: AnswerSource, asked: list[SeededPrompt], title: str) -> list[AnsweredPrompt]:
    """Answers to all prompts, decoded in batches."""
    answered: list[AnsweredPrompt] = []
    for start in track(range(0, len(asked), ANSWERS_AT_ONCE), title):
        part = asked[start : start + ANSWERS_AT_ONCE]
        answered += zip((one.prompt_ids for one in part), answers.answer(part), strict=True)
    return answered


def thread_figures(sequences: list[Sequence], baseline_tokens: list[int]) -> dict[str, Any]:
    """Figures of answers; ``baseline_tokens`` are the lengths of the answers to the same prompts in one thread.

    ``forked`` is the share of answers with two threads or more; ``threads``, ``tokens`` and ``longest_chain`` are means,
    ``parallelism`` and ``speedup`` (theoretical) geometric means; ``finished`` is the share of answers that ended by themselves,
    ``circles`` the share of those that ran in circles to the token limit.
    """
    measured = [measure(sequence) for sequence in sequences]
    speedups = [theoretical_speedup(metrics, tokens) for metrics, tokens in zip(measured, baseline_tokens, strict=True)]
    return {
        "answers": len(sequences),
        "forked": _mean(metrics.threads >= 2 for metrics in measured),
        **{name: _mean(getattr(metrics, name) for metrics in measured) for name in ("threads", "tokens", "longest_chain")},
        "parallelism": geometric_mean(metrics.parallelism for metrics in measured),
        "speedup": geometric_mean(speedups),
        "finished": _mean(sequence.finished == "stop" for sequence in sequences),
        "circles": _mean(in_circles(sequence) for sequence in sequences),
        "anomalies": dict(sum((Counter(sequence.anomalies) for sequence in sequences), Counter())),
    }


def theoretical_speedup(metrics: ThreadMetrics, baseline_tokens: int) -> float:
    """The speedup over a sequential answer to the same prompt: its number of tokens / longest chain (PASTA §5.1)."""
    return baseline_tokens / metrics.longest_chain if metrics.longest_chain else 0.0


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean of the values that are not 0; 0 if there are none."""
    logs = [math.log(value) for value in values if value > 0]
    return round(math.exp(sum(logs) / len(logs)), 4) if logs else 0.0


def text_of(sequence: Sequence, decode: Callable[[list[int]], str]) -> str:
    """The answer as readers see it."""
    text, tokens = "", list[int]()
    for token in sequence.document():
        if not token.is_control:
            tokens.append(token.token_id)
        elif token.tail:
            text, tokens = text + decode(tokens) + token.tail, []
    return text + decode(tokens)


@torch.no_grad()
def agreement(model: Any, answered: list[AnsweredPrompt]) -> dict[str, Any]:
    """How often the model's top k holds the next token of the thread, control tokens included."""
    ranks_L = []  # of each batch: how many tokens the model ranks above the next one
    for batch in batches([tree_row(sequence, prompt) for prompt, sequence in answered], model.device):
        logits_LV = learned_logits(model, batch)
        ranks_L.append((logits_LV > logits_LV.gather(1, batch.learned[:, None])).sum(1).cpu())
    ranks = torch.cat(ranks_L)
    shares = {f"top{k}": round(float((ranks < k).float().mean()), 4) for k in (1, 4, 16)}
    return {**shares, "tokens": len(ranks)}


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return round(sum(found) / len(found), 4) if found else 0.0


def repeats(token_ids: list[int]) -> list[bool]:
    """For every token of a thread: whether it and the seven before it occurred before."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for end in range(1, len(token_ids) + 1):
        part = tuple(token_ids[max(0, end - _REPEATED) : end])
        found.append(part in seen)
        if len(part) == _REPEATED:
            seen.add(part)
    return found


def in_circles(sequence: Sequence) -> bool:
    """Whether the answer ran to its token limit, and a thread had mostly repeated itself in its last 96 tokens."""
    if sequence.finished == "stop":
        return False
    tails = [repeats(thread.token_ids)[-_TAIL:] for thread in sequence.threads if thread.num_tokens >= _TAIL]
    return any(2 * sum(tail) > _TAIL for tail in tails)


@dataclass(frozen=True)
class HeldOutSamples:
    """Held-out samples of each dialect, and prompts to answer, by dialect and rule."""

    samples: dict[str, list[WrittenSample]]
    prompts: dict[str, dict[str, list[WrittenSample]]]
    max_tokens: int  # maximum length of an answer
    store: Path  # directory that keeps the answers in one thread

    def losses(self, loss: ThreadLoss, writer: RowWriter) -> dict[str, dict[str, Any]]:
        """Losses by dialect, and of the same answers in one thread (``plain``)."""
        report = {dialect: held_out_loss(loss, writer, samples) for dialect, samples in self.samples.items()}
        return report | self.plain_loss(loss, writer)

    def plain_loss(self, loss: ThreadLoss, writer: RowWriter) -> dict[str, dict[str, Any]]:
        """Loss of the written answers in one thread, each answer once."""
        records = [sample.record for samples in self.samples.values() for sample in samples]
        distinct = {(record.question.prompt, record.question.answer): record for record in records}
        return {PLAIN: held_out_loss(loss, writer, [writer.sample(record, None) for record in distinct.values()])}

    def answers(self, model: Any, writer: RowWriter) -> dict[str, dict[str, list[AnsweredPrompt]]]:
        """Greedy answers to the prompts, by dialect and rule."""
        found: dict[str, dict[str, list[AnsweredPrompt]]] = {}
        for dialect, by_rule in self.prompts.items():
            answers = ModelAnswers(model, writer.bound[dialect], (writer.end_token_id,), self.max_tokens)
            for rule, samples in by_rule.items():
                prompts = [SeededPrompt(sample.prompt) for sample in samples]
                found.setdefault(dialect, {})[rule] = answer_all(answers, prompts, f"held out: {dialect} {rule}")
        return found

    def figures(
        self, model: Any, writer: RowWriter, answered: dict[str, dict[str, list[AnsweredPrompt]]]
    ) -> dict[str, dict[str, Any]]:
        """Figures of these answers against the answers in one thread, by dialect and rule; and of the latter (``plain``)."""
        found: dict[str, dict[str, Any]] = {}
        plain: dict[tuple[int, ...], Sequence] = {}
        for dialect, by_rule in answered.items():
            for rule, answers in by_rule.items():
                baseline = self._baseline(model, writer, self.prompts[dialect][rule], f"{dialect}-{rule}")
                lengths = [sequence.main.num_tokens for _, sequence in baseline]
                found.setdefault(dialect, {})[rule] = thread_figures([sequence for _, sequence in answers], lengths)
                plain |= baseline
        return found | {PLAIN: {"all": thread_figures(list(plain.values()), [one.main.num_tokens for one in plain.values()])}}

    def _baseline(self, model: Any, writer: RowWriter, samples: list[WrittenSample], name: str) -> list[AnsweredPrompt]:
        """The answers in one thread."""
        prompts = [writer.prompt(sample.record.question.prompt, None) for sample in samples]
        plain = greedy_answers(model, prompts, self.max_tokens, self.store / name)
        return [(prompt, writer.sequence(TokenizedSample(None, prompt, plain[prompt]), self.max_tokens)) for prompt in prompts]


def greedy_answers(
    model: Any, prompts: list[tuple[int, ...]], max_tokens: int, store: Path
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """A model's answers to these prompts in one thread; ``store`` keeps them."""
    found = continued(LoadedTarget(lambda _: model), [list(prompt) for prompt in prompts], max_tokens, store)
    return {tuple(one.ids[: one.prompt_length]): tuple(one.ids[one.prompt_length :]) for one in found}


def held_out_of(samples: list[WrittenSample], num_prompts: int, max_length: int, store: Path) -> HeldOutSamples:
    """Samples of at most ``max_length`` tokens, and up to ``num_prompts`` different prompts of each dialect and rule."""
    fitting: dict[str, list[WrittenSample]] = {}
    prompts: dict[str, dict[str, list[WrittenSample]]] = {}
    for sample in samples:
        assert sample.dialect is not None
        if sample.num_tokens <= max_length:
            fitting.setdefault(sample.dialect, []).append(sample)
            chosen = prompts.setdefault(sample.dialect, {}).setdefault(sample.record.rule, [])
            if len(chosen) < num_prompts and all(other.prompt != sample.prompt for other in chosen):
                chosen.append(sample)
    by_rule = {dialect: dict(sorted(found.items())) for dialect, found in prompts.items()}
    return HeldOutSamples(fitting, by_rule, max_length, store)


def agreements(model: Any, answered: dict[str, dict[str, list[AnsweredPrompt]]]) -> dict[str, dict[str, Any]]:
    """How well the model predicts these answers, by dialect and rule."""
    return {
        dialect: {rule: agreement(model, answers) for rule, answers in by_rule.items()} for dialect, by_rule in answered.items()
    }
