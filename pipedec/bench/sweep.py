"""Methods × pipelines × trees × prompts, one JSONL row per answer, in an order that an interruption cannot spoil.

Owns the grid and the result files (``rows.jsonl``, ``trees.json``); a row that is there is not measured again. How one answer is
got is the runners' business, what the rows show together is ``sweep_rows``' and the figures'. What ``pipedec-bestfirst`` and
``bita`` have learned goes from answer to answer and is lost with an interruption, so their later rows may take a little longer
after one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from pipedec.bench.prompts import DrawnPrompt, draw
from pipedec.bench.record import Row, drop_unfinished_line, header, key_of, plain
from pipedec.bench.sweep_rows import SCHEMA, read_records
from pipedec.bench.sweep_runners import Measured, OneProcess, RealProcesses
from pipedec.bench.sweep_shapes import (
    SLM,
    Pair,
    Shape,
    SmallModel,
    as_it_is,
    bita_row,
    emulated,
    pair_digest,
    small_model_alone,
    small_model_as_it_is,
)  # fmt: skip
from pipedec.bench.sweep_trees import BITA, Cell, TreeGrid
from pipedec.bench.tuning import TuningGrid, best_tree
from pipedec.config import ClusterConfig
from pipedec.core import DEFAULT_METHOD, MethodOptions, PipedecError, SamplingParams, UserError
from pipedec.data.prompts import PromptSet
from pipedec.messages import PromptRequest
from pipedec.methods import METHOD_NAMES, StaticTreeOptions

TUNED = "stpp-tuned"
SWEEP_METHODS = (*METHOD_NAMES, TUNED, SLM)
CLOCKS = ("measured", "computed")
_WITHOUT_TREE = ("pp", SLM)


@dataclass(frozen=True)
class SweepConfig:
    """What is swept.

    Attributes:
        presets: partitions of ``cluster``; empty for this machine as it is, without emulation.
        stages: stage counts; empty for those of the presets.
        methods: of SWEEP_METHODS. ``stpp`` uses its best depth, ``stpp-tuned`` the best tree of a grid.
        trees: limits of the trees.
        bita: directories that ``bita`` takes in turns, each on a pipeline of its own; empty for the target's own.
        samples: prompts of each set, drawn by ``seed`` from those that fit into the context.
        sampling: how to decode; with a temperature, tokens are drawn by ``seed`` + the number of the repeat.
        clock: ``measured`` in real processes, or ``computed`` in one process.
        slow_motion: see ``Emulation``.

    Raises:
        UserError: an unknown method or clock, a number below 1, or a combination that cannot work.
    """

    cluster: ClusterConfig
    presets: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()
    methods: tuple[str, ...] = ("pp", "stpp", TUNED, "pipedec", DEFAULT_METHOD)
    trees: TreeGrid = TreeGrid()
    bita: tuple[Path, ...] = ()
    samples: int = 10
    seed: int = 0
    repeats: int = 1
    sampling: SamplingParams = SamplingParams(max_tokens=64)
    clock: str = "measured"
    slow_motion: float = 4.0
    raw_prompts: bool = False
    pair: Pair = Pair()
    small: SmallModel = SmallModel()
    grid: TuningGrid = TuningGrid()

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in SWEEP_METHODS:
                raise UserError(f"unknown method {method!r}: choose from {', '.join(SWEEP_METHODS)}")
        if self.clock not in CLOCKS:
            raise UserError(f"unknown clock {self.clock!r}: choose one of {', '.join(CLOCKS)}")
        for preset in self.presets:
            self.cluster.find_partition(preset)
        if not self.presets and (not self.stages or self.clock == "computed" or TUNED in self.methods):
            raise UserError("without --preset nothing is emulated: give --stages, --clock measured and no stpp-tuned")
        if self.bita and BITA not in self.methods:
            raise UserError(f"--bita without the method that needs it: add {BITA} to --methods")
        numbers = {"--stages": self.stages, "--samples": (self.samples,), "--repeats": (self.repeats,)}
        for flag, values in numbers.items():
            if any(value < 1 for value in values):
                raise UserError(f"{flag} must be at least 1")

    def shapes(self) -> Iterator[Shape]:
        """The pipelines: the first of each length runs all methods, others ``bita`` with another BiTA; ``slm``'s comes last."""
        methods = tuple(method for method in self.methods if method != SLM)
        for preset in self.presets or (None,) if methods else ():
            for stages in self.stages or (None,):
                for number, bita in enumerate(self.bita or (None,)):
                    shape = self._shape(preset, stages, replace(self.pair, bita=bita))
                    yield replace(shape, methods=methods if number == 0 else (BITA,))
        if SLM in self.methods and self.presets:
            yield small_model_alone(self.cluster, self.small, self.pair, self.slow_motion)
        elif SLM in self.methods:
            yield small_model_as_it_is(self.pair)

    def _shape(self, preset: str | None, stages: int | None, pair: Pair) -> Shape:
        if preset is not None:
            return emulated(self.cluster, preset, stages, pair, self.slow_motion)
        assert stages is not None
        return as_it_is(stages, pair)

    def sampling_of(self, repeat: int) -> SamplingParams:
        """How a repeat decodes: with a seed of its own where tokens are drawn."""
        return replace(self.sampling, seed=self.seed + repeat) if self.sampling.is_stochastic else self.sampling

    def limits(self, method: str, shape: Shape) -> Sequence[MethodOptions | None]:
        """The limits of trees to try with a method on a pipeline; None where it has no tree.

        Raises:
            UserError: ``bita`` cannot have such a tree there.
        """
        if method in _WITHOUT_TREE:
            return (None,)
        if method == BITA:
            return self.trees.of_bita(shape.spec.trained_masks())
        return self.trees.drafted("stpp" if method == TUNED else method)


class SweepProgress(Protocol):
    """Told what the sweep is doing: the rows in all, each row there is, and what it is busy with."""

    def start(self, total: int) -> None: ...

    def busy(self, text: str) -> None: ...

    def row(self) -> None: ...


def sweep(config: SweepConfig, prompt_sets: list[PromptSet], out: Path, progress: SweepProgress) -> list[Row]:
    """Measure what ``out`` lacks; returns all rows of this sweep, those measured before included.

    Raises:
        UserError: no prompt fits, or ``out`` holds rows of another schema.
        PipedecError: two methods gave different answers to a prompt, or a rank was lost.
    """
    return Sweep(config, out, progress).run(prompt_sets)


class Sweep:
    """One sweep into one directory."""

    def __init__(self, config: SweepConfig, out: Path, progress: SweepProgress) -> None:
        self._config = config
        self._rows_path = out / "rows.jsonl"
        self._trees_path = out / "trees.json"
        self._progress = progress
        self._header = header("sweep", {})
        out.mkdir(parents=True, exist_ok=True)
        drop_unfinished_line(self._rows_path)
        records = read_records(self._rows_path) if self._rows_path.is_file() else ()
        self._known: dict[str, Row] = {record["key"]: record for _, record in records}
        self._found: list[Row] = []

    def run(self, prompt_sets: list[PromptSet]) -> list[Row]:
        shapes = list(self._config.shapes())
        num_cells = sum(len(self._config.limits(method, shape)) for shape in shapes for method in shape.methods)
        per_cell = sum(min(self._config.samples, len(one.prompts)) for one in prompt_sets) * self._config.repeats
        self._progress.start(num_cells * per_cell)
        for shape in shapes:
            self._progress.busy(shape.label)
            self._sweep_shape(shape, prompt_sets)
        _check_lossless(self._found)
        return self._found

    def _sweep_shape(self, shape: Shape, prompt_sets: list[PromptSet]) -> None:
        here = OneProcess(shape.spec)
        asked = PromptRequest("", self._config.raw_prompts, sampling=self._config.sampling_of(0))
        prompts = draw(here.prompter, prompt_sets, asked, self._config.samples, self._config.seed)
        cells = [
            self._cell(method, limits, shape, here, prompts)
            for method in shape.methods
            for limits in self._config.limits(method, shape)
        ]
        with _LazyRunner(shape, here, self._config.clock) as runner:
            for repeat in range(self._config.repeats):
                for prompt in prompts:
                    for cell in cells:
                        self._row(shape, cell, prompt, repeat, runner)

    def _cell(
        self, method: str, limits: MethodOptions | None, shape: Shape, here: OneProcess, prompts: list[DrawnPrompt]
    ) -> Cell:
        if limits is None:
            return Cell(method, "pp", None)
        if isinstance(limits, StaticTreeOptions) and shape.spec.emulation is not None:
            return Cell(method, "stpp", self._tuned(method, limits, shape, here, prompts))
        return Cell(method, method, limits)

    def _tuned(
        self, method: str, limits: StaticTreeOptions, shape: Shape, here: OneProcess, prompts: list[DrawnPrompt]
    ) -> StaticTreeOptions:
        """The best tree for this pipeline, from ``trees.json`` if it was found before: over all draws where tokens are drawn."""
        few = list({prompt.prompt_set: prompt for prompt in reversed(prompts)}.values())  # the first of each set
        texts = [prompt.request.prompt for prompt in few]
        draws = range(self._config.repeats) if self._config.sampling.is_stochastic else (0,)
        asked = [replace(prompt.request, sampling=self._config.sampling_of(repeat)) for prompt in few for repeat in draws]
        key = key_of([method, asdict(limits), shape.cluster, self._pair(shape), texts, *map(self._sampling, draws)])
        known = json.loads(self._trees_path.read_text()) if self._trees_path.is_file() else {}
        if key not in known:
            grid = self._config.grid
            trees = grid.best_first(limits) if method == TUNED else grid.layer_wise(limits)
            self._progress.busy(f"{shape.label}: best of {len(trees)} trees for {method}")
            best, tried = best_tree(here, trees, asked)
            known[key] = {
                "method": method,
                "preset": shape.preset,
                "stages": shape.spec.num_stages,
                "best": asdict(best),
                "tried": tried,
            }
            _write_json(self._trees_path, known)
            self._progress.busy(shape.label)
        return StaticTreeOptions(**{item.name: known[key]["best"][item.name] for item in fields(StaticTreeOptions)})

    def _row(self, shape: Shape, cell: Cell, prompt: DrawnPrompt, repeat: int, runner: _LazyRunner) -> None:
        identity = self._identity(shape, cell, prompt, repeat)
        key = key_of([identity, prompt.request.prompt])
        row = self._known.get(key)
        if row is None:
            trace = self._config.clock == "measured" and self._is_traced(prompt)
            asked = replace(prompt.request, sampling=self._config.sampling_of(repeat))
            answer = runner.answer(cell.request(asked, trace))
            row = {"schema": SCHEMA, "key": key, **self._provenance(), "bita": None, **identity, **_figures(answer)}
            with self._rows_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            self._known[key] = row
        self._found.append(row)
        self._progress.row()

    def _is_traced(self, prompt: DrawnPrompt) -> bool:
        """Of each set the first prompt says where the time of a timestep goes."""
        return all(row["prompt_set"] != prompt.prompt_set or row["prompt_index"] == prompt.index for row in self._found)

    def _provenance(self) -> Row:
        return {name: self._header[name] for name in ("date", "version", "revision", "machine")}

    def _pair(self, shape: Shape) -> Row:
        spec = shape.spec
        return {
            "target": str(spec.target), "draft": str(spec.draft) if spec.draft else None,
            "digest": pair_digest(spec),
        }  # fmt: skip

    def _sampling(self, repeat: int) -> Row:
        return plain(self._config.sampling_of(repeat))

    def _identity(self, shape: Shape, cell: Cell, prompt: DrawnPrompt, repeat: int) -> Row:
        """What tells this row from all others."""
        is_emulated = shape.spec.emulation is not None
        bita = {"bita": bita_row(shape.spec)} if cell.method == BITA else {}
        return {
            "preset": shape.preset,
            "clock": self._config.clock,
            "emulated": is_emulated,
            "slow_motion": self._config.slow_motion if is_emulated and self._config.clock == "measured" else 1.0,
            "cluster": shape.cluster,
            "pair": self._pair(shape),
            "method": cell.label,
            "tree": cell.limits,
            "prompt_set": prompt.prompt_set,
            "prompt_index": prompt.index,
            "repeat": repeat,
            "sampling": self._sampling(repeat),
            **bita,
        }


class _LazyRunner(AbstractContextManager["_LazyRunner"]):
    """Starts the processes of a pipeline when the first answer is needed: a finished sweep starts none."""

    def __init__(self, shape: Shape, here: OneProcess, clock: str) -> None:
        self._shape = shape
        self._here = here
        self._clock = clock
        self._processes: RealProcesses | None = None

    def answer(self, request: PromptRequest) -> Measured:
        if self._clock == "computed":
            return self._here.answer(request)
        if self._processes is None:
            self._processes = RealProcesses(self._shape.spec, self._here)
            self._processes.__enter__()
        return self._processes.answer(request)

    def __exit__(self, *error: Any) -> None:
        (self._processes or nullcontext()).__exit__(*error)


def _figures(answer: Measured) -> Row:
    decoded = len(answer.token_ids) - 1
    return {
        "answer": key_of(list(answer.token_ids)),
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": len(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "timesteps": answer.metrics.timesteps,
        "hits": answer.metrics.hits,
        "misses": answer.metrics.misses,
        "decode_ms": round(answer.decode_ms, 3),
        "prefill_ms": round(answer.prefill_ms, 3),
        "ms_per_token": round(answer.decode_ms / decoded, 3) if decoded else None,
        "computed_ms_per_token": round(answer.computed_ms / decoded, 3) if decoded and answer.computed_ms is not None else None,
        "overran": round(answer.overran, 4),
        "breakdown": answer.breakdown and {name: round(time_ms, 3) for name, time_ms in answer.breakdown.items()},
    }


def _check_lossless(rows: list[Row]) -> None:
    """Every method must have said the same, with the same seed if tokens were drawn. ``slm`` is another model."""
    said: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["method"] == SLM:
            continue
        asked = row["prompt_set"], row["prompt_index"], row["pair"]["digest"], row["sampling"]["seed"]
        first = said.setdefault(asked, row)
        if row["answer"] != first["answer"]:
            methods, place = f"{row['method']} and {first['method']}", f"prompt {row['prompt_index']} of {row['prompt_set']}"
            raise PipedecError(f"{methods} gave different answers to {place}: a defect (or a near tie, if not in float32)")


def _write_json(path: Path, document: Row) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
