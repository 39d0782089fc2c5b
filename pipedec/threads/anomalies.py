"""Names of structural errors in a threaded answer. Each is counted and resolved by a fixed rule (docs/threads.md)."""

UNCLOSED_CHILD = "unclosed_child"
LENGTH_MISSING = "length_missing"
LENGTH_CLAMPED = "length_clamped"
LENGTH_EXCEEDED = "length_exceeded"
OPENER_NOT_COMPLETED = "opener_not_completed"
OPENER_TOO_DEEP = "opener_too_deep"
OPENER_OUT_OF_PLACE = "opener_out_of_place"
TOO_MANY_CHILDREN = "too_many_children"
JOIN_WITHOUT_CHILDREN = "join_without_children"
END_WITHOUT_JOIN = "end_without_join"
CLOSE_OUTSIDE_CHILD = "close_outside_child"
END_TOKEN_IN_CHILD = "end_token_in_child"
FORCED_TOKEN_SAMPLED = "forced_token_sampled"
CACHE_FULL = "cache_full"

ANOMALIES = (
    UNCLOSED_CHILD, LENGTH_MISSING, LENGTH_CLAMPED, LENGTH_EXCEEDED, OPENER_NOT_COMPLETED, OPENER_TOO_DEEP, OPENER_OUT_OF_PLACE,
    TOO_MANY_CHILDREN, JOIN_WITHOUT_CHILDREN, END_WITHOUT_JOIN, CLOSE_OUTSIDE_CHILD, END_TOKEN_IN_CHILD, FORCED_TOKEN_SAMPLED,
    CACHE_FULL,
)  # fmt: skip
