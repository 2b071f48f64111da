"""Any command that trains as the program of an experiment: its template, its processes, and what its output says."""
