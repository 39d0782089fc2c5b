"""A setting is one line: options, keys of cluster.yaml, keyword arguments and the description of a run follow from it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import save_tiny_llama
from support.option_words import option_words
from support.tiny_pair import Pair

import pipedec
from pipedec.config import Settings, settings_options
from pipedec.config.cluster import cluster_from_json, cluster_to_json
from pipedec.config.redis import RedisConfig
from pipedec.config.settings import GROUPS, OPTIONS, SETTINGS, given_settings
from pipedec.core.errors import UserError
from pipedec.engine.build import resolve
from pipedec.messages.run import RunDescription
from pipedec.methods import LayerTreeOptions
from pipedec.plan.spec import PipelineSpec, run_description
from pipedec.validation import parse_json, to_json

PACKAGE = Path(pipedec.__file__).parent
NEW_SETTING = """    prefetch: Annotated[Annotated[int, Meta(ge=0, le=9)], Help("Verdicts to prefetch.")] = 2
"""
NEW_METHOD = """
        MethodEntry("token-before", "Every token twice.", PlainOptions, "pipedec.decoding.token_before:TokenBefore"),"""
# Prints what each entrance makes of the new setting, and whether commands offer the new method.
ENTRANCES = """
import inspect, json, sys
import click
from pipedec.llm import Resident
from pipedec.cli.main import program
from pipedec.config import Settings, load_cluster
from pipedec.cluster import torchrun

def option(command):
    return next(one.get_help_record(click.Context(command)) for one in command.params if one.name == "prefetch")

found = {name: option(program.get_command(None, name)) for name in ("generate", "up", "serve", "chat", "launch", "verify")}
found["torchrun"] = option(torchrun._command)
found["keyword"] = [str(inspect.signature(Resident).parameters["prefetch"]), Settings.of(prefetch=7).limits.prefetch]
config = load_cluster(sys.argv[1])
found["file"] = [config.settings.limits.prefetch, config.partitions["own"].settings.limits.prefetch]
try:
    Settings.of(prefetch=10)
except Exception as error:
    found["refused"] = str(error)
generate = program.make_context("pipedec", ["generate"])
found["offered"] = "token-before" in program.get_command(generate, "generate").get_help(generate)
print(json.dumps(found))
"""


def test_a_new_setting_is_one_line_and_so_is_a_new_method(tmp_path: Path) -> None:
    """Add both to a copy of the package, and look at every entrance."""
    copy = tmp_path / "pipedec"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    settings, table = copy / "config" / "settings.py", copy / "methods.py"
    before, line, after = settings.read_text().partition("    prefix_cache: ")
    settings.write_text(before + NEW_SETTING + line + after)
    before, line, after = table.read_text().partition("    for entry in (")
    table.write_text(before + line + NEW_METHOD + after)
    servers = [{"host": "localhost", "devices": {"cpu": 3}}]
    partitions = {"own": {"stages": 2, "prefetch": 5}, "files": {"stages": 2}}
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump({"target": "t", "servers": servers, "partitions": partitions, "prefetch": 4}))
    done = subprocess.run(
        [sys.executable, "-c", ENTRANCES, str(file)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for command in ("generate", "up", "serve", "chat", "launch", "verify", "torchrun"):
        default = "" if command in ("launch", "torchrun") else "default: 2; "
        assert found[command] == ["--prefetch N", f"Verdicts to prefetch.  [{default}0 to 9]"]
    assert found["keyword"] == ["prefetch: int = 2", 7] and found["file"] == [4, 5]
    assert found["refused"] == "prefetch: must be an integer (0 to 9), not 10" and found["offered"]


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "target": st.sampled_from(["/a", "smollm2"]), "draft": st.just("none"), "bita": st.just("/b"), "stages": st.integers(1, 1024),
    "layers": st.just("auto"), "device": st.sampled_from(["cpu", "cuda"]), "max_model_len": st.integers(1, 10**7),
    "max_num_seqs": st.integers(1, 65_536), "max_waiting": st.integers(0, 10**7), "kv_cache_memory": st.just("4GiB"),
    "state_memory": st.just("64MiB"),
    "gpu_memory_utilization": st.floats(0.1, 1), "prefix_cache": st.booleans(), "shared_suffixes": st.booleans(),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
    "quantize": st.just("int4"),
    "draft_dtype": st.just("float16"), "draft_quantize": st.just("int8"), "dequantize": st.just("never"),
    "kernels": st.just("torch"),
    "transport": st.sampled_from(["gloo", "nccl"]),
    "wire_dtype": st.just("int8"),
    "priors": st.booleans(), "dispatch": st.sampled_from(["windows", "tasks"]), "max_restarts": st.integers(0, 99),
    "model_impl": st.sampled_from(["auto", "pipedec", "transformers"]),
    "restart_window": st.floats(0.5, 1e6), "stall_timeout": st.floats(0.5, 1e6), "log_level": st.sampled_from(["debug", "error"]),
}  # fmt: skip
SOME = st.fixed_dictionaries({}, optional=VALUES)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stages": 4, "passage": 3}, "passage: rows take 4 timesteps through 4 groups: give at least 4, or auto"),
        ({"stages": 4, "passage": 129}, "passage: must be auto or an integer (1 to 128), not 129"),
        ({"stages": 4, "passage": 6, "dispatch": "tasks"}, "passage: with dispatch tasks it is the number of groups: give 4"),
    ],
)  # fmt: skip
def test_a_passage_is_no_shorter_than_the_groups(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        Settings.of(**values)
    assert Settings.of(stages=4, groups=2, passage=3).passage == 3 and Settings.of(stages=4).passage == 4
    assert parsed(["--stages", "2", "--passage", "5"]).cluster.passage == 5


def test_every_setting_has_a_value_below() -> None:
    assert GROUPS.keys() - VALUES.keys() == {"groups", "passage", "tree", "redis"}, "which depend on stages, or are no options"


@click.command()
@settings_options
def whole(settings: Settings) -> Settings:
    return settings


@click.command()
@given_settings
def laid_over(given: dict[str, Any]) -> dict[str, Any]:
    return given


def parsed(arguments: list[str], command: click.Command = whole) -> Any:
    return command.main(arguments, standalone_mode=False)


@given(SOME)
def test_options_keys_and_keyword_arguments_are_the_same_settings(values: dict[str, Any]) -> None:
    settings = Settings.of(**values)
    given = {name: value for name, value in settings.items() if name in OPTIONS and (name, value) not in Settings().items()}
    assert parsed(option_words(given, SETTINGS)) == settings
    assert parse_json(Settings, msgspec.json.encode(settings)) == settings
    document = {"target": "t", "stages": 4, **values, "servers": [{"host": "h", "devices": {"cpu": 1}}], "partitions": {"p": {}}}
    config = cluster_from_json(json.dumps(document))
    _, partition = config.find_partition()
    own = dict(partition.settings.items())
    assert {name: own[name] for name in values} == values
    assert cluster_from_json(cluster_to_json(config)) == config
    over = config.for_partition(given=values)
    assert over.settings == partition.settings and over.for_partition().settings == over.settings


def test_given_settings_are_those_that_were_given() -> None:
    assert parsed([], laid_over) == {}
    assert parsed(["--stages", "4", "--layers", "6,6,6,6", "--no-prefix-cache"], laid_over) == {
        "stages": 4, "layers": (6, 6, 6, 6), "prefix_cache": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stage": 2}, "unknown setting 'stage': did you mean stages?"),
        ({"stages": "4"}, "stages: must be an integer (1 to 1024), not '4'"),
        ({"stages": True}, "stages: must be an integer (1 to 1024), not True"),
        ({"groups": 5}, "groups: 5 groups need at least as many stages, but there are 4"),
        ({"stages": 3, "layers": [1, 2]}, "layers: 2 entries for 3 stages: give one number per stage, or auto"),
    ],
)
def test_mistakes_name_the_setting(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        Settings.of(**values)
    assert str(refused.value) == message


@pytest.mark.failure_case("M17")
def test_more_than_the_models_context_is_refused(tmp_path: Path) -> None:
    save_tiny_llama(
        tmp_path, max_position_embeddings=64, rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}
    )
    asked = Settings.of(target=tmp_path, draft="none", stages=1, device="cpu")
    assert resolve(asked.replaced(max_model_len=256)).max_context == resolve(asked).max_context == 256
    with pytest.raises(UserError, match=r"257, but the target's context has 256 tokens \(max_position_embeddings 64, stretched"):
        resolve(asked.replaced(max_model_len=257))


def test_mistakes_name_the_option() -> None:
    for arguments in (["--stages", "0"], ["--dtype", "float8"], ["--layers", "1,b"], ["--stage", "2"]):
        result = CliRunner().invoke(whole, arguments)
        assert result.exit_code == 2 and arguments[0] in result.output


def test_the_description_of_a_run_has_the_settings_and_no_password(pair: Pair) -> None:
    spec = pair.spec(3).replaced(
        redis=RedisConfig("redis://user@host:1/0", "hunter2"), max_num_seqs=7, tree=LayerTreeOptions(8, 4), dispatch="tasks"
    )
    text = to_json(run_description(spec))
    assert "hunter2" not in text
    settings = parse_json(RunDescription, text).settings
    assert settings == spec.settings.without_secrets()
    assert settings.cluster.redis == RedisConfig("redis://user@host:1/0") and settings.limits.tree == LayerTreeOptions(8, 4)


def test_a_spec_takes_other_settings(pair: Pair) -> None:
    spec: PipelineSpec = pair.spec(2)
    assert spec.replaced(dispatch="tasks").window == 0 and spec.window > 0
