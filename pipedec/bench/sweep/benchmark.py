"""``pipedec bench sweep``: pipelines × methods × prompts, one JSONL row per answer; an interrupted sweep can be resumed.

Every answer is compared with that of ``pp``. Runners know how an answer is measured. An interruption loses what
``pipedec-bestfirst`` and ``bita`` learn from answer to answer, so their first rows after one may take a little longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from msgspec.structs import asdict, replace

from pipedec.bench.options import DrawnPrompt, draw
from pipedec.bench.policy import Policy
from pipedec.bench.record import Grid, Row, SweepProgress, key_of, plain
from pipedec.bench.sweep.config import SweepConfig
from pipedec.bench.sweep.pipelines import Measurable, RunningShape
from pipedec.bench.sweep.rows import SCHEMA
from pipedec.bench.sweep.runners import MakeRunner, MeasuredAnswer, Runner, connected, runner_of
from pipedec.cluster.launched import LaunchedCluster
from pipedec.cluster.supervisor import Supervisor
from pipedec.config import ClusterConfig
from pipedec.core.errors import PipedecError
from pipedec.core.sampling import SamplingParams
from pipedec.data import PromptSet
from pipedec.decoding.bita import mask_params
from pipedec.messages.request import PromptRequest
from pipedec.methods import BitaOptions
from pipedec.verify.divergence import TIE_BOUNDS, Divergence, is_explained, measured_divergence

Launch = Callable[[ClusterConfig, str], Supervisor]


def sweep(
    config: SweepConfig, prompt_sets: list[PromptSet], out: Path, progress: SweepProgress, make_runner: MakeRunner = runner_of,
    launch: Launch = LaunchedCluster,
) -> list[Row]:  # fmt: skip
    """Measure the rows that ``out`` lacks; returns all rows of this sweep, earlier ones included.

    ``make_runner`` creates what measures the answers of a pipeline, ``launch`` the cluster of a partition. Raises UserError if no
    prompt fits, a method needs what a pipeline lacks, or ``out`` holds rows of another schema; PipedecError if a rank was lost,
    or a method's answer differs from that of ``pp`` and is no near tie.
    """
    return _Sweep(config, out, progress).run(prompt_sets, make_runner, launch)


class _Sweep:
    """One sweep into one directory."""

    def __init__(self, config: SweepConfig, out: Path, progress: SweepProgress) -> None:
        self._config = config
        self._progress = progress
        self._grid = Grid(SCHEMA, out, progress)
        self._references: dict[tuple[str, PromptRequest], tuple[int, ...]] = {}  # the answers of pp

    def run(self, prompt_sets: list[PromptSet], make_runner: MakeRunner, launch: Launch) -> list[Row]:
        config = self._config
        per_method = sum(min(config.samples, len(one.prompts)) for one in prompt_sets) * config.repeats
        template = PromptRequest("", config.raw_prompts, sampling=config.sampling_of(0))
        places = config.places()
        self._progress.start(per_method * sum(len(config.policies(place)) for place in places))
        for place in places:
            self._progress.busy(place if isinstance(place, str) else place.label)
            with self._opened(place, launch) as shape, make_runner(shape, config.clock) as runner:
                prompts = draw(runner.prompter, prompt_sets, template, config.samples, config.seed)
                for repeat, prompt, policy in product(range(config.repeats), prompts, config.policies(place)):
                    self._measure(shape, policy, prompt, repeat, runner)
        return self._grid.rows

    @contextmanager
    def _opened(self, place: Measurable | str, launch: Launch) -> Iterator[Measurable]:
        """A partition is launched on its hosts."""
        if not isinstance(place, str):
            yield place
            return
        with launch(self._config.cluster, place) as cluster:
            yield RunningShape(connected(cluster), place)

    def _measure(self, shape: Measurable, policy: Policy, prompt: DrawnPrompt, repeat: int, runner: Runner) -> None:
        request = replace(prompt.request, sampling=self._config.sampling_of(repeat))
        identity = self._identity(shape, policy, prompt, request.sampling, repeat)

        def answered() -> Row:
            # The first prompt of each set is traced, for the breakdown of a timestep's time.
            indices = {row["prompt_index"] for row in self._grid.rows if row["prompt_set"] == prompt.prompt_set}
            is_traced = self._config.clock == "measured" and indices <= {prompt.index}
            answer = runner.answer(replace(request, method=policy.method, options=asdict(policy.options), trace=is_traced))
            metrics, decoded = answer.metrics, len(answer.token_ids) - 1
            ms_per_token = round(answer.decode_ms / decoded, 3) if decoded else None
            return {
                "bita": identity.get("bita"),
                "answer": key_of(list(answer.token_ids)),
                "prompt_tokens": answer.prompt_tokens,
                "output_tokens": len(answer.token_ids),
                "finish_reason": answer.finish_reason,
                **{name: getattr(metrics, name) for name in ("timesteps", "hits", "misses")},
                "decode_ms": round(answer.decode_ms, 3),
                "prefill_ms": round(answer.prefill_ms, 3),
                "ms_per_token": ms_per_token,
                "computed_ms_per_token": ms_per_token if self._config.clock == "computed" else None,
                "overran": round(answer.overran, 4),
                "breakdown": answer.breakdown and {name: round(time_ms, 3) for name, time_ms in answer.breakdown.items()},
                "divergence": self._divergence(shape, request, policy.method, answer, runner),
            }

        self._grid.row(identity, [prompt.request.prompt], answered, lambda row: _check_difference(row, shape.dtype))

    def _divergence(
        self, shape: Measurable, request: PromptRequest, method: str, answer: MeasuredAnswer, runner: Runner
    ) -> Row | None:
        """A row's field ``divergence``: how the answer differs from the first that ``pp`` gave in the pipeline's scope."""
        question = shape.scope, request
        if question not in self._references:
            plain_answer = answer if method == "pp" else runner.answer(replace(request, method="pp"))
            self._references[question] = plain_answer.token_ids
        found = measured_divergence(runner.answer, request, self._references[question], answer.token_ids)
        if found is None:
            return None
        return {**plain(found), "near_tie": is_explained(found, shape.dtype, request.sampling)}

    def _identity(self, shape: Measurable, policy: Policy, prompt: DrawnPrompt, sampling: SamplingParams, repeat: int) -> Row:
        """The fields that distinguish this row from all others."""
        is_measured = shape.is_emulated and self._config.clock == "measured"
        limits, bita = policy.limits, None
        if isinstance(policy.options, BitaOptions) and (bita := shape.bita) is not None:
            masks = mask_params(policy.options, bita["masks"])
            limits |= {"depth": masks.count, "children": masks.named}
            limits["rows"] = limits["rows"] if policy.options.shape == "likeliest" else None
        return {
            "preset": shape.preset,
            "clock": self._config.clock,
            "emulated": shape.is_emulated,
            "slow_motion": self._config.slow_motion if is_measured else 1.0,
            "cluster": shape.cluster,
            "pair": shape.pair,
            "method": policy.method,
            "tree": limits or None,
            "prompt_set": prompt.prompt_set,
            "prompt_index": prompt.index,
            "repeat": repeat,
            "sampling": plain(sampling),
            **({"bita": bita} if bita else {}),
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
