"""Conversations to packed token batches: the first part of a sample's journey.

``inputs`` what a command line names, ``reading`` files to records, ``dialects`` records to conversations,
``templates`` and ``encoder`` conversations to text and text to ids, ``chat`` these to rows with a loss mask, ``rows``
all of that for a chunk, ``prepare`` the whole command, ``dataset`` the folder on disk, ``packing`` and ``plan_cache``
rows to batches, ``inspect`` what a person looks at; ``regenerate``, ``server`` and ``answer_folder`` the target's own
answers.
"""
