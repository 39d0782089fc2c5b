"""Older processors' arithmetic on this one: the variables that limit torch's libraries to an instruction set.

``python tests/support/instruction_sets.py SSE41 COMMAND…`` prints in one line which kernels compute, and then becomes the
command, with the variables in its environment. It fails where they have no effect, as on another kind of processor.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

VARIABLES = {
    "SSE41": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
LIMITS = tuple(VARIABLES["SSE41"])
# What the libraries report then. MKL has no branch for AVX2 on AMD's processors, and takes the best it has there.
EXPECTED = {
    "SSE41": r"ATen DEFAULT, MKL COMPATIBLE, oneDNN Intel SSE4\.1",
    "AVX2": r"ATen AVX2, MKL (AVX2|AUTO), oneDNN Intel AVX2",
}
# A product by MKL and one by oneDNN, which a packed weight takes.
PRODUCTS = """
import torch
rows, weight = torch.ones(4, 512), torch.ones(512, 512)
rows @ weight
packed = torch.ops.mkldnn._reorder_linear_weight(weight, 4)
torch.ops.mkldnn._linear_pointwise.default(rows, packed, None, "none", [], "")
print("ATen:" + torch.backends.cpu.get_cpu_capability())
"""
REPORTS = {"ATen": r"ATen:(.+)", "MKL": r"MKL_VERBOSE SGEMM.* CNR:(\w+)", "oneDNN": r"onednn_verbose,.*,cpu,isa:(.+)"}


def kernels(instruction_set: str | None = None) -> str:
    """The kernels that a process takes under an instruction set, as torch, MKL and oneDNN report them; None for its own."""
    limits = {} if instruction_set is None else VARIABLES[instruction_set]
    environment = {**os.environ, **limits, "MKL_VERBOSE": "1", "ONEDNN_VERBOSE": "1"}
    done = subprocess.run([sys.executable, "-c", PRODUCTS], env=environment, capture_output=True, text=True, check=True)
    found = {library: re.search(report, done.stdout) for library, report in REPORTS.items()}
    return ", ".join(f"{library} {match[1] if match else 'unknown'}" for library, match in found.items())


def main(instruction_set: str, *command: str) -> None:
    found = kernels(instruction_set)
    if not re.fullmatch(EXPECTED[instruction_set], found):
        sys.exit(f"{instruction_set} cannot be chosen here: {found}")
    print(f"{instruction_set}: {found}", flush=True)
    os.execvpe(command[0], command, {**os.environ, **VARIABLES[instruction_set]})


if __name__ == "__main__":
    main(*sys.argv[1:])
