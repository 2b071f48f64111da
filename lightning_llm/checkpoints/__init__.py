"""Checkpoint files: written, read without running code, validated, sharded, compared with a model."""
