"""The run folder and the signals that stop a run. Knows no models."""
