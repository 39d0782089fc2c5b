"""Tensors from rank to rank. The only package that touches torch.distributed; knows steps, but not why they move."""

from pipedec.transport.base import Envelope, Transport
from pipedec.transport.local import LocalTransport

__all__ = ["Envelope", "LocalTransport", "Transport"]
