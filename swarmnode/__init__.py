"""swarmnode: serve a large Mixture-of-Experts model from devices none of which could hold it."""

__version__ = "0.1.0"
