"""Actors: one a file, each an `async def run(..., *, task_status)` under the node's one nursery."""
