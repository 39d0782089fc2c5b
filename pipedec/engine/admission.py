"""Admit requests on rank 0: tokenize them and check that this pipeline can answer them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from pipedec.core import DEFAULT_METHOD, Request, UserError
from pipedec.decoding import Batch
from pipedec.engine.answer import EarlierOutput, RunningAnswer
from pipedec.engine.sequences import Sequences
from pipedec.kv import KVManager
from pipedec.messages import PromptRequest
from pipedec.methods import LayerTreeOptions, make_options
from pipedec.scheduler.protocol import RankMessage
from pipedec.text.prompt import Prompter
from pipedec.threads import Dialect, NewSequence

_ROWS_IN_FLIGHT = 256  # of an answer in threads, beside the tokens that it keeps


@dataclass(frozen=True)
class Admission:
    """Turns requests into answers.

    Attributes:
        sequences: makes the sequences of answers.
        num_stages: of the pipeline.
        tree: the cluster's own limits of layer-wise trees, for requests that give none.
    """

    prompter: Prompter
    sequences: Sequences
    num_stages: int
    tree: LayerTreeOptions | None

    def admit(self, message: RankMessage, batch: Batch) -> tuple[RunningAnswer, NewSequence]:
        """Return the new answer to the request in ``message``, and a function that makes the sequences for its method. The answer
        continues after the tokens that another process has published.

        Raises:
            UserError: the request is invalid, too long, or needs something that this pipeline does not have.
        """
        prompt = PromptRequest.from_json(message.text)
        heard = prompt.resume + message.told
        request = self._request(message.number, prompt, heard, batch.kv)
        maker = partial(self.sequences.maker, len(request.prompt_token_ids), request.sampling, request.threads)
        brought, known = (
            EarlierOutput(maker(output_token_ids), len(output_token_ids)) if output_token_ids else None
            for output_token_ids in (prompt.resume, heard)
        )
        new_sequence = maker(request.output_token_ids)
        answer = RunningAnswer(request, new_sequence, self.prompter, self.num_stages, prompt.show_threads, brought, known)
        if not answer.is_complete:
            batch.check(request, new_sequence())
        return answer, new_sequence

    def _request(self, number: int, prompt: PromptRequest, heard: tuple[int, ...], kv: KVManager) -> Request:
        name = prompt.method or DEFAULT_METHOD
        dialect = None if prompt.threads is None else Dialect.from_json(prompt.threads).name
        token_ids = self.prompter.token_ids(prompt.prompt, prompt.raw, prompt.sampling.max_tokens, dialect)
        self.sequences.check_prompt(token_ids)
        self.prompter.check_bias(prompt.sampling.logit_bias)
        if prompt.sampling.structured_outputs is not None:
            self.sequences.check(prompt.sampling.structured_outputs, heard)
        if prompt.sampling.is_stochastic and prompt.sampling.seed is None:
            raise UserError("the answer is to be drawn at random and has no seed: the client that submits it must choose one")
        options = make_options(name, prompt.options, self.tree)
        output_token_ids = () if prompt.threads else heard  # an answer in threads is generated again from its first token
        threads = threads_within(prompt.threads, kv)
        return Request(
            number, token_ids, prompt.sampling, name, options, prompt.trace, threads, prompt.priority, output_token_ids
        )


def threads_within(dialect: str | None, kv: KVManager) -> str | None:
    """Limit a dialect so that its answers end as ``cache_full`` before the KV memory does, however much their threads keep.

    Raises:
        UserError: the dialect is invalid.
    """
    if dialect is None:
        return None
    checked, most = Dialect.from_json(dialect), max(kv.capacity - _ROWS_IN_FLIGHT, 1)
    return dialect if checked.max_cached_tokens <= most else replace(checked, max_cached_tokens=most).to_json()
