"""Checkpoint layouts of serving engines, written and read."""
