"""What a drafter is worth: the decode loop, acceptance length, losslessness and speed. Knows nothing of training."""
