"""Transfers between ranks, over torch.distributed. Does not know when or why messages are sent."""

from __future__ import annotations

from typing import Protocol

from pipedec.core.stage_message import StageMessage
from pipedec.device import DeviceEvent

__all__ = ["Transport"]


class Transport(Protocol):
    """Point-to-point transfer of messages."""

    def send_message(self, message: StageMessage, dst: int) -> DeviceEvent:
        """Send a message to rank ``dst`` without waiting for the receiver. Returns the event at the end of the transfer of its
        activations, if a device sends them; else the present moment.

        Raises:
            RankLost: the connection failed or timed out.
            ValueError: the message is larger than any receiver accepts (see ``wire``).
        """

    def receive_message(self, src: int) -> StageMessage:
        """Wait for the next message from rank ``src``; its activations may come later (see ``StageMessage.await_hidden``).
        Raises RankLost if the connection failed or timed out, or the message is malformed.
        """

    def close(self) -> None:
        """Leave the process groups and close their sockets."""
