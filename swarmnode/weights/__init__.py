"""Model files: an index over (split) GGUFs, slices of experts, a manifest of hashes, shard files and a
worker's store.

Nothing here computes, and tensor bytes are never read before somebody asks for them: everything goes through
mmap. Whatever a loader later hands to ggml has been checked here, because ggml aborts the process instead of
raising.
"""
