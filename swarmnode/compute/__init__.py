"""Blocking compute on ggml: devices, graphs, weights, the bank of experts, and the numpy oracle that
checks them.

`ggml.py` is the only importer of ggml-python. Everything here blocks and runs on one OS thread of the process
(`thread.py`); nothing here knows trio, peers or files.
"""
