"""Attention of draft blocks, and the loss that never holds full logits. Knows neither models nor training."""
