"""The table of methods: what every reader of it takes from there, and options that a method does not take."""

from __future__ import annotations

import importlib
import re
from typing import Any

import click
import pytest
from click.testing import CliRunner
from msgspec.structs import asdict
from support.tiny_pair import Pair

from benchmarks.methods import applicable_options, registered
from pipedec import LLM, PipeDecOptions
from pipedec.cli.options import OPTION_NAMES, RequestFlags, request_options
from pipedec.config import Settings
from pipedec.core.errors import UserError
from pipedec.core.request import DEFAULT_METHOD, TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.values import field_hints, range_of
from pipedec.engine.build import resolve
from pipedec.engine.local import LocalPipeline
from pipedec.llm import named_options
from pipedec.methods import (
    MAX_ROWS,
    METHOD_NAMES,
    METHODS,
    SHAPES,
    BestFirstOptions,
    BitaOptions,
    LayerTreeOptions,
    MethodEntry,
    PlainOptions,
    StaticTreeOptions,
    find_method,
    make_options,
    shown_option,
)


def test_a_new_method_is_one_file_and_one_line(pair: Pair) -> None:
    """With an entry in the table it answers as the target does, alone and in company; test_settings.py adds one to a copy."""
    entry = MethodEntry("token-before", "Every token twice.", PlainOptions, "support.token_before:TokenBefore")
    with registered(entry):
        for stages in (1, 3):
            pipeline = LocalPipeline.load(resolve(Settings.of(target=pair.target, draft="none", bita="none", stages=stages)))
            plain, guessed = ([], 0), ([], 0)
            for method in ("pp", "token-before"):
                requests = [
                    TokenizedRequest(number, (1, 9, 30 + number), SamplingParams(max_tokens=24), method) for number in range(4)
                ]
                for _ in pipeline.run_all({1: requests}):
                    continue
                answers = [pipeline.answers[request.number] for request in requests]
                plain, guessed = guessed, ([one.token_ids for one in answers], sum(one.metrics.hits for one in answers))
                assert all(one.metrics.timesteps == stages * one.metrics.misses for one in answers), "a guess takes no timestep"
            assert guessed[0] == plain[0] and guessed[1] > plain[1] == 0, "no answer has a token twice"


@pytest.mark.parametrize("entry", METHODS.values(), ids=METHOD_NAMES)
def test_every_entry_leads_to_code_and_to_options(entry: MethodEntry) -> None:
    module, _, name = entry.implementation.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    assert make_options(entry.name) == entry.options()
    assert entry.help.endswith(".") and entry.option_names == tuple(asdict(entry.options()))
    assert all((help := shown_option(hint).help) and not help.endswith(".") for hint in field_hints(entry.options).values())


def test_the_default_and_the_widest_step() -> None:
    assert find_method(TokenizedRequest(0, ()).method).name == DEFAULT_METHOD
    assert range_of(field_hints(BestFirstOptions)["width"]) == f"1 to {MAX_ROWS}"


def test_what_a_pipeline_can_run() -> None:
    for has_draft, has_bita, possible in (
        (True, True, METHOD_NAMES),
        (False, True, ("pp", "pipedec-bestfirst", "bita")),
        (True, False, ("pp", "stpp", "pipedec", "pipedec-bestfirst")),
        (False, False, ("pp", "pipedec-bestfirst")),
    ):
        assert tuple(name for name, entry in METHODS.items() if entry.missing(has_draft, has_bita) is None) == possible


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("best", {}, "unknown method 'best': choose one of pp, stpp, pipedec, pipedec-bestfirst, bita"),
        ("pp", {"width": 3}, "method pp has no option 'width': it is an option of stpp, pipedec, pipedec-bestfirst"),
        ("pp", {"colour": 3}, "method pp has no option 'colour': it takes none"),
        ("pipedec", {"colour": 3}, "method pipedec has no option 'colour': it takes width, children"),
        ("pipedec", {"width": 0}, "width: must be an integer (1 to 512), not 0"),
        ("pipedec", {"width": None}, "width: must be an integer (1 to 512), not empty"),
        ("pipedec", {"width": True}, "width: must be an integer (1 to 512), not True"),
        ("stpp", {"depth": 65}, "depth: must be an integer (1 to 64), not 65"),
        ("stpp", {"shape": "full"}, "method stpp has no option 'shape': it is an option of bita"),
        ("stpp", {"rows": 100, "depth": 8, "children": 100}, "children: the rows that are drafted at once have 80000 children"),
        ("stpp", {"width": 128, "depth": 5}, "depth: 5 layers of 128 rows are drafted at once: together at most 512"),
        ("pipedec-bestfirst", {"forwards": 9}, "forwards: must be an integer (1 to 8), not 9"),
        ("pipedec-bestfirst", {"children": 129}, "children: must be an integer (1 to 128), not 129"),
        ("stpp", {"rows": 100, "depth": 50}, "depth: 50 layers of 100 rows are drafted at once: together at most 2048"),
        ("stpp", {"proposers": ["ngrams"]}, "proposers: a static tree needs the draft model: name draft, too"),
        ("pipedec-bestfirst", {"proposers": ()}, "proposers: must be a list (not empty), not ()"),
        ("pipedec-bestfirst", {"proposers": [["draft"]]}, "proposers[0]: must be one of draft, ngrams, not ['draft']"),
        ("bita", {"shape": "x" * 500}, "shape: must be one of likeliest, efficient, straightforward, full, not 'x"),
    ],
)
def test_options_that_are_refused(method: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        make_options(method, given)
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value) and len(str(refused.value)) < 300


def test_what_is_given_goes_before_the_cluster_s_tree() -> None:
    tree = LayerTreeOptions(3, 2)
    assert make_options("pipedec", {"children": 5}, tree) == PipeDecOptions(3, 5)
    assert make_options("stpp", {"depth": 2}, tree) == StaticTreeOptions(3, 2, 2)
    assert make_options(DEFAULT_METHOD, {"proposers": ["ngrams"]}, tree) == BestFirstOptions(proposers=("ngrams",))
    assert make_options("bita", {}, tree) == BitaOptions()


def test_limits_that_several_methods_share() -> None:
    limits = {"width": 6, "children": None, "depth": 2}
    made = [applicable_options(name, limits) for name in METHOD_NAMES]
    assert made[1:] == [StaticTreeOptions(6, depth=2), PipeDecOptions(6), BestFirstOptions(6), BitaOptions(depth=2)]


def test_every_option_has_a_flag_that_names_its_methods() -> None:
    @click.command()
    @request_options
    def command(asked: RequestFlags) -> None:
        print(asked.options)

    flags = {option.name: option for option in command.params if isinstance(option, click.Option)}
    assert set(re.findall(r"[\w-]+", str(flags["shape"].metavar))) == set(SHAPES)
    for name in OPTION_NAMES:
        takers = [method for method, entry in METHODS.items() if name in entry.option_names]
        assert all(f"{method}: " in str(flags[name].help) for method in takers)
    done = CliRunner().invoke(command, ["--prompt", "a", "--width", "3", "--proposers", "draft"])
    assert done.output == "{'width': 3, 'proposers': ('draft',)}\n", "only what was given"


def test_options_that_the_python_api_refuses() -> None:
    for given, message in (
        (BestFirstOptions(), "method pipedec takes PipeDecOptions, not BestFirstOptions"),
        ({"forwards": 2}, "method pipedec has no option 'forwards': it is an option of pipedec-bestfirst"),
        ({"width": 0}, "width: must be an integer (1 to 512), not 0"),
    ):
        with pytest.raises(UserError) as refused:
            named_options("pipedec", given)
        assert str(refused.value) == message


def test_generate_has_options_in_the_place_of_a_tree() -> None:
    llm: LLM = object.__new__(LLM)  # no cluster is started
    with pytest.raises(UserError, match=r"^generate has no tree: give options, for example options=\{'width': 16\}$"):
        llm.generate("Hello", tree=object())
