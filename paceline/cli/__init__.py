"""The command line: one file per group of verbs; each parses, builds and calls, and holds no algorithm."""
