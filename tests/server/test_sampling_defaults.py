"""Sampling parameters of requests that do not set them: those of ``generation_config.json``, as in vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.http_server import BOTH, CHAT, COMPLETIONS, Site, ask

from pipedec.core.errors import UserError
from pipedec.core.sampling import SamplingParams
from pipedec.directories import reference_pair, reference_threads
from pipedec.server.defaults import SamplingDefaults, sampling_defaults

RECOMMENDED = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}


def recommend(directory: Path, **values: Any) -> Path:
    """A directory with such a generation_config.json."""
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **values}))
    return directory


@pytest.fixture
def recommending(site: Site, tmp_path: Path) -> Iterator[Site]:
    """A server whose target recommends sampling parameters, and at most 9 tokens."""
    before = site.front.require()
    defaults = sampling_defaults("auto", str(recommend(tmp_path, **RECOMMENDED, max_new_tokens=9)))
    site.call(lambda: site.front.attach(replace(before, defaults=defaults)))
    yield site
    site.call(lambda: site.front.attach(before))


@BOTH
def test_what_a_request_sets_wins_one_by_one(recommending: Site, path: str) -> None:
    own = {"temperature": 1.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    for given in ({}, {"temperature": 0, "top_k": -1}, own):
        ask(recommending, path, **{"temperature": None, **given}, max_tokens=5)
        assert recommending.engine.requests[-1].sampling == SamplingParams(**RECOMMENDED | given, max_tokens=5)


def test_max_new_tokens_is_the_default_of_chats_and_no_limit(recommending: Site) -> None:
    for path, given in ((CHAT, {}), (CHAT, {"max_tokens": 30}), (CHAT, {"max_tokens": None}), (COMPLETIONS, {})):
        ask(recommending, path, **given)
    assert [request.sampling.max_tokens for request in recommending.engine.requests] == [9, 30, 9, 16]


@pytest.mark.parametrize(
    ("values", "temperature"),
    [({}, 1.0), ({"do_sample": True}, 1.0), ({"do_sample": False}, 0.0), ({"do_sample": False, "temperature": 0.3}, 0.3),
     ({"temperature": None, "top_p": None}, 1.0), ({"temperature": 2}, 2)],
)  # fmt: skip
def test_the_temperature_where_a_file_has_none(tmp_path: Path, values: dict[str, Any], temperature: float) -> None:
    defaults = sampling_defaults("auto", str(recommend(tmp_path, **values)))
    assert defaults.values == {**SamplingDefaults().values, "temperature": temperature}
    assert defaults.source == ("vllm" if temperature == 1.0 else str(tmp_path / "generation_config.json"))


def test_a_directory_or_neutral_ones_take_the_place_of_the_targets(tmp_path: Path) -> None:
    target, other = tmp_path / "target", tmp_path / "other"
    for directory, values in ((target, {"temperature": 0.6}), (other, {"top_k": 7})):
        directory.mkdir()
        recommend(directory, **values)
    assert sampling_defaults("vllm", str(target)) == SamplingDefaults() == sampling_defaults("auto", "/on/another/machine")
    assert sampling_defaults(str(other), str(target)).values == {**SamplingDefaults().values, "top_k": 7}


def test_shipped_targets_answer_greedily() -> None:
    for model in (reference_pair(), reference_threads()):
        assert sampling_defaults("auto", str(model / "target")).values["temperature"] == 0
    assert sampling_defaults("auto", "reference-pair").values["temperature"] == 0
    of_smollm2 = sampling_defaults("auto", "smollm2")
    assert (of_smollm2.values["temperature"], of_smollm2.max_tokens) == (0, 512)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not valid JSON"), ("[]", "not a JSON object"),
        ('{"temperature": "hot"}', "temperature: must be a number (at least 0), not 'hot'"),
        ('{"top_p": true}', "top_p: must be a number (above 0, at most 1), not True"),
        ('{"top_k": 1.5}', "top_k: must be an integer (at least -1), not 1.5"),
        ('{"top_p": NaN}', "top_p: must be a number (above 0, at most 1), not nan"),
        ('{"temperature": -1}', "temperature: must be a number (at least 0), not -1"),
        ('{"max_new_tokens": 0}', "max_new_tokens: must be an integer (at least 1), not 0"),
    ],
)  # fmt: skip
def test_a_bad_file_is_named(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    for choice, target in (("auto", str(tmp_path)), (str(tmp_path), "/on/another/machine")):
        with pytest.raises(UserError) as raised:
            sampling_defaults(choice, target)
        message = str(raised.value)
        assert message.startswith(f"{tmp_path / 'generation_config.json'}: {expected}") and "\n" not in message


def test_a_directory_that_is_missing_or_has_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--generation-config /nowhere: there is no such directory: give .* auto or vllm"):
        sampling_defaults("/nowhere", str(tmp_path))
    with pytest.raises(UserError, match=r"there is no generation_config.json in it"):
        sampling_defaults(str(tmp_path), str(tmp_path))
