"""What a distillation takes, before anything is spent: sizes, memory, disk, tokens, hours."""
