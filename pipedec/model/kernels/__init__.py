"""Kernels in Triton, each beside a reference in plain torch that computes the same.

Triton comes with torch for CUDA. On a CPU, and where it is missing, the references compute; in Triton's interpreter
(``TRITON_INTERPRET=1``) the kernels run on tensors of the CPU.
"""
