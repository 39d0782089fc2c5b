"""The stage model: consecutive layers of a checkpoint, with a two-level KV cache per request and tree attention.

Knows tensors and Hugging Face checkpoints, but not the cluster, tokenizers or decoding methods.
"""

from pipedec.model.bita import BitaConfig, BitaWeights, checked_bita, load_markov
from pipedec.model.cache import KVCache, KVPool
from pipedec.model.captured_graphs import NewCapture, device_capture
from pipedec.model.draft_vocabulary import DraftVocabulary
from pipedec.model.experts import ExpertMatrices
from pipedec.model.flash_lanes import described_attention
from pipedec.model.formats import WidenedMatrix, rounded
from pipedec.model.kernel_choice import choose_kernels
from pipedec.model.rows import LaneRows
from pipedec.model.stage_model import StageModel
from pipedec.model.warm_up import FirstForward, Usual, warm_up
from pipedec.model.weights import Checkpoint, Target

__all__ = [
    "BitaConfig", "BitaWeights", "Checkpoint", "DraftVocabulary", "ExpertMatrices", "FirstForward", "KVCache", "KVPool",
    "LaneRows", "NewCapture", "StageModel", "Target", "Usual", "WidenedMatrix", "checked_bita", "choose_kernels",
    "described_attention", "device_capture", "load_markov", "rounded", "warm_up",
]  # fmt: skip
