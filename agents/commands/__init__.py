"""Subcommands of `failslow-agent`, one module each."""
