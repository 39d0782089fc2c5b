"""The files of experience: who reads which, and that none of them ever fails a run or changes a text."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from support.clock import Clock
from support.tiny_pair import Pair

from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.decoding import Experience
from pipedec.decoding.learned import GREEDY, NOTHING_LEARNED, LearnedAcceptance, LearnedRates
from pipedec.engine import experience_files
from pipedec.engine.experience_files import (
    MAX_FILES,
    SHIPPED_FILE,
    KeptExperience,
    initial_experience,
    shipped_acceptance,
    write_learned,
)
from pipedec.engine.local import LocalPipeline
from pipedec.methods import BestFirstOptions
from pipedec.plan.emulation import Emulation
from pipedec.plan.spec import PipelineSpec

CPU = torch.device("cpu")
PROMPT = (5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7)


def learned(weight: float) -> LearnedAcceptance:
    features = {"draft": {"log probability": weight}, "ngrams": {"length 1": weight}, "others": {"none of the choices": weight}}
    return LearnedAcceptance(kinds={GREEDY: LearnedRates(acceptance=features, matches={"ngrams": {"4": 0.5 + weight / 100}})})


@pytest.fixture
def spec(pair: Pair, tmp_path: Path, own_cache: Path) -> PipelineSpec:
    """A pipeline that starts from priors, whose draft can get a file of its own."""
    shutil.copytree(pair.draft, tmp_path / "draft")
    return pair.spec(2, draft=str(tmp_path / "draft")).replaced(priors=True)


def kept_files(cache: Path) -> list[Path]:
    return sorted((cache / "learned").glob("*"))


def test_earlier_runs_come_before_training_and_that_before_nothing(spec: PipelineSpec, own_cache: Path) -> None:
    assert initial_experience(spec, CPU).acceptance == NOTHING_LEARNED
    assert spec.draft is not None
    write_learned(spec.draft / SHIPPED_FILE, learned(2.0))
    assert initial_experience(spec, CPU).acceptance == shipped_acceptance(spec.draft) == learned(2.0)
    kept = KeptExperience(spec, CPU)
    kept.experience = Experience(2, learned(3.0))
    kept.experience.controller.forwards = 7
    KeptExperience(spec.replaced(priors=False), CPU).keep(at_once=True)
    assert kept_files(own_cache) == []
    kept.keep(at_once=True)
    assert initial_experience(spec, CPU).acceptance == learned(3.0)
    assert initial_experience(spec, CPU).controller.forwards == 7
    assert initial_experience(spec.replaced(priors=False), CPU).acceptance == NOTHING_LEARNED
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in kept_files(own_cache))
    assert [path.name.partition("-")[0] for path in kept_files(own_cache)] == ["acceptance", "costs"]


def test_other_models_and_formats_have_other_files_and_another_plan_other_costs(spec: PipelineSpec, own_cache: Path) -> None:
    counts = []
    for other in (spec, spec.replaced(dtype="bfloat16"), spec.replaced(dispatch="tasks"), spec):
        KeptExperience(other, CPU).keep(at_once=True)
        names = [path.name.partition("-")[0] for path in kept_files(own_cache)]
        counts.append((names.count("acceptance"), names.count("costs")))
    assert counts == [(1, 1), (2, 2), (2, 3), (2, 3)]


def test_an_emulated_pipeline_begins_with_training_alone_and_keeps_nothing(spec: PipelineSpec, own_cache: Path) -> None:
    kept = KeptExperience(spec, CPU)
    kept.experience = Experience(2, learned(3.0))
    kept.keep(at_once=True)
    before = [path.read_bytes() for path in kept_files(own_cache)]
    assert spec.draft is not None
    write_learned(spec.draft / SHIPPED_FILE, learned(2.0))
    emulated = KeptExperience(replace(spec, emulation=Emulation("test", 1.0, None, ())), CPU)
    assert emulated.experience.acceptance == learned(2.0)
    emulated.experience.controller.forwards = 7
    emulated.keep(at_once=True)
    assert [path.read_bytes() for path in kept_files(own_cache)] == before


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe", b"[]", b"[" * 100_000, b'{"schema": "pipedec.acceptance/9"}',
        b'{"unproposed_share": -1, "forwards": 0}',
        b'{"kinds": NaN, "rows": NaN}',
        b'{"kinds": {"greedy": {"acceptance": {"draft": {"log probability": 1e300}}}}, "rows": 1}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_ignored_with_a_warning(
    spec: PipelineSpec, own_cache: Path, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    KeptExperience(spec, CPU).keep(at_once=True)
    for path in kept_files(own_cache):
        path.write_bytes(text)
    with caplog.at_level(logging.WARNING):
        kept = KeptExperience(spec, CPU)
    assert kept.experience.acceptance == NOTHING_LEARNED
    assert 1 <= len(caplog.records) <= 2 and "ignores what was learned before" in caplog.text
    kept.keep(at_once=True)
    assert msgspec.json.decode(kept_files(own_cache)[0].read_bytes(), type=LearnedAcceptance) == NOTHING_LEARNED


def test_a_directory_that_cannot_be_written_gives_one_warning(
    spec: PipelineSpec, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (own_cache / "learned").write_text("no directory")
    kept = KeptExperience(spec, CPU)
    for _ in range(2):
        kept.keep(at_once=True)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("cannot keep what was learned in ")


def test_a_running_process_writes_once_a_minute(spec: PipelineSpec, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    kept = KeptExperience(spec, CPU)
    kept.keep()
    assert kept_files(own_cache) == []
    clock.advance(experience_files.KEEP_SECONDS)
    kept.keep()
    assert len(kept_files(own_cache)) == 2


def test_the_least_recently_used_files_are_dropped(spec: PipelineSpec, own_cache: Path) -> None:
    kept = KeptExperience(spec, CPU)
    kept.keep(at_once=True)
    own = kept_files(own_cache)
    for number in range(MAX_FILES):
        other = own_cache / "learned" / f"costs-{number}.json"
        other.write_text("{}")
        os.utime(other, (1e9 + number, 1e9 + number))
    for path in own:
        os.utime(path, (1, 1))
    kept = KeptExperience(spec, CPU)  # which uses its files
    kept.keep(at_once=True)
    left = {path.name for path in kept_files(own_cache)}
    assert len(left) == MAX_FILES and {path.name for path in own} < left
    assert not left & {"costs-0.json", "costs-1.json"} and "costs-2.json" in left


def test_priors_change_no_text(pair: Pair) -> None:
    spec, answers, timesteps = pair.spec(3, draft=str(pair.target)), [], []
    for prior in (NOTHING_LEARNED, learned(1.5), learned(-1.5)):
        pipeline = LocalPipeline.load(spec, experience=Experience(3, prior))
        sampling, options = SamplingParams(max_tokens=24, ignore_eos=True), BestFirstOptions(width=3, forwards=1)
        list(pipeline.run(TokenizedRequest(0, PROMPT, sampling, options=options)))
        answers.append(pipeline.last.token_ids)
        timesteps.append(pipeline.last.metrics.timesteps)
    assert answers[0] == answers[1] == answers[2] and len(answers[0]) == 24
    assert len(set(timesteps)) > 1, "they change which rows enter"


def test_a_process_keeps_what_it_learned_when_it_ends(pair: Pair, own_cache: Path) -> None:
    models = ["--target", str(pair.target), "--draft", str(pair.draft), "--bita", "none", "--stages", "1"]
    asked = ["--raw-prompt", "--prompt", "Natalia sold", "--max-tokens", "24", "--ignore-eos"]
    subprocess.run(
        [sys.executable, "-m", "pipedec.cli", "generate", *models, *asked], check=True, capture_output=True, timeout=200
    )
    assert len(kept_files(own_cache)) == 2
    acceptance = msgspec.json.decode(kept_files(own_cache)[0].read_bytes(), type=LearnedAcceptance)
    assert acceptance.kinds[GREEDY].acceptance["draft"]["log probability"] != 1.0
