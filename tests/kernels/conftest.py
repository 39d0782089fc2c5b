"""Tests of kernels compute in Triton's interpreter, in processes of their own: see ``test_kernel_processes``."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
