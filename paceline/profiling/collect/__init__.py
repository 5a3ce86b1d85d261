"""What a look at a running process collects, level by level; each can fail alone."""
