"""Sets of token ids, one bit each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Bitmask:
    """A set of token ids. Tokens beyond the bits are not in it.

    Attributes:
        bits: of token id t, bit t % 8 of byte t // 8.
    """

    bits: bytes = b""

    @classmethod
    def of(cls, *token_ids: int) -> Bitmask:
        return cls(sum(1 << token for token in set(token_ids)).to_bytes(max(token_ids, default=-1) // 8 + 1, "little"))

    def __contains__(self, token: int) -> bool:
        return 0 <= token < 8 * len(self.bits) and bool(self.bits[token // 8] >> token % 8 & 1)

    def __bool__(self) -> bool:
        return any(self.bits)

    def __len__(self) -> int:
        return int.from_bytes(self.bits, "little").bit_count()

    def __iter__(self) -> Iterator[int]:
        """Token ids, the lowest first."""
        for index, byte in enumerate(self.bits):
            if byte:
                yield from (8 * index + bit for bit in range(8) if byte >> bit & 1)


NOTHING = Bitmask()
