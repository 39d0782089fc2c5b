"""What rank 0 does with a request before it runs: tokenize it and check that this pipeline can answer it."""

from __future__ import annotations

from dataclasses import dataclass

from pipedec.core import DEFAULT_METHOD, Request
from pipedec.decoding import Company
from pipedec.engine.answer import Answer
from pipedec.engine.sequences import Sequences
from pipedec.messages import PromptRequest
from pipedec.methods import LayerTreeOptions, make_options
from pipedec.sampling import seeded
from pipedec.scheduler.protocol import Message
from pipedec.text.prompt import Prompter
from pipedec.threads import Dialect, Sequence


@dataclass(frozen=True)
class Admission:
    """Makes answers of requests.

    Attributes:
        sequences: makes the sequences of answers.
        num_stages: of the pipeline.
        tree: the cluster's own limits of layer-wise trees, for requests that give none.
    """

    prompter: Prompter
    sequences: Sequences
    num_stages: int
    tree: LayerTreeOptions | None

    def admit(self, message: Message, company: Company) -> tuple[Answer, Sequence]:
        """The answer to the request in ``message``, not begun yet, and a sequence for its method.

        Raises:
            UserError: the request is invalid, too long, or asks for something that this pipeline does not have.
        """
        prompt = PromptRequest.from_json(message.text)
        name = prompt.method or DEFAULT_METHOD
        dialect = None if prompt.threads is None else Dialect.from_json(prompt.threads).name
        token_ids = self.prompter.token_ids(prompt.prompt, prompt.raw, prompt.sampling.max_tokens, dialect)
        self.prompter.check_bias(prompt.sampling.logit_bias)
        options = make_options(name, prompt.options, self.tree)
        request = Request(
            message.number, token_ids, seeded(prompt.sampling), name, options, prompt.trace, prompt.threads, prompt.priority
        )
        company.check(request)
        new_sequence = self.sequences.maker(len(token_ids), request.sampling, request.threads)
        return Answer(request, new_sequence(), self.prompter, self.num_stages, prompt.show_threads), new_sequence()
