"""Makes swarmnode's bundled model from a public-domain book; see README.md for the command lines."""
