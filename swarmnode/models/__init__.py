"""The backbone's side of a model: forward pass without the routed experts, state, tokenizer, chat, sampling.

One file per architecture; `registry.open_model` picks it by the GGUF key `general.architecture`.
"""
