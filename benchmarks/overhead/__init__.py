"""Overhead of the agent beside real processes of the testbed: `make overhead` runs it, docs/overhead.md explains it."""
