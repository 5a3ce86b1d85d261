"""Conversations to packed token batches: the first part of a sample's journey.

``readers`` lines to conversations, ``chat`` conversations to tokens and loss mask, ``prepare`` the whole command,
``dataset`` the folder on disk, ``packing`` rows to batches, ``inspect`` what a person looks at.
"""
