"""The figures that need a GPU, in three parts of some minutes each: ``python -m benchmarks.gpu``."""
