"""Trees of a git repository: the user's files now, revisions, and folders to run them in. Standard library and git."""
