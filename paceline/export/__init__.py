"""Folders that inference engines load, checked after writing. Knows nothing of training."""
