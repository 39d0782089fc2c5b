"""What rank 0 does with a request before it runs: tokenize and check it, and create its decoding method.

Owns what answers share: the draft model, and what methods have learned from earlier answers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import torch

from pipedec.core import DEFAULT_METHOD, MaskParams, Request, UserError
from pipedec.decoding import Experience, create_method, create_threaded
from pipedec.engine.answer import Answer
from pipedec.engine.dialects import Dialects
from pipedec.engine.prefill import prefill_chunks
from pipedec.engine.threaded_answer import ThreadedAnswer
from pipedec.engine.timed_drafter import TimedDrafter
from pipedec.messages import PromptRequest
from pipedec.methods import LayerTreeOptions, make_options
from pipedec.sampling import seeded
from pipedec.scheduler.protocol import Message
from pipedec.scheduler.workflow import Payload
from pipedec.text.prompt import Prompter
from pipedec.threads import Dialect
from pipedec.topology import Topology


@dataclass
class Admission:
    """Makes answers of requests.

    Attributes:
        dialects: None if the pipeline cannot decode in threads.
        drafter: None without a draft model.
        trained_masks: masks of the target's BiTA; 0 if it has none.
        device: of the draft model.
        tree: the cluster's own limits of layer-wise trees, for requests that give none.
    """

    topology: Topology
    prompter: Prompter
    dialects: Dialects | None
    drafter: TimedDrafter | None
    trained_masks: int
    device: torch.device
    tree: LayerTreeOptions | None
    _experience: Experience = field(init=False)

    def __post_init__(self) -> None:
        self._experience = Experience(self.topology.num_groups)

    def admit(self, message: Message) -> Answer:
        """The answer to the request in ``message``, not begun yet.

        Raises:
            UserError: the request is invalid, too long, or asks for something that this pipeline does not have.
        """
        prompt = PromptRequest.from_json(message.text)
        method = prompt.method or DEFAULT_METHOD
        dialect = None if prompt.threads is None else Dialect.from_json(prompt.threads).name
        token_ids = self.prompter.token_ids(prompt.prompt, prompt.raw, prompt.sampling.max_tokens, dialect)
        self.prompter.check_bias(prompt.sampling.logit_bias)
        options = make_options(method, prompt.options, self.tree)
        request = Request(message.number, token_ids, seeded(prompt.sampling), method, options, prompt.trace, prompt.threads)
        if request.threads is None:
            return self._answer(request)
        return self._threaded_answer(request, request.threads, prompt.show_threads)

    def _answer(self, request: Request) -> Answer:
        method = create_method(request, self.drafter, self._experience, self.device, self.trained_masks)
        return Answer(request, method, self.prompter, self.topology.num_stages)

    def _threaded_answer(self, request: Request, dialect: str, show_threads: bool) -> Answer:
        if self.dialects is None:
            raise UserError("this pipeline does not decode in threads")
        new_sequence = self.dialects.new_sequence(dialect, len(request.prompt_token_ids), request.sampling)
        sequence = new_sequence()
        drafter = None if self.drafter is None else self.drafter.for_threads(sequence)
        method = create_threaded(request, sequence, drafter, self._experience, self.device, self.trained_masks)
        return ThreadedAnswer(request, method, self.prompter, self.topology.num_stages, new_sequence(), show_threads)


def chunk_payloads(request: Request, masks: MaskParams) -> list[Payload]:
    """The prompt's chunks, each with what the stages must know of the request."""
    shared = {
        "prompt_length": len(request.prompt_token_ids),
        "sampling": asdict(request.sampling),
        "trace": request.trace,
        "named": masks.named,
        "threads": request.threads,
    }
    return [{**shared, "token_ids": chunk} for chunk in prefill_chunks(request.prompt_token_ids, masks.count)]
