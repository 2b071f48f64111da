"""A run on disk: its directory, lock and status, its options, and how runs are found and named."""
