"""A running request on rank 0: which tokens of its prompt have entered, how many slots of KV memory its rows take, and the
methods of its answer's threads (APAR §2, PASTA §3).

A request has a *lane* on the stages from its first rows on. Before that, and while it is paused, it waits for memory. After a
pause, an answer in one thread continues after its last token; an answer in several threads starts over. Owns the order in which
rows of threads enter: first the last tokens of ended threads, then the rows that methods propose. Knows no other request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice, repeat
from operator import itemgetter

import torch

from pipedec.core.request import TokenizedRequest
from pipedec.core.stage_message import MaskParams, NewRequest, Step
from pipedec.core.verdict import Verdict
from pipedec.decoding.budget import Claim, Demand
from pipedec.decoding.method import Method, MethodContext, new_method
from pipedec.kv import Lease
from pipedec.threads import NewSequence, State
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Remaining, ThreadChanges, apply_verdict, is_mask, position_root

ROWS_OF_SEVERAL_THREADS = 128  # of a step that enters whole and that threads share; more if the options allow one thread more
POSITIONS = 16  # depths below a root at which accepted tokens are counted separately

NewContext = Callable[[TokenizedRequest, ThreadSequence], MethodContext]


@dataclass
class Tally:
    """Counters of all requests of a run. They never decrease."""

    prompt_rows: int = 0  # tokens of prompts that have entered, and of answers that continue after a pause
    root_rows: int = 0  # certain tokens that have entered
    draft_rows: int = 0  # guesses that have entered
    mask_rows: int = 0  # masks that have entered
    drafts: int = 0  # roots that entered when nothing of their thread was in flight
    accepted_tokens: int = 0  # guesses that were accepted
    accepted_per_pos: list[int] = field(default_factory=lambda: [0] * POSITIONS)  # the same by depth below the root, from 1 on
    pauses: int = 0  # how often a request was paused
    corrupted: int = 0  # requests that ended because a stage computed NaN or infinity

    def accept(self, depth: int, tokens: int) -> None:
        """Count ``tokens`` accepted guesses after one that was ``depth`` below its root."""
        self.accepted_tokens += tokens
        for position in range(depth, min(depth + tokens, POSITIONS)):
            self.accepted_per_pos[position] += 1


class RequestState:
    """One request: its lane, its answer's sequence (with ``request.output_token_ids``), and the methods of its threads."""

    def __init__(self, request: TokenizedRequest, new_sequence: NewSequence, new_context: NewContext, tally: Tally) -> None:
        self.request = request
        self.number = request.number
        self.sequence = new_sequence()  # of its answer. Only this object passes accepted tokens to it.
        self.cached_tokens: int | None = None  # of the prompt, when the first lane opened
        self.has_lane = False  # whether the stages have a lane for it, or are about to open one
        self.is_closing = False  # whether stages may still have a lane that was paused
        self.hits = self.misses = 0  # see ``Metrics``; the first token of an answer or of a child is neither
        self._new_sequence = new_sequence
        self._new_context = new_context
        self._tally = tally
        self._begin()

    def _begin(self) -> None:
        """Set the text that enters first, and the method of the first thread, which takes its context as it is now."""
        accepted = [] if self.sequence.can_fork else self.sequence.main.token_ids
        self.text = [*self.request.prompt_token_ids, *accepted]  # tokens that enter before rows of trees
        scores_prompt = self.request.sampling.prompt_logprobs is not None
        self.adopts: Sequence[int] = () if scores_prompt else self.text  # tokens that may be adopted from other requests
        self.entered = 0  # how many tokens of the text have entered, or were cached
        self.drafted = 0  # how many of them are in the draft model's cache
        self.is_prefilling = True  # whether some of the text, or of the masks after it, has yet to enter
        self.is_idle = False  # whether no rows enter or are drafted before the next verdict
        self.past = 0  # maximum slots of tokens that verdicts have accepted. The row of the last one may be in a tree.
        self._adoptable = 0  # number of its first tokens that others may adopt
        self._context = self._new_context(self.request, self.sequence)
        self.lacks_drafter = self._context.request is not self.request  # another method runs until the draft model is loaded
        first = new_method(self._context)
        self._methods: dict[int, Method] = {0: first}  # by thread that has not ended
        self._running: dict[int, Method] = {0: first}  # by running thread
        self._last: dict[int, int] = {}  # by thread: last tokens of ended threads that have yet to enter
        self._depths: dict[int, int] = {}  # by thread: accepted tokens after the root that entered last
        self._order: list[int] = []  # thread of each row that may enter at the next timestep: certain rows first, then by chance
        self._next_thread = 0  # the first thread to be served, if the last step had no room for all
        self.masks: MaskParams = first.masks  # mask rows after the prompt and after rows of steps
        self.is_tuned = first.is_tuned  # whether the number of its rows is tuned
        self._fills = first.fills
        self.drafter = first.drafter  # the draft model; None if its method uses none
        self._largest = max(first.whole, ROWS_OF_SEVERAL_THREADS) if first.whole else 0  # rows of a step that enters whole
        self.together = max(1, self._largest if self.sequence.can_fork else first.whole)  # rows of the largest whole step, or 1
        self.most = len(self.request.prompt_token_ids) + self.request.sampling.max_tokens + self.together  # slots in one thread

    @property
    def fills(self) -> bool:
        """Whether rows enter while others are in flight."""
        return self._fills or self.is_prefilling

    # Memory, and the prompt

    def to_reserve(self, ahead: int) -> int:
        """Slots for a lane: the text, at most ``ahead`` tokens after it, and the rows that must enter together."""
        left = self.request.sampling.max_tokens - (len(self.text) - self.sequence.prompt_length)
        return len(self.text) + min(left, ahead) + max(self.together, self.masks.count)

    @property
    def in_flight(self) -> int:
        """Rows that have entered and that no verdict has accepted or pruned, except the last tokens of ended threads."""
        return sum([method.in_flight for method in self._methods.values()])

    def certain_rows(self, demand: Demand) -> int:
        """Maximum number of rows that are certain or must enter together, however threads share the rows of a step."""
        if demand.whole and self.sequence.can_fork:
            return self.together
        return demand.whole or demand.certain

    def open(self, lease: Lease) -> NewRequest:
        """Open the lane that it has now, on the stages and in the draft model. Returns the message for the stages."""
        self._begin()
        self.entered = self.past = self._adoptable = lease.cached
        self.drafted = len(self.text)
        if self.drafter is not None:
            self.drafted = self.drafter.open(self.number, self.sequence, self.text, self.request.sampling)
        if self.cached_tokens is None:
            self.cached_tokens = min(lease.cached, self.sequence.prompt_length)
        request, accepted = self.request, self.text[self.sequence.prompt_length :]
        return NewRequest(
            self.sequence.prompt_length, request.sampling, self.masks.named, request.threads, request.trace, tuple(accepted),
            lease.slots, lease.cached, lease.copied,
        )  # fmt: skip

    def pause(self, is_closing: bool = True) -> None:
        """Give up the lane, which stages have yet to close if ``is_closing``. Without a lane, only change the method."""
        self.has_lane, self.is_closing = False, is_closing
        if self.sequence.can_fork:
            self.sequence = self._new_sequence()
            self.hits, self.misses = 0, 0
        self._begin()

    def next_chunk(self, rows: int) -> Step | None:
        """Take up to ``rows`` rows of the text, and the masks after it; None if there is no room for the last token's masks."""
        masks = self.masks.count
        left = len(self.text) + masks - self.entered
        rows = left if left <= rows else min(rows, left - 1 - masks)
        if rows <= 0:
            return None
        chunk = self.text[self.entered : self.entered + rows]
        self.entered += len(chunk)
        self.is_prefilling = left > rows
        self._note_past()
        self._tally.prompt_rows += len(chunk)
        self._tally.mask_rows += rows - len(chunk)
        chunk += range(-1, -1 - (rows - len(chunk)), -1)
        token_ids = torch.tensor(chunk, dtype=torch.int64)
        return Step(token_ids, torch.full_like(token_ids, -1))

    def _note_past(self) -> None:
        """Count the slots of the past."""
        sequence = self.sequence
        if self.is_prefilling:
            self.past = self.entered
        elif not sequence.can_fork:
            self.past = max(self.entered, sequence.prompt_length + len(sequence.main.token_ids) - 1)
        else:
            pending = sum(thread.pending is not None for thread in sequence.threads)
            self.past = sequence.prompt_length + sum(sequence.needed()) + pending

    def take_adoptable(self) -> Sequence[int]:
        """The tokens that others may adopt from the next timestep on, and could not before. All of them are in the past."""
        prompt, answer = self.request.prompt_token_ids, self.sequence.main.token_ids
        certain = min(self.past, len(prompt)) if self.sequence.can_fork else self.past
        if certain == self._adoptable:
            return ()
        first, self._adoptable = self._adoptable, certain
        return [*prompt[first:certain], *answer[max(first - len(prompt), 0) : max(certain - len(prompt), 0)]]

    def texts(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        """The accepted tokens of each thread that has any, each after those before them: for the main thread the prompt."""
        main, *others = self.sequence.threads
        texts = [(self.request.prompt_token_ids, main.token_ids), *(((), thread.token_ids) for thread in others)]
        return [(before, answer) for before, answer in texts if answer]

    # Which rows of the answer enter

    def claim(self, cached: int = 0) -> Claim:
        """The rows that it wants to enter at the next timestep; without a lane, all of the text but ``cached`` tokens."""
        number, priority = self.number, self.request.priority
        if self.is_idle and self.has_lane:
            return Claim(number, priority)
        if not self.is_prefilling:
            return Claim(number, priority, self.demand())
        rows, tail = len(self.text) + self.masks.count - (self.entered or cached), 1 + self.masks.count
        if rows <= tail:  # the masks enter with the last token
            return Claim(number, priority, Demand(whole=rows))
        return Claim(number, priority, prompt=rows, tail=tail)

    def demand(self) -> Demand:
        """The rows of all threads that may enter at the next timestep."""
        if not self.sequence.can_fork:
            return self._running[0].demand() if self._running else Demand()
        demands = {number: method.demand() for number, method in self._running.items()}
        if self._largest:
            whole = min(sum(demand.whole for demand in demands.values()), self._largest)
            return Demand(whole=whole + len(self._last)) if whole else Demand(certain=len(self._last))
        self._order = [number for number, demand in demands.items() for _ in range(demand.certain)]
        most = next((demand.most for demand in demands.values()), None)
        certain = len(self._order) if most is None else min(len(self._order), most)
        return Demand(certain + len(self._last), chances=self._ordered(demands), most=most)

    def _ordered(self, demands: dict[int, Demand]) -> Iterator[float]:
        """The chances of candidates of all threads, best first. Records their threads in ``_order``."""
        for chance, number in _ranked({number: demand.chances for number, demand in demands.items()}):
            self._order.append(number)
            yield chance

    def propose(self, room: int) -> Step | None:
        """The rows that enter at the next timestep, or None. At most ``room``; a step that enters whole has the demanded rows."""
        room = self._largest or room
        if self.sequence.can_fork:
            step, roots, drafts = self._propose_threads(room)
        else:
            roots = drafts = int(self._running[0].root is not None)
            step = self._running[0].propose(room)
        if step is None:
            return None
        masks = int(is_mask(step.token_ids).sum()) if self.masks.count else 0
        self._tally.root_rows += roots
        self._tally.drafts += drafts
        self._tally.mask_rows += masks
        self._tally.draft_rows += step.num_rows - roots - masks
        return step

    def _propose_threads(self, room: int) -> tuple[Step | None, int, int]:
        """Rows of several threads, first the last tokens of ended ones, to which a join token in the same step attends. Returns
        the step; the number of its certain rows; and how many of those are of threads with nothing in flight.
        """
        last = list(self._last.items())[:room]
        for number, _ in last:
            del self._last[number]
        steps = [(number, Step(torch.tensor([token]), torch.tensor([-1]))) for number, token in last]
        drafts = 0
        if not self._last:
            without_rows = {number for number, method in self._running.items() if method.root is not None}
            room -= len(steps)
            if self._largest:
                steps += self._propose_whole(room)
            else:
                rooms = Counter(self._order[:room])
                best = ((number, self._running[number].propose(rooms[number])) for number in sorted(rooms))
                steps += [(number, step) for number, step in best if step is not None]
            drafts = sum(number in without_rows for number, _ in steps[len(last) :])
        return _merged(steps) if steps else None, len(last) + drafts, drafts

    def _propose_whole(self, room: int) -> list[tuple[int, Step]]:
        """Steps of threads, which share the rows evenly."""
        running = self._running
        share = max(room // max(len(running), 1), 1)
        steps: list[tuple[int, Step]] = []
        for number in sorted(running, key=lambda number: (number < self._next_thread, number)):
            if room < share:
                self._next_thread = number
                break
            if not self._sees_opener(number, {proposed for proposed, _ in steps}):
                continue
            step = running[number].propose(share)
            if step is not None:
                steps.append((number, step))
                room -= step.num_rows
        return steps

    def _sees_opener(self, number: int, entering: set[int]) -> bool:
        """Whether the opener of a thread has entered, or enters now. It is missing at most if it is its thread's last token."""
        threads = self.sequence.threads
        parent, opened_at = threads[number].parent, threads[number].opened_at
        if parent is None or parent not in self._running or parent in entering or threads[parent].num_tokens > opened_at:
            return True
        return self._running[parent].root is None

    # Drafts and verdicts

    def draft(self, room: int) -> list[tuple[Method, Sequence[int]]]:
        """The rows that the draft model computes in the next forward. Several threads share twice the ``room`` of one."""
        running = self._running
        if len(running) > 1 and not self._largest:
            ranked = _ranked({number: method.undrafted_chances() for number, method in running.items()})
            rooms = Counter(number for _, number in islice(ranked, 2 * room))
            asked = [(running[number], running[number].draft(rooms[number])) for number in running if number in rooms]
        else:
            asked = [(method, method.draft(room)) for method in running.values()]
        asked = [(method, rows) for method, rows in asked if rows]
        if not asked:
            self.is_idle = not self._last and all(method.is_idle for method in running.values())
        return asked

    def apply(self, verdict: Verdict) -> None:
        """Advance to the accepted tokens and prune what can no longer be accepted."""
        changes = apply_verdict(self.sequence, verdict)
        for accepted in verdict.accepted:
            if accepted.thread in changes.accepted:
                self._methods[accepted.thread].accept(accepted)
        if changes.affects_threads:
            self._follow(changes)
        for number, method in self._methods.items():
            if method.tree is not None:
                position_root(method.tree, self.sequence, number)
        for number, tokens in changes.accepted.items():
            goes_on = self.sequence.threads[number].state is State.RUNNING
            is_hit = goes_on and self._methods[number].root is None
            hits, depth = len(tokens) - 1 + is_hit, self._depths.get(number, 0)
            self.hits += hits
            self.misses += goes_on and not is_hit
            self._tally.accept(depth, hits)
            self._depths[number] = depth + hits if is_hit else 0
        self._note_past()
        self.is_idle = False

    def _follow(self, changes: ThreadChanges) -> None:
        """Open, cut and close the methods of threads."""
        self._last |= {number: token for number, token in changes.last.items() if self._methods[number].root is not None}
        if self.sequence.finished is not None:
            self._last.clear()
        for number, remaining in changes.remaining.items():
            if remaining is not Remaining.SUBTREE and number in self._methods:
                self._methods[number].cut()
        for start in changes.starts:
            if start.thread not in self._methods:
                self._methods[start.thread] = new_method(self._context, start.thread)
            self._methods[start.thread].plant(start.token)
        threads = self.sequence.threads
        self._methods = {number: one for number, one in self._methods.items() if threads[number].state is not State.ENDED}
        self._running = {number: one for number, one in self._methods.items() if threads[number].state is State.RUNNING}
        if self.drafter is not None:
            self.drafter.threads_changed(self.number)


def _ranked(chances: dict[int, Iterable[float]]) -> Iterator[tuple[float, int]]:
    """Chances of several threads, best first, each with its thread; equal ones in the order of threads."""
    return merge(*(zip(of_thread, repeat(number)) for number, of_thread in chances.items()), key=itemgetter(0), reverse=True)


def _merged(steps: list[tuple[int, Step]]) -> Step:
    """One step of the rows of several threads; masks are its last rows."""
    token_ids = torch.cat([step.token_ids for _, step in steps])
    parents = torch.cat([step.parents for _, step in steps])
    threads = torch.cat([torch.full_like(step.parents, number) for number, step in steps])
    order = is_mask(token_ids).int().sort(stable=True).indices
    return Step(token_ids[order], parents[order], threads=threads[order])
