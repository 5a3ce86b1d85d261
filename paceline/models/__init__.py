"""The frozen target and the drafter. Knows neither queues nor the optimizer."""
