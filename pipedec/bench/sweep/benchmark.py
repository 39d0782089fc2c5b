"""``pipedec bench sweep``: methods × pipelines × trees × prompts, one JSONL row per answer; an interrupted sweep can be resumed.

Owns ``trees.json``, ``prompts.json`` and the order of the grid. Every answer is compared with that of ``pp``. Runners know how
an answer is measured. An interruption loses what ``pipedec-bestfirst`` and ``bita`` learn from answer to answer, so their first
rows after one may take a little longer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from msgspec.structs import asdict, replace

from pipedec.bench.options import DrawnPrompt, draw
from pipedec.bench.record import Grid, Row, SweepProgress, key_of, plain, write_json
from pipedec.bench.sweep.config import SweepConfig
from pipedec.bench.sweep.pipelines import Measurable
from pipedec.bench.sweep.rows import BITA, SCHEMA
from pipedec.bench.sweep.runners import MakeRunner, MeasuredAnswer, OneProcess, RealProcesses, Runner, runner_of
from pipedec.core.errors import PipedecError
from pipedec.core.request import DEFAULT_METHOD, MethodOptions
from pipedec.core.sampling import SamplingParams
from pipedec.data import PromptSet
from pipedec.messages.request import PromptRequest
from pipedec.methods import BitaOptions, StaticTreeOptions
from pipedec.verify.divergence import TIE_BOUNDS, Divergence, is_explained, measured_divergence

# Rows also have these limits, which their methods ignore: they are part of a row's key.
_STATIC_LIMITS = ("width", "children", "depth", "rows")
_UNUSED_LIMITS: dict[str, Row] = {"pipedec": {"depth": 4, "rows": None}, DEFAULT_METHOD: {"depth": None, "rows": None}}


@dataclass(frozen=True)
class Cell:
    """One way to decode: the row's method (``label``), and the method and the tree of the requests."""

    label: str
    method: str
    tree: MethodOptions | None

    @property
    def limits(self) -> Row | None:
        """A row's field ``tree``: the limits that the method has."""
        if self.tree is None:
            return None
        limits = _limits(self.tree)
        if isinstance(self.tree, BitaOptions) and self.tree.shape != "likeliest":
            limits["rows"] = None  # a limit of the shape ``likeliest`` alone
        return _UNUSED_LIMITS.get(self.method, {}) | limits


def _limits(tree: MethodOptions) -> Row:
    """The options of a method; of ``stpp``, those of whole layers, the only shape in a sweep."""
    limits = plain(tree)
    return {name: limits[name] for name in _STATIC_LIMITS} if isinstance(tree, StaticTreeOptions) else limits


def sweep(
    config: SweepConfig, prompt_sets: list[PromptSet], out: Path, progress: SweepProgress, make_runner: MakeRunner = runner_of
) -> list[Row]:
    """Measure the rows that ``out`` lacks; returns all rows of this sweep, earlier ones included.

    ``make_runner`` creates what measures the answers of a pipeline. Raises UserError if no prompt fits, or ``out`` holds rows of
    another schema; PipedecError if a rank was lost, or a method's answer differs from that of ``pp`` and is no near tie.
    """
    return _Sweep(config, out, progress, make_runner).run(prompt_sets)


class _Sweep:
    """One sweep into one directory."""

    def __init__(self, config: SweepConfig, out: Path, progress: SweepProgress, make_runner: MakeRunner) -> None:
        self._config = config
        self._make_runner = make_runner
        self._trees_path = out / "trees.json"
        self._prompts_path = out / "prompts.json"
        self._progress = progress
        self._grid = Grid(SCHEMA, out, progress)
        self._references: dict[tuple[str, PromptRequest], tuple[int, ...]] = {}  # the answers of pp

    def run(self, prompt_sets: list[PromptSet]) -> list[Row]:
        shapes = list(self._config.shapes())
        num_cells = sum(len(self._config.limits(method, shape)) for shape in shapes for method in shape.methods)
        per_cell = sum(min(self._config.samples, len(one.prompts)) for one in prompt_sets) * self._config.repeats
        self._progress.start(num_cells * per_cell)
        template = PromptRequest("", self._config.raw_prompts, sampling=self._config.sampling_of(0))
        for shape in shapes:
            self._progress.busy(shape.label)
            with self._make_runner(shape, self._config.clock, self._prompts_path) as runner:
                prompts = draw(runner.prompter, prompt_sets, template, self._config.samples, self._config.seed)
                cells = []
                for method in shape.methods:
                    for limits in self._config.limits(method, shape):
                        if isinstance(limits, StaticTreeOptions) and shape.is_emulated:
                            assert isinstance(runner, OneProcess | RealProcesses)
                            tuned = self._tuned(method, limits, shape, runner.computed, prompts)
                            cells.append(Cell(method, "stpp", tuned))
                        else:
                            cells.append(Cell(method, "pp" if limits is None else method, limits))
                for repeat, prompt, cell in product(range(self._config.repeats), prompts, cells):
                    self._measure(shape, cell, prompt, repeat, runner)
        return self._grid.rows

    def _tuned(
        self, method: str, limits: StaticTreeOptions, shape: Measurable, pipeline: OneProcess, prompts: list[DrawnPrompt]
    ) -> StaticTreeOptions:
        """The tree that is fastest by the computed clock, over all repeats if tokens are sampled; ``trees.json`` keeps it."""
        first_of_sets = list({prompt.prompt_set: prompt for prompt in reversed(prompts)}.values())
        texts = [prompt.request.prompt for prompt in first_of_sets]
        repeats = range(self._config.repeats) if self._config.sampling.is_stochastic else (0,)
        samplings = [self._config.sampling_of(repeat) for repeat in repeats]
        requests = [replace(prompt.request, sampling=sampling) for prompt in first_of_sets for sampling in samplings]
        key = key_of([method, _limits(limits), shape.cluster, shape.pair, texts, *map(plain, samplings)])
        known = json.loads(self._trees_path.read_text()) if self._trees_path.is_file() else {}
        if key not in known:
            trees = self._config.grid.trees(method, limits)
            self._progress.busy(f"{shape.label}: best of {len(trees)} trees for {method}")
            tried: list[tuple[float, StaticTreeOptions]] = []
            for tree in trees:
                answers = [pipeline.answer(replace(request, method="stpp", options=asdict(tree))) for request in requests]
                tokens = sum(len(answer.token_ids) - 1 for answer in answers)
                tried.append((sum(answer.decode_ms for answer in answers) / max(1, tokens), tree))
            _, best = min(tried, key=lambda entry: entry[0])
            known[key] = {
                "method": method, "preset": shape.preset, "stages": shape.cluster["stages"], "best": _limits(best),
                "tried": [{"tree": _limits(tree), "ms_per_token": round(time_ms, 2)} for time_ms, tree in tried],
            }  # fmt: skip
            write_json(self._trees_path, known)
            self._progress.busy(shape.label)
        return StaticTreeOptions(**known[key]["best"])

    def _measure(self, shape: Measurable, cell: Cell, prompt: DrawnPrompt, repeat: int, runner: Runner) -> None:
        request = replace(prompt.request, sampling=self._config.sampling_of(repeat))
        identity = self._identity(shape, cell, prompt, request.sampling, repeat)

        def answered() -> Row:
            # The first prompt of each set is traced, for the breakdown of a timestep's time.
            indices = {row["prompt_index"] for row in self._grid.rows if row["prompt_set"] == prompt.prompt_set}
            is_traced = self._config.clock == "measured" and indices <= {prompt.index}
            options = asdict(cell.tree) if cell.tree else {}
            answer = runner.answer(replace(request, method=cell.method, options=options, trace=is_traced))
            metrics, decoded, computed_ms = answer.metrics, len(answer.token_ids) - 1, answer.computed_ms
            return {
                "bita": identity.get("bita"),
                "answer": key_of(list(answer.token_ids)),
                "prompt_tokens": answer.prompt_tokens,
                "output_tokens": len(answer.token_ids),
                "finish_reason": answer.finish_reason,
                **{name: getattr(metrics, name) for name in ("timesteps", "hits", "misses")},
                "decode_ms": round(answer.decode_ms, 3),
                "prefill_ms": round(answer.prefill_ms, 3),
                "ms_per_token": round(answer.decode_ms / decoded, 3) if decoded else None,
                "computed_ms_per_token": round(computed_ms / decoded, 3) if decoded and computed_ms is not None else None,
                "overran": round(answer.overran, 4),
                "breakdown": answer.breakdown and {name: round(time_ms, 3) for name, time_ms in answer.breakdown.items()},
                "divergence": self._divergence(shape, request, answer, runner),
            }

        self._grid.row(identity, [prompt.request.prompt], answered, lambda row: _check_difference(row, shape.dtype))

    def _divergence(self, shape: Measurable, request: PromptRequest, answer: MeasuredAnswer, runner: Runner) -> Row | None:
        """A row's field ``divergence``: how the answer differs from the first that ``pp`` gave in the pipeline's scope."""
        question = shape.scope, request
        if question not in self._references:
            self._references[question] = runner.reference(request).token_ids
        found = measured_divergence(runner.reference, request, self._references[question], answer.token_ids)
        if found is None:
            return None
        return {**plain(found), "near_tie": is_explained(found, shape.dtype, request.sampling)}

    def _identity(self, shape: Measurable, cell: Cell, prompt: DrawnPrompt, sampling: SamplingParams, repeat: int) -> Row:
        """The fields that distinguish this row from all others."""
        bita = {"bita": shape.bita} if cell.method == BITA else {}
        return {
            "preset": shape.preset,
            "clock": self._config.clock,
            "emulated": shape.is_emulated,
            "slow_motion": self._config.slow_motion if shape.is_emulated and self._config.clock == "measured" else 1.0,
            "cluster": shape.cluster,
            "pair": shape.pair,
            "method": cell.label,
            "tree": cell.limits,
            "prompt_set": prompt.prompt_set,
            "prompt_index": prompt.index,
            "repeat": repeat,
            "sampling": plain(sampling),
            **bita,
        }


def _check_difference(row: Row, dtype: str) -> None:
    """Raise PipedecError if the row's answer differs from ``pp``'s and rounding does not explain it."""
    found = row.get("divergence")
    if found is None or found["near_tie"]:
        return
    divergence = Divergence(found["position"], found["expected"], found["found"], found["margin"])
    prompt = f"prompt {row['prompt_index']} of {row['prompt_set']}"
    rule = f"a near tie in {dtype} is below {TIE_BOUNDS[dtype]:g}" if dtype in TIE_BOUNDS else f"{dtype} has no near ties"
    raise PipedecError(
        f"{row['method']} and pp gave different answers to {prompt}: {divergence}: a defect, as {rule}; to measure it again, "
        f"remove row {row['key']}"
    )
