"""The report of a run: one self-contained page and its short twin for pull requests."""
