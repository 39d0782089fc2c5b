"""``pipedec train draft --size-for``: the size of a new draft by the timestep of a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from support.refusals import refusal

from pipedec.cli.main import train as command
from pipedec.core.errors import UserError
from pipedec.directories import reference_pair
from pipedec.families import KNOWN_MODELS, model_by_name, model_config
from pipedec.train.draft import DraftShape
from pipedec.train.sizing import described, find_plan, size_for

TARGET = reference_pair() / "target"
PAPER = Path(__file__).resolve().parents[2] / "cluster.yaml"
CLUSTER = """
target: {target}
servers: [{{host: a, devices: {{{device}: 3}}}}]
partition: whole
partitions:
  whole: {{stages: 2, draft_device: {{host: a, device: {device}}}}}
  undrafted: {{stages: 2}}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text(CLUSTER.format(target=TARGET, device="rtx3090"))
    return path


def test_the_size_is_the_one_with_the_fastest_tokens_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipedec.train.sizing.KNOWN_MODELS", {})
    shape, estimate = size_for(find_plan(f"{PAPER}:paper-14", None))
    target = KNOWN_MODELS["llama-3.1-70b"]
    assert shape.hidden_size % 64 == 0 and shape.layers == shape.hidden_size // 80 and shape.vocabulary is None
    assert 0.5e9 < estimate.parameters < 0.2 * target.parameters
    assert estimate.parameters == shape.model_config(target.vocab_size).parameters
    assert estimate.pace.forwards * estimate.forward_ms <= estimate.pace.timestep_ms
    text = described(DraftShape(320, 4, 6000), estimate)
    assert text.startswith("--hidden-size 320 --layers 4, the 6,000 most frequent tokens: ")
    assert f"top-1 {estimate.top1:.0%}" in text and "\n" not in text
    shallow, _ = size_for(find_plan(f"{PAPER}:home-2x3090", None))
    assert shallow.hidden_size < shape.hidden_size, "on a processor"
    assert shallow.vocabulary is not None, "whose head would be most of it"


def test_the_target_is_the_plans_or_takes_its_place(cluster: Path) -> None:
    config = find_plan(str(cluster), None)
    assert config.target == str(TARGET)
    shape, estimate = size_for(config)
    target = model_by_name(str(TARGET))
    assert estimate.parameters < target.parameters and shape.hidden_size <= target.hidden_size
    assert find_plan(f"{PAPER}:auto-14", TARGET).target == str(TARGET)


def test_a_draft_has_the_sizes_that_were_counted() -> None:
    vocab_size = model_config(TARGET).vocab_size
    assert DraftShape(128, 2).model_config(vocab_size).vocab_size == vocab_size
    counted = DraftShape(128, 2, vocabulary=40).model_config(vocab_size)
    assert counted.vocab_size == 41 and counted.num_hidden_layers == 2 and counted.tie_word_embeddings


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (str(PAPER), "its target llama-3.1-70b is a shape without weights: give --target DIR"),
        (f"{PAPER}:paper-15", "paper-15"),
        ("nowhere.yaml:paper-14", "nowhere.yaml"),
        ("{own}:undrafted", "partitions.undrafted.draft_device: missing"),
    ],
)
def test_plans_that_name_no_size(plan: str, message: str, cluster: Path) -> None:
    with pytest.raises(UserError) as caught:
        size_for(find_plan(plan.format(own=cluster), None))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layers", "2"], "leave out --layers"),
        (["--hidden-size", "64", "--vocabulary", "50"], "leave out --hidden-size and --vocabulary"),
        (["--draft", "here"], "leave out --draft"),
        (["--draft", "here", "--only-acceptance"], "leave out --draft and --only-acceptance"),
    ],
)
def test_a_size_that_is_given_is_not_chosen(flags: list[str], message: str, cluster: Path, tmp_path: Path) -> None:
    where = ["--size-for", str(cluster), "--invented", "5", "--out", str(tmp_path), "--work", str(tmp_path)]
    result = CliRunner().invoke(command, ["draft", *where, *flags])
    assert refusal(result) == f"--size-for chooses the size of a new draft: {message}"


def test_the_command_trains_the_draft_that_it_chose(cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[object] = []

    def train_draft(target: Path, start: object, *args: object, **settings: object) -> dict[str, object]:
        trained.extend((target, start))
        return {}

    monkeypatch.setattr("pipedec.cli.train.train_draft", train_draft)
    monkeypatch.setattr("pipedec.cli.train.invented_sets", lambda *args: {})
    flags = ["--size-for", str(cluster), "--invented", "5", "--out", str(tmp_path), "--work", str(tmp_path), "--device", "cpu"]
    result = CliRunner().invoke(command, ["draft", *flags], catch_exceptions=False)
    shape, estimate = size_for(find_plan(str(cluster), None))
    assert result.output.rstrip() == described(shape, estimate) and trained == [TARGET, shape]
