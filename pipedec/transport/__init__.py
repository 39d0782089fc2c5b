"""Transfers between ranks. The only package that uses torch.distributed; knows envelopes, but not when or why they are sent."""

from __future__ import annotations

from typing import Protocol

from pipedec.core.stage_message import StageMessage
from pipedec.device import DeviceEvent

__all__ = ["Transport"]


class Transport(Protocol):
    """Point-to-point transfer of envelopes."""

    def send_envelope(self, envelope: StageMessage, dst: int) -> DeviceEvent:
        """Send an envelope to rank ``dst`` without waiting for the receiver. Returns the event at the end of the transfer of its
        activations, if a device sends them; else the present moment.

        Raises:
            RankLost: the connection failed or timed out.
            ValueError: the envelope is larger than any receiver accepts (see ``wire``).
        """

    def receive_envelope(self, src: int) -> StageMessage:
        """Wait for the next envelope from rank ``src``; its activations may come later (see ``StageMessage.await_hidden``).
        Raises RankLost if the connection failed or timed out, or the message is not an envelope.
        """

    def close(self) -> None:
        """Leave the process groups and close their sockets."""
