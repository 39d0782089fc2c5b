"""The KV memory of a pipeline as rank 0 manages it: slots for requests, and prefixes that requests share.

All stages have pools of the same size, and use the same slots for a request. So rank 0 alone decides, and stages neither search
nor count. Slots are handed out in blocks. Free blocks are stored as runs of consecutive ones: blocks may be many, but runs are
few.

Blocks with known tokens form a tree, in which a block is the child of the block with the tokens before its own: the path from the
root to a block is a prefix of some request. Running requests use whole paths. The blocks of a request that has ended keep their
tokens until the memory is needed. Then the least recently used block goes first, but none before its children. Only requests that
have ended leave blocks that are not full; these have no children.

Keys and values of a prefix can be adopted up to any token. Recurrent layers have states instead, each of one position. So with
such layers a prefix can be adopted only up to the end of a known block after which a *snapshot* of the states is kept. All stages
use the same places for snapshots too.

Plain Python; knows no tensor, no stage and no method.
"""

from __future__ import annotations

from pipedec.kv.manager import KVManager, Lease

__all__ = ["KVManager", "Lease"]
