"""Readers of other tools' files: each turns one into the records that our own agents would have sent."""
