"""Objectives and the loop that fits a drafter to target records."""
