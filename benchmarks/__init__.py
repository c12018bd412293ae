"""Commands that print the numbers of the docs, each beside its peer; see README.md in this folder."""
