"""The method as pure tensor functions, in the order of a step: anchors, blocks, mask, loss weights, acceptance.

Nothing here knows configuration, devices, collectives or logging;
rows and anchors are on the host. Shape letters: S tokens of a packed row, A anchor
slots, K block size, J = K - 1 + label_shift predicted slots of a block.
"""
