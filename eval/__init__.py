"""Acceptance rules, decoding loops, estimates, checks of losslessness and reports."""
