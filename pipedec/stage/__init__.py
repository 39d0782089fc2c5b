"""What one pipeline stage does with rows and verdicts. Knows neither the decoding method nor the other processes."""

from pipedec.stage.worker import FinalStageWorker, StageWorker

__all__ = ["FinalStageWorker", "StageWorker"]
