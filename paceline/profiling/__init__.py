"""Where a run's time goes: stages that roles emit, the page that carries them, and what reads it."""
