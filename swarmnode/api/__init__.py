"""The backbone's HTTP face: OpenAI's completion routes (the subset in docs/api.md), health and the swarm's state."""
