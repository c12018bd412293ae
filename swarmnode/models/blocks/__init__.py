"""Parts of a layer that architectures share: each adds ggml nodes to a graph and names its intermediates."""
