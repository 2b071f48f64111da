"""What proves the claims of lightning-llm; run from the root of a clone by ``python -m benchmarks NAME``."""
