"""Reports: one record for runs, experiments, sizes, streams, and tables, and one renderer. See ``record`` first."""
