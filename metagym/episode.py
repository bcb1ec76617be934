"""The episode loop: the one place that plays an episode, and the one that turns exceptions into a stop reason."""
