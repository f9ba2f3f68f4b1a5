"""Draft models: building a student from a target, the draft's vocabulary, and its checkpoint on disk."""
