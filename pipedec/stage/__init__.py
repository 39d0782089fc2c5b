"""The computation of one pipeline stage: rows in, activations or verdicts out. Knows no decoding method and no other process."""

from pipedec.stage.final import FinalStageWorker
from pipedec.stage.worker import StageWorker

__all__ = ["FinalStageWorker", "StageWorker"]
