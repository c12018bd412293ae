"""The kit that tests of every room use, shipped so that others can test against swarmnode: tiny model files and more.

Nothing in the package imports it.
"""
