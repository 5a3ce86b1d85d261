"""The asynchronous pipeline: target roles make features, a bounded ordered channel carries them, a drafter takes them.

Roles are handed callables and know neither models nor losses.
"""
