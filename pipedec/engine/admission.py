"""What rank 0 does with a request before it runs: tokenize and check it, and create its decoding method.

Owns what answers share: the draft model, and what methods have learned from earlier answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pipedec.core import DEFAULT_METHOD, Request
from pipedec.decoding import Experience, Method, create_method
from pipedec.engine.answer import Answer
from pipedec.engine.sequences import Sequences
from pipedec.engine.timed_drafter import TimedDrafter
from pipedec.messages import PromptRequest
from pipedec.methods import LayerTreeOptions, make_options
from pipedec.sampling import seeded
from pipedec.scheduler.protocol import Message
from pipedec.text.prompt import Prompter
from pipedec.threads import Dialect
from pipedec.topology import Topology


@dataclass
class Admission:
    """Makes answers of requests.

    Attributes:
        sequences: makes the sequences of answers.
        drafter: None without a draft model.
        trained_masks: masks of the target's BiTA; 0 if it has none.
        device: of the draft model.
        tree: the cluster's own limits of layer-wise trees, for requests that give none.
    """

    topology: Topology
    prompter: Prompter
    sequences: Sequences
    drafter: TimedDrafter | None
    trained_masks: int
    device: torch.device
    tree: LayerTreeOptions | None
    _experience: Experience = field(init=False)

    def __post_init__(self) -> None:
        self._experience = Experience(self.topology.num_groups)

    def admit(self, message: Message) -> tuple[Answer, Method]:
        """The answer to the request in ``message``, not begun yet, and the method that will decode it.

        Raises:
            UserError: the request is invalid, too long, or asks for something that this pipeline does not have.
        """
        prompt = PromptRequest.from_json(message.text)
        name = prompt.method or DEFAULT_METHOD
        dialect = None if prompt.threads is None else Dialect.from_json(prompt.threads).name
        token_ids = self.prompter.token_ids(prompt.prompt, prompt.raw, prompt.sampling.max_tokens, dialect)
        self.prompter.check_bias(prompt.sampling.logit_bias)
        options = make_options(name, prompt.options, self.tree)
        request = Request(message.number, token_ids, seeded(prompt.sampling), name, options, prompt.trace, prompt.threads)
        new_sequence = self.sequences.maker(len(token_ids), request.sampling, request.threads)
        method = create_method(request, new_sequence(), self.drafter, self._experience, self.device, self.trained_masks)
        return Answer(request, new_sequence(), self.prompter, self.topology.num_stages, prompt.show_threads), method
