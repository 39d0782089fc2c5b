"""The tokens that may follow rows of trees, as draft sources propose them.

Every source proposes tokens, and has *features* of all tokens that any source proposed; the weights of the features are learned
(see ``acceptance``). Shapes: F rows that were drafted, K tokens of all sources together, W features of all sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

NO_TOKEN = -1
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Choices:
    """The tokens that may follow F rows of trees, proposed by all sources together, on the host.

    Attributes:
        token_ids: int64 [F, K], distinct within a row; NO_TOKEN marks unused entries.
        features: float32 [F, K + 1, W]; the last entry of a row stands for "none of the choices".
    """

    token_ids: Tensor
    features: Tensor


class Line(NamedTuple):
    """The choices below one row, on the host.

    Attributes:
        log_chances: of each, given that the row is accepted; further values are meaningless.
        log_chances: of each, given that the row is accepted; further values mean nothing.
        choices: the choices that contain them, with their features.
        place: of the row in ``choices``.
    """

    token_ids: list[int]
    log_chances: list[float]
    choices: Choices | None
    place: int


NO_LINE = Line([], [], None, 0)  # of a row without possible successors
