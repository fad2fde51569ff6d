"""Tree attention: every node of a prefix tree attends to its ancestors and itself.

    interface   called by transformers; what it requires of layers; keys and values kept between chunks
    tiles       CPU: rectangles of queries and keys, merged by their log-sum-exp; no mask, nothing quadratic is stored
    capped      CPU: a rectangle with soft-capped scores, block by block
    varlen      GPU: each run of nodes is a sequence of queries over the keys on its path from the root
    flex        GPU: FlexAttention, with a block mask derived from the tree
    select      chooses the kernel for a device; `Dense`, a [T, T] mask through stock attention: the reference

Shapes: T nodes of a micro-batch, C nodes of its context before them, H heads, K key/value heads, D head size.
"""
