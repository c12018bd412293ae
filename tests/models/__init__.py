"""Tests of swarmnode.models."""
