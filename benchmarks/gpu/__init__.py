"""The figures that need a GPU, in lists of ten minutes each: ``python -m benchmarks.gpu``."""
