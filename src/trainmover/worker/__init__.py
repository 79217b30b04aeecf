"""One training process: its lifecycle, the user's API, loop-back, adoption of a rank."""
