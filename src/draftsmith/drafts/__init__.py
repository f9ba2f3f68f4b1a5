"""Draft models: a student made from a target, the draft's vocabulary, its checkpoint on disk."""
