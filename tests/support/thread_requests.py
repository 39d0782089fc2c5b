"""Requests to clusters for answers in several decode threads."""

from __future__ import annotations

from typing import Any

from pipedec.core.sampling import SamplingParams
from pipedec.messages.request import PromptRequest
from support.thread_models import BIASES, LETTERS, PROMPTS, THREAD_DIALECTS, ThreadModels


def sampling_in_threads(models: ThreadModels, dialect: str | None, **values: Any) -> SamplingParams:
    """Letters and control tokens are likely, most of all openers; for None letters alone."""
    bias = dict.fromkeys(LETTERS, 0.0) | (BIASES[dialect] if dialect else {})
    logit_bias = {models.tokenizer.token_to_id(text): 40.0 + value for text, value in bias.items()}
    return SamplingParams(**{"logit_bias": logit_bias, **values})


def thread_request(models: ThreadModels, dialect: str | None, method: str = "pp", **values: Any) -> PromptRequest:
    sampling = sampling_in_threads(models, dialect, **values)
    threads = THREAD_DIALECTS[dialect].to_json() if dialect else None
    return PromptRequest(PROMPTS[0], True, method, sampling, threads=threads)
