"""What a model tuned for threads is measured on: held-out answers, and held-out prompts that it answers itself.

Owns which figures are reported; ``figures`` computes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipedec.threads import Sequence, replay
from pipedec.train.continuations import continue_greedily
from pipedec.train.threads.answers import Asked, ModelAnswers
from pipedec.train.threads.figures import AnsweredPrompt, agreement, answer_all, thread_figures
from pipedec.train.threads.learning import ThreadLoss, held_out_loss
from pipedec.train.threads.rows import Writer, Written

PLAIN = "plain"


@dataclass(frozen=True)
class HeldOut:
    """Held-out samples of each dialect, and prompts to answer, by dialect and rule.

    Attributes:
        max_tokens: maximum length of an answer.
        store: directory that keeps the answers in one thread.
    """

    samples: dict[str, list[Written]]
    prompts: dict[str, dict[str, list[Written]]]
    max_tokens: int
    store: Path

    def losses(self, loss: ThreadLoss, writer: Writer) -> dict[str, dict[str, Any]]:
        """Losses by dialect, and of the same answers in one thread (``plain``)."""
        report = {dialect: held_out_loss(loss, writer, samples) for dialect, samples in self.samples.items()}
        return report | self.plain_loss(loss, writer)

    def plain_loss(self, loss: ThreadLoss, writer: Writer) -> dict[str, dict[str, Any]]:
        """Loss of the written answers in one thread, each answer once."""
        distinct = {(sample.record.question.prompt, sample.record.question.answer): sample.record for sample in self._all()}
        return {PLAIN: held_out_loss(loss, writer, [writer.sample(record, None) for record in distinct.values()])}

    def _all(self) -> list[Written]:
        return [sample for samples in self.samples.values() for sample in samples]

    def answers(self, model: Any, writer: Writer) -> dict[str, dict[str, list[AnsweredPrompt]]]:
        """Greedy answers to the prompts, by dialect and rule."""
        return {
            dialect: {
                rule: answer_all(
                    ModelAnswers(model, writer.bound[dialect], (writer.end_token_id,), self.max_tokens),
                    [Asked(sample.prompt) for sample in samples],
                    f"held out: {dialect} {rule}",
                )
                for rule, samples in by_rule.items()
            }
            for dialect, by_rule in self.prompts.items()
        }

    def figures(
        self, model: Any, writer: Writer, answered: dict[str, dict[str, list[AnsweredPrompt]]]
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

    def _baseline(self, model: Any, writer: Writer, samples: list[Written], name: str) -> list[AnsweredPrompt]:
        """The answers in one thread."""
        prompts = [writer.prompt(sample.record.question.prompt, None) for sample in samples]
        plain = {
            tuple(found.ids[: found.prompt_length]): found.ids[found.prompt_length :]
            for found in continue_greedily(model, [list(prompt) for prompt in prompts], self.max_tokens, self.store / name)
        }
        return [(prompt, self._in_one_thread(prompt, plain[prompt], writer)) for prompt in prompts]

    def _in_one_thread(self, prompt: tuple[int, ...], answer: list[int], writer: Writer) -> Sequence:
        sequence = Sequence(len(prompt), [writer.end_token_id], self.max_tokens)
        replay(sequence, answer)
        return sequence


def held_out_of(samples: list[Written], num_prompts: int, max_length: int, store: Path) -> HeldOut:
    """Samples of at most ``max_length`` tokens, and up to ``num_prompts`` different prompts of each dialect and rule."""
    fitting: dict[str, list[Written]] = {}
    prompts: dict[str, dict[str, list[Written]]] = {}
    for sample in samples:
        assert sample.dialect is not None
        if sample.num_tokens <= max_length:
            fitting.setdefault(sample.dialect, []).append(sample)
            chosen = prompts.setdefault(sample.dialect, {}).setdefault(sample.record.rule, [])
            if len(chosen) < num_prompts and all(other.prompt != sample.prompt for other in chosen):
                chosen.append(sample)
    by_rule = {dialect: dict(sorted(found.items())) for dialect, found in prompts.items()}
    return HeldOut(fitting, by_rule, max_length, store)


def agreements(model: Any, answered: dict[str, dict[str, list[AnsweredPrompt]]]) -> dict[str, dict[str, Any]]:
    """How well the model predicts these answers, by dialect and rule."""
    return {
        dialect: {rule: agreement(model, answers) for rule, answers in by_rule.items()} for dialect, by_rule in answered.items()
    }
