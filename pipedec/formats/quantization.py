"""The formats of a checkpoint by its ``quantization_config``: a line for each method of quantization."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipedec.core.errors import UserError
from pipedec.core.values import shortened
from pipedec.formats.autoround import autoround_formats
from pipedec.formats.awq import awq_formats
from pipedec.formats.base import ALL_PLAIN, Formats
from pipedec.formats.compressed_tensors import compressed_tensors_formats
from pipedec.formats.float8 import fbgemm_fp8, fp8, modelopt
from pipedec.formats.gptq import gptq_formats
from pipedec.formats.tables import bitsandbytes, mxfp4

METHODS: dict[str, Callable[[Mapping[str, Any]], Formats]] = {
    "gptq": gptq_formats,
    "awq": awq_formats,
    "auto-round": autoround_formats,
    "intel/auto-round": autoround_formats,
    "compressed-tensors": compressed_tensors_formats,
    "fp8": fp8,
    "fbgemm_fp8": fbgemm_fp8,
    "modelopt": modelopt,
    "mxfp4": mxfp4,
    "bitsandbytes": bitsandbytes,
}


def stated_formats(quantization: Mapping[str, Any] | None) -> Formats:
    """The formats that a ``quantization_config`` describes. Raises UserError, without the name of the file, for others."""
    if not quantization:
        return ALL_PLAIN
    method = quantization.get("quant_method")
    if method not in METHODS:
        raise UserError(
            f"its weights are quantized by {shortened(method)}, which is not supported: choose a checkpoint quantized by "
            f"{', '.join(METHODS)}, or an unquantized one and --quantize int8 or int4"
        )
    return METHODS[method](quantization)
