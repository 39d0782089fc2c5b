"""Transfers between ranks. The only package that touches torch.distributed; knows steps, but not when or why they are sent."""

from pipedec.transport.interface import Transport

__all__ = ["Transport"]
