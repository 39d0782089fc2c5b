"""The interface of a transport."""

from __future__ import annotations

from typing import Protocol

from pipedec.core import StageMessage, Step
from pipedec.device import DeviceEvent


class Transport(Protocol):
    """Point-to-point transfer of steps and envelopes. The receiver of a single step knows its number of rows from the task."""

    def send(self, step: Step, dst: int) -> None:
        """Send ``step`` to rank ``dst``. Returns when it has left, even if a device sends it.

        Raises:
            RankLost: the connection failed or timed out.
        """

    def receive(self, num_rows: int, src: int) -> Step:
        """Wait for a step of ``num_rows`` rows from rank ``src``. Returns when it has arrived, even if a device receives it.

        Raises:
            RankLost: the connection failed or timed out.
        """

    def send_envelope(self, envelope: StageMessage, dst: int) -> DeviceEvent:
        """Send an envelope to rank ``dst``. Does not wait for the receiver.

        Returns:
            the end of the transfer of its activations, if a device sends them; otherwise the present moment.

        Raises:
            RankLost: the connection failed or timed out.
            ValueError: the envelope is larger than any receiver accepts (see ``wire``).
        """

    def receive_envelope(self, src: int) -> StageMessage:
        """Wait for the next envelope from rank ``src``; its activations may come later (see ``StageMessage.await_hidden``).

        Raises:
            RankLost: the connection failed or timed out, or the message is not an envelope.
        """

    def close(self) -> None:
        """Leave the process groups and close their sockets."""
