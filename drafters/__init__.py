"""Draft model families behind one contract, their registry and checkpoints."""
