"""What is asked, by name: short questions whose answers are clear on every processor (see ``margins``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from golden.pipelines import PLAIN, TARGETS, THREADS
from pipedec.core.request import MethodOptions, TokenizedRequest
from pipedec.core.sampling import SamplingParams, StructuredOutputs
from pipedec.text.prompt import Prompter
from pipedec.threads import load_dialect

SCHEMA = {
    "type": "object",
    "properties": {"module": {"enum": ["os", "shutil", "pydoc"]}, "lines": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["module", "lines"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Question:
    """A prompt of a user.

    Attributes:
        dialect: in which the answer may open threads; None for an answer in one thread of the pair without threads.
    """

    prompt: str
    sampling: SamplingParams
    dialect: str | None = None

    @property
    def target(self) -> Path:
        return TARGETS[PLAIN if self.dialect is None else THREADS]

    @property
    def threads(self) -> str | None:
        return None if self.dialect is None else load_dialect(self.dialect).to_json()

    @property
    def token_ids(self) -> tuple[int, ...]:
        return prompter(self.target).token_ids(self.prompt, False, self.sampling.max_tokens, self.dialect)

    def request(
        self, number: int, method: str, options: MethodOptions | None = None, said: tuple[int, ...] = ()
    ) -> TokenizedRequest:
        return TokenizedRequest(
            number, self.token_ids, self.sampling, method, options, threads=self.threads, output_token_ids=said
        )


@cache
def prompter(target: Path) -> Prompter:
    return Prompter(target, 2048)


def _sampling(temperature: float = 0.0, max_tokens: int = 9, **others: Any) -> SamplingParams:
    return SamplingParams(temperature, max_tokens=max_tokens, logprobs=2, **others)


COPYTREE = "What does shutil.copytree() do?"
BAKER = "A baker makes 24 rolls every morning and sells each for $2. How much does he earn in 5 days?"
USES = "What are three uses of shutil?"
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}
FORK, PROMISE = {6: 10.0}, {8: 6.0}  # what opens a thread is likely, so that it is early
MODULE = StructuredOutputs(json=SCHEMA)
ANSWER = StructuredOutputs(regex=r"(yes|no), [a-z]{2,8}( [a-z]{2,8}){0,2}\.")

QUESTIONS = {
    "copytree": Question(COPYTREE, _sampling()),
    "baker": Question(BAKER, _sampling()),
    "drawn": Question(BAKER, _sampling(0.8, top_k=40, top_p=0.9, min_p=0.01, seed=1)),
    "drawn, penalised": Question(COPYTREE, _sampling(0.7, seed=3, **PENALTIES)),
    "apar": Question(USES, _sampling(max_tokens=18, logit_bias=FORK), "apar"),
    "pasta, drawn": Question(USES, _sampling(0.7, max_tokens=15, seed=5, logit_bias=PROMISE), "pasta"),
    "json": Question("Which module copies files?", _sampling(max_tokens=24, structured_outputs=MODULE)),
    "regex, drawn": Question("Is the sky blue?", _sampling(0.9, seed=7, max_tokens=12, structured_outputs=ANSWER)),
}
