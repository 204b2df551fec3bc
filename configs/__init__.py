"""Recipes: YAML and command line in, frozen dataclasses out."""
