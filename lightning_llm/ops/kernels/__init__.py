"""Triton kernels. Imported by ``ops/fused.py`` alone, where they can run."""
