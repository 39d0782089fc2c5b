"""Which slots of the stages' KV pools hold which tokens. Plain Python, on rank 0; knows no tensor, no stage and no method."""

from pipedec.kv.manager import KVManager, Lease

__all__ = ["KVManager", "Lease"]
