"""``python -m benchmarks.alternatives``: the same checkpoint and prompts through ``transformers``, llama.cpp and pipedec.

Everything runs in this process, one answer at a time; the contenders take turns, and nothing is emulated.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import click
import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers.utils import logging

from benchmarks.llama_cpp import NAME, LlamaCpp, is_installed
from benchmarks.output import Device, Out, append, console, machine_text, pipeline_row, titled_table
from benchmarks.self_speculation import SEARCH_PROMPTS, SEARCH_TOKENS, search_skipped, without_layers
from pipedec.bench.options import Draft, Positive, Target
from pipedec.bench.record import Row, check_writable, header
from pipedec.config import AUTO, Settings
from pipedec.core.errors import UserError
from pipedec.core.request import DEFAULT_METHOD, TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.values import check_fields
from pipedec.data import read_prompts
from pipedec.engine.build import DTYPES, load_drafter, new_scheduler, resolve
from pipedec.engine.devices import chosen_device
from pipedec.engine.local import LocalPipeline
from pipedec.families import model_config
from pipedec.flags import Help, options_of, own_options, run_command
from pipedec.gguf import is_gguf
from pipedec.methods import METHODS
from pipedec.model import BitaWeights, DraftVocabulary, LaneRows, StageModel
from pipedec.plan.budgets import kv_slots
from pipedec.plan.spec import PipelineSpec, run_description
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.text.prompt import Prompter
from pipedec.threads.sequences import Sequences
from pipedec.verify.reference import load_transformers

LOOKUP_TOKENS = 10
LAYERS_SKIPPED = "layers skipped"
_LLAMA_CPP_TOKENS = 4096


@dataclass
class PassCount:
    """The target's work: passes through all of its layers, and the rows in these passes."""

    passes: float = 0.0
    rows: float = 0.0

    def add(self, rows: int, share: float = 1.0) -> None:
        """Count a forward of ``rows`` rows through ``share`` of the target's layers."""
        self.passes += share
        self.rows += rows * share


class Contender(Protocol):
    """One way to generate an answer; ``count`` accumulates over answers."""

    name: str
    count: PassCount

    def answer(self, prompt_token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """The greedy answer's token ids, up to an end token or ``max_tokens``."""


class TransformersContender:
    """``generate`` of a loaded target, with a KV cache even if its generation config has it off.

    ``part``: a model of some of the target's layers, whose forwards count as their share.
    """

    def __init__(self, name: str, target: Any, part: Any = None, **options: Any) -> None:
        self.name, self.count = name, PassCount()
        self._target, self._options = target, options
        self._counted = [target] if part is None else [target, part]

    @torch.inference_mode()
    def answer(self, prompt_token_ids: Sequence[int], max_tokens: int) -> list[int]:
        prompt = torch.tensor([list(prompt_token_ids)], device=self._target.device)

        def count_pass(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
            self.count.add(keywords["input_ids"].shape[1], _num_layers(module) / _num_layers(self._target))

        counting = [model.register_forward_hook(count_pass, with_kwargs=True) for model in self._counted]
        try:
            output = self._target.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_tokens, do_sample=False, use_cache=True,
                pad_token_id=0, **self._options,
            )  # fmt: skip
        finally:
            for hook in counting:
                hook.remove()
        return [int(token) for token in output[0, prompt.shape[1] :]]


def _num_layers(model: Any) -> int:
    return len(model.get_decoder().layers)


class PipelineContender:
    """One method of pipedec, all stages and the draft in this process."""

    def __init__(self, name: str, pipeline: LocalPipeline, method: str, count: PassCount) -> None:
        self.name, self.count = name, count
        self._pipeline, self._method = pipeline, method

    def answer(self, prompt_token_ids: Sequence[int], max_tokens: int) -> list[int]:
        request = TokenizedRequest(0, tuple(prompt_token_ids), SamplingParams(max_tokens=max_tokens), method=self._method)
        return [token for verdict in self._pipeline.run(request) for token in verdict.tokens]


class LlamaCppContender:
    """llama.cpp, whose passes are those of greedy decoding."""

    name = f"{NAME} greedy"

    def __init__(self, model: Path) -> None:
        self.count = PassCount()
        self._loaded = LlamaCpp(model, _LLAMA_CPP_TOKENS)

    def answer(self, prompt_token_ids: Sequence[int], max_tokens: int) -> list[int]:
        token_ids = self._loaded.answer(prompt_token_ids, max_tokens)
        self.count.passes += len(token_ids)
        self.count.rows += len(prompt_token_ids) + len(token_ids) - 1
        return token_ids


class CountedStage(StageModel):
    """A stage that counts every forward as its share of the target's layers. ``count`` must be set after loading."""

    count: PassCount

    def forward(self, inputs: Tensor, lanes: Sequence[LaneRows]) -> Tensor:
        self.count.add(len(inputs), len(self.layers) / self.config.num_hidden_layers)
        return super().forward(inputs, lanes)


def load_contenders(spec: PipelineSpec, self_speculation: bool = False) -> list[Contender]:
    """Greedy ``transformers`` first; contenders that need a draft model or BiTA only if ``spec`` has one; llama.cpp where the
    target is a GGUF file and the package ``xllamacpp`` is installed.

    The default method runs in one stage and in the stages of ``spec``; other methods gain nothing from stages in one process.
    Raises UserError if ``transformers`` does not accept the draft model.

    Args:
        self_speculation: also the target with some of its layers as a draft, after a search for them.
    """
    device = chosen_device(spec.settings.cut.device)
    target = load_transformers(spec.target, DTYPES[spec.dtype], device, attn_implementation="sdpa")
    contenders: list[Contender] = [TransformersContender("transformers greedy", target)]
    if spec.draft is not None and DraftVocabulary.load(spec.draft) is None:  # transformers knows no draft with few tokens
        draft = load_transformers(spec.draft, DTYPES[spec.dtype], device, attn_implementation="sdpa")
        if draft.config.vocab_size != target.config.vocab_size:
            raise UserError(
                f"transformers' assisted generation needs models of equal vocab_size, not {target.config.vocab_size} "
                f"and {draft.config.vocab_size}: use another draft, or --draft none"
            )
        contenders.append(TransformersContender("transformers assisted", target, assistant_model=draft))
    contenders.append(TransformersContender("transformers lookup", target, prompt_lookup_num_tokens=LOOKUP_TOKENS))
    if self_speculation:
        contenders.append(_self_speculation(target, spec, device))
    if is_gguf(spec.target) and is_installed():
        contenders.append(LlamaCppContender(spec.target))
    spec = spec.replaced(prefix_cache=False)  # every answer computes its prompt
    whole = replace(spec.replaced(stages=1, groups=None, layers=AUTO), layers=((spec.layers[0][0], spec.layers[-1][1]),))
    pipeline, count = _load_counted(whole, device)
    has_draft, has_bita = spec.draft is not None, spec.bita is not None
    for method in ("pp", "stpp", DEFAULT_METHOD, "bita"):
        if METHODS[method].missing(has_draft, has_bita) is None:
            contenders.append(PipelineContender(f"pipedec {method}, 1 stage", pipeline, method, count))
    if has_draft:
        pipeline, count = _load_counted(spec, device)
        contenders.append(PipelineContender(f"pipedec, {spec.settings.cut.stages} stages", pipeline, DEFAULT_METHOD, count))
    return contenders


def _self_speculation(target: Any, spec: PipelineSpec, device: torch.device) -> Contender:
    """The target with a part of its layers as its draft, those by which it answers the prompts of the search best."""
    prompter, greedy = Prompter(spec.target, model_config(spec.target).max_position_embeddings), TransformersContender("", target)
    prompts = [prompter.token_ids(prompt, False, SEARCH_TOKENS) for prompt in SEARCH_PROMPTS]
    answers = [torch.tensor([[*ids, *greedy.answer(ids, SEARCH_TOKENS)]], device=device) for ids in prompts]
    skipped = search_skipped(target, answers)
    draft = without_layers(target, skipped)
    return TransformersContender(f"transformers, {len(skipped)} {LAYERS_SKIPPED}", target, draft, assistant_model=draft)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hides the warnings and progress bars of transformers inside the block."""
    verbosity, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            logging.enable_progress_bar()


def _load_counted(spec: PipelineSpec, device: torch.device) -> tuple[LocalPipeline, PassCount]:
    """Like ``LocalPipeline.load``, with stages that count their forwards."""
    config, count, sequences = model_config(spec.target), PassCount(), Sequences(spec.target)
    stages: list[StageWorker] = []
    for first, last in spec.layers:
        model = CountedStage.load(spec.target, range(first, last), DTYPES[spec.dtype], device, config=config)
        assert isinstance(model, CountedStage)
        model.count = count
        if spec.bita is not None:
            model.attach(BitaWeights.load(spec.bita, config, range(first, last), DTYPES[spec.dtype], device))
        kind = FinalStageWorker if model.is_last else StageWorker
        stages.append(kind(model, sequences.of, device, slots=kv_slots(spec), block=spec.kv_block))
    return LocalPipeline(spec, stages, new_scheduler(spec, load_drafter(spec, device), device)), count


Turns = list[list["TimedAnswer"]]  # of one contender: for each prompt, the answer of every repeat


@dataclass(frozen=True)
class AlternativesConfig:
    """The limits of a run. Raises UserError for a number below 1."""

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

    ``on_answer`` is called after each answer with (answers done, answers in all). Raises UserError if a prompt does not fit the
    target's context, or a contender cannot be loaded.
    """
    prompter = Prompter(spec.target, model_config(spec.target).max_position_embeddings)
    prompt_ids = [prompter.token_ids(prompt, False, config.max_tokens) for prompt in prompts]
    device = chosen_device(spec.settings.cut.device).type
    with _threads(config.threads) as num_threads, quiet_transformers():
        settings = {"prompts": len(prompts), "pipeline": pipeline_row(run_description(spec)), "device": device}
        settings = asdict(config) | {"threads": num_threads} | settings
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
            count, before = contenders[chosen].count, replace(contenders[chosen].count)
            started = time.perf_counter()
            token_ids = contenders[chosen].answer(prompt_ids[index], config.max_tokens)
            seconds = time.perf_counter() - started
            answer = TimedAnswer(tuple(token_ids), seconds, count.passes - before.passes, count.rows - before.rows)
            turns[chosen][index].append(answer)
            on_answer(number * len(contenders) + turn + 1, len(rounds) * len(contenders))
    return turns


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


@dataclass(frozen=True)
class PairFlags:
    """The models, and the stages of the method that is measured on several (see ``PipelineSpec.create``)."""

    target: Target = None
    draft: Draft = None
    bita: Annotated[
        str | None, Help("Directory of BiTA trained for the target, or none (default: the shipped one).", "DIR|none")
    ] = None
    stages: Annotated[int, Help("Stages of pipedec's default method, in one process.")] = 4
    device: Device = "auto"
    self_speculation: Annotated[bool, Help("Also the target without some of its layers as its own draft (searched first).")] = (
        False
    )


@dataclass(frozen=True)
class PromptFlags:
    """Where the prompts come from."""

    texts: Annotated[tuple[str, ...], Help("A prompt; may be repeated.", "TEXT", "--prompt", repeated=True)] = ()
    files: Annotated[
        tuple[Path, ...],
        Help("JSONL, JSONL.gz or CSV prompt file; may be repeated.", "FILE", "--prompts", repeated=True),
    ] = ()
    field: Annotated[str | None, Help("Field of the prompt files that holds the prompt.", "NAME")] = None
    samples: Annotated[Positive, Help("Prompts sampled from each file (seed 0).")] = 10

    def read(self) -> list[str]:
        """All prompts. Raises UserError if there are none, or a file cannot be read."""
        drawn = (text for path in self.files for text in read_prompts(path, self.field).sample(self.samples).prompts)
        prompts = [*self.texts, *drawn]
        if not prompts:
            raise UserError("no prompts: give --prompt TEXT or --prompts FILE")
        return prompts


@click.command()
@options_of(PairFlags, "pair")
@options_of(PromptFlags, "prompts")
@options_of(AlternativesConfig, "config")
@own_options
def alternatives(pair: PairFlags, prompts: PromptFlags, config: AlternativesConfig, out: Out = None) -> None:
    """Compare pipedec with transformers (greedy, assisted, prompt lookup) in one process.

    Same checkpoint, same prompts, float32, greedy; nothing is emulated. Answers end at an end token or at --max-tokens.
    """
    texts = prompts.read()
    check_writable(out)
    spec = resolve(
        Settings.of(target=pair.target, draft=pair.draft, bita=pair.bita, stages=pair.stages, dtype="float32", device=pair.device)
    )
    with console.status("loading") as status:
        load = partial(load_contenders, self_speculation=pair.self_speculation)
        rows = measure_alternatives(spec, texts, config, lambda done, total: status.update(f"answer {done} of {total}"), load)
    Console().print(_table(rows))
    append(out, rows)


def _table(rows: list[dict[str, Any]]) -> Table:
    config, greedy = rows[0]["config"], rows[0]
    caption = (
        f"Wall time of whole answers, prefill included. Prompts: {config['prompts']}; tokens: {greedy['tokens']}; runs of each: "
        f"{config['repeats']}, of which the median is reported; contenders take turns. {machine_text(greedy)}, "
        f"{config['pipeline']['dtype']}. transformers {greedy['transformers']} with its KV cache; assisted: the same draft with "
        "the default heuristics; lookup: prompt_lookup_num_tokens=10. Ratio and same tokens: compared with transformers greedy. "
        "Passes and rows are the target's, prompt rows excluded.\n"
        "pipedec's stages run one after another in this process. On one machine a pipeline cannot be faster than one process, "
        "since its stages share the cores; stages are for targets that one device cannot hold or cannot read fast enough."
    )
    columns = ("", "tokens/s", "ratio", "ms per token", "passes per token", "rows per token", "same tokens")
    table = titled_table("The same prompts by transformers and pipedec, in one process", columns, caption)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(
            row["contender"], f"{row['tokens_per_second']:.1f}", f"{row['tokens_per_second'] / greedy['tokens_per_second']:.2f}×",
            f"{row['ms_per_token']:.2f}", f"{row['passes_per_token']:.2f}", f"{row['rows_per_token']:.1f}",
            f"{row['equal']}/{config['prompts']}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    run_command(alternatives)
